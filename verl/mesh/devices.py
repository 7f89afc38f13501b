"""The `devices` of a role: indices, "node:index", ranges of both, or all. The rest is answered with what to write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from verl.mesh.document import Node
from verl.mesh.spec import Device

Complain = Callable[[Node, str, str], None]
"""(node, dotted path, what is wrong and what to do)"""

ALL = "all"
MOST_DEVICES = 10_000
"""Of one role; ranges could name billions."""

_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "hpu", "mps")
_DEVICE = re.compile(r"(?:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):)?([0-9]{1,6})(?:-([0-9]{1,6}))?")
"""node:first-last, of which only `first` must be there."""
_LARGEST_INDEX = 999_999
_MOST_NAMED = 8
_FORMS = 'an index (0), a range (0-3) or either of a node ("node1:0", "node1:0-3")'


def is_all(entries: Mapping[str, Node]) -> bool:
    """Whether a role's `devices` is the whole job."""
    return "devices" in entries and entries["devices"].value == ALL


def read_devices(role_node: Node, entries: Mapping[str, Node], role: str, complain: Complain) -> tuple[Device, ...]:
    """The devices of a role in the listed order, ranges written out; () for the whole job.

    Also () where one of them cannot be read, since no count holds then.
    """
    path, node = f"{role}.devices", entries.get("devices")
    if node is None:
        if isinstance(role_node.value, dict):  # anything else was complained of already
            complain(role_node, path, "missing; name the role's devices, for example devices: [0, 1]")
        return ()
    if is_all(entries):
        return ()
    if not isinstance(node.value, tuple):
        complain(node, path, f"needs a list, for example [0, 1], or all, got {node}{_as_list(node)}")
        return ()
    if not node.value:
        complain(node, path, "the list is empty; name at least one device, for example [0]")
    return _listed(node, node.value, path, complain)


def _listed(node: Node, items: Sequence[Node], path: str, complain: Complain) -> tuple[Device, ...]:
    """The devices of a list. Each stands in it once, and all are spelled one way."""
    first: dict[Device, int] = {}
    whole, total = True, 0
    for position, item in enumerate(items):
        here = f"{path}[{position}]"
        devices = _devices(item, here, complain)
        total += len(devices)
        if total > MOST_DEVICES:
            complain(item, here, f"with {item} the role has more than {MOST_DEVICES} devices; list fewer")
            return ()
        twice = [device for device in devices if device in first]
        if twice:
            complain(item, here, _named_twice(item, twice, first))
        whole = whole and bool(devices) and not twice
        first |= {device: position for device in devices if device not in first}
    if len({device.node is None for device in first}) == 2:
        complain(node, path, 'mixes an index alone with "node:index"; spell all devices one way')
    return tuple(first) if whole else ()


def _named_twice(item: Node, twice: Sequence[Device], first: Mapping[Device, int]) -> str:
    named = ", ".join(str(device) for device in twice[:_MOST_NAMED])
    named += f" and {len(twice) - _MOST_NAMED} more" if len(twice) > _MOST_NAMED else ""
    others = ", ".join(f"[{position}]" for position in sorted({first[device] for device in twice})[:_MOST_NAMED])
    if len(twice) == 1 and str(twice[0]) == item.text:
        return f"{named} stands at {others} too; name it once"
    return f"{item} names {named}, which {others} names too; name each device once"


def _devices(node: Node, path: str, complain: Complain) -> Sequence[Device]:
    """The devices of one entry of the list; () if it cannot be read."""
    if type(node.value) is int:  # type(): a bool is an int
        if 0 <= node.value <= _LARGEST_INDEX and node.text != str(node.value):  # 010 is 8 to YAML, and 0x10 is 16
            complain(node, path, f"{node} is the number {node.value} in YAML; write it so, or without the zero")
            return ()
        if 0 <= node.value <= _LARGEST_INDEX:
            return (Device(None, node.value),)
        complain(node, path, f"needs an index from 0 to {_LARGEST_INDEX}, got {node}")
        return ()
    if not isinstance(node.value, str):
        complain(node, path, f"needs {_FORMS}, got {node}")
        return ()
    match = _DEVICE.fullmatch(node.value)
    wrong = _wrong(node.value, match)
    if wrong:
        complain(node, path, f"{node} {wrong}")
        return ()
    assert match is not None
    name, low, high = match[1], int(match[2]), int(match[3] or match[2])
    return [Device(name, index) for index in range(low, min(high, low + MOST_DEVICES) + 1)]


def _wrong(text: str, match: re.Match[str] | None) -> str:
    """What is wrong with a string as a device, and what to write instead; "" for nothing."""
    if text in _ACCELERATORS or (match and match[1] in _ACCELERATORS):
        index = text.partition(":")[2] or "0"
        return f'is not how a device is named here; write {index}, or "node1:{index}" in a job of several nodes'
    if text.strip().lower() == ALL:
        return "is the whole job; write devices: all, without a list"
    if match is None:
        return f"is not a device; write {_FORMS}"
    if match[1] is not None and match[1].isdecimal() and match[3] is None and int(match[1]) < int(match[2]):
        return _no_slice(int(match[1]), int(match[2]))
    if match[1] is None and match[3] is None:
        return f"is text; write {int(match[2])} without quotes"
    if match[3] is not None and int(match[3]) < int(match[2]):
        node = f"{match[1]}:" if match[1] else ""
        return f"runs backwards; write {node}{match[3]}-{match[2]}, or list the devices one by one in that order"
    return ""


def _no_slice(first: int, last: int) -> str:
    """FIRST:LAST could be device LAST of a node that is called FIRST, but is more likely meant as in Python."""
    python = f"{first}-{last - 1}" if last - 1 > first else str(first)
    return (
        f"is not read, since it could be a range or device {last} of a node {first}; write {python} for what it is in "
        f"Python, {first}-{last} for a range with {last} in it, or call the node by a name with a letter "
        "(VERL_NODE_NAME, or node0, node1, ...)"
    )


def _as_list(node: Node) -> str:
    """How to write what is no list as one, where that is clear."""
    if type(node.value) is int and node.value >= 0:
        return f"; write [{node}]"
    if isinstance(node.value, str):
        if node.value.strip().lower() == ALL:
            return "; write all"
        if node.value.strip().lower() == "auto":
            return "; write all for every device of the job, or list them"
        if not _wrong(node.value, _DEVICE.fullmatch(node.value)):
            return f"; write [{node}]"
        parts = re.split(r"[,\s]+", node.value.strip())
        if len(parts) > 1 and all(_DEVICE.fullmatch(part) for part in parts):
            return f"; write [{', '.join(parts)}]"
    return ""

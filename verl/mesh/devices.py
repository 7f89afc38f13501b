"""The `devices` of a role: indices, or "node:index". Everything else is answered with the spelling to use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from verl.mesh.document import Node, shorten
from verl.mesh.spec import Device

Complain = Callable[[Node, str, str], None]
"""(node, dotted path, what is wrong and what to do)"""

_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "hpu", "mps")
_NODE_DEVICE = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):([0-9]{1,6})")
_RANGE = re.compile(r"([A-Za-z0-9._-]+:)?([0-9]{1,6})-([0-9]{1,6})")
_LONGEST_SPELLED_RANGE = 16
_LARGEST_INDEX = 999_999


def read_devices(role_node: Node, entries: Mapping[str, Node], role: str, complain: Complain) -> tuple[Device, ...]:
    """The devices of a role in the listed order; () where one of them cannot be read, since no count holds then."""
    path, node = f"{role}.devices", entries.get("devices")
    if node is None:
        if isinstance(role_node.value, dict):  # anything else was complained of already
            complain(role_node, path, "missing; name the role's devices, for example devices: [0, 1]")
        return ()
    if not isinstance(node.value, tuple):
        complain(node, path, f"needs a list, for example [0, 1], got {node}{_spelled_list(node)}")
        return ()
    if not node.value:
        complain(node, path, "the list is empty; name at least one device, for example [0]")
    first: dict[Device, int] = {}
    for position, item in enumerate(node.value):
        device = _device(item, f"{path}[{position}]", complain)
        if device is not None and first.setdefault(device, position) != position:
            complain(item, f"{path}[{position}]", f"{device} stands at [{first[device]}] too; name it once")
    if len({device.node is None for device in first}) == 2:
        complain(node, path, 'mixes an index alone with "node:index"; spell all devices one way')
    return tuple(first) if len(first) == len(node.value) else ()


def _device(node: Node, path: str, complain: Complain) -> Device | None:
    if type(node.value) is int:  # type(): a bool is an int
        if 0 <= node.value <= _LARGEST_INDEX:
            return Device(None, node.value)
        complain(node, path, f"needs an index from 0 to {_LARGEST_INDEX}, got {node}")
    elif isinstance(node.value, str):
        match = _NODE_DEVICE.fullmatch(node.value)
        if match and match[1] not in _ACCELERATORS:
            return Device(match[1], int(match[2]))
        complain(node, path, f"{node} {_remedy(node.value, match)}")
    else:
        complain(node, path, f'needs an index (0) or "node:index" ("node1:0"), got {node}')
    return None


def _remedy(text: str, match: re.Match[str] | None) -> str:
    """What is wrong with a string that names no device, and what to write instead."""
    if match or text in _ACCELERATORS:
        index = match[2] if match else "0"
        return f'is not how a device is named here; write {index}, or "node1:{index}" in a job of several nodes'
    if re.fullmatch("[0-9]+", text):
        return f"is text; write {shorten(text)} without quotes"
    span = _RANGE.fullmatch(text)
    if span:
        return f"is a range; write every device{_spelled_range(span)}"
    return 'is not a device; write an index (0) or "node:index" ("node1:0")'


def _spelled_range(span: re.Match[str]) -> str:
    node, first, last = span[1] or "", int(span[2]), int(span[3])
    if not first <= last < first + _LONGEST_SPELLED_RANGE:
        return ""
    quote = '"' if node else ""
    return ": " + ", ".join(f"{quote}{node}{index}{quote}" for index in range(first, last + 1))


def _spelled_list(node: Node) -> str:
    if type(node.value) is int and node.value >= 0:
        return f"; write [{node}]"
    if node.value in ("all", "auto"):
        return "; write every device"
    if isinstance(node.value, str) and _NODE_DEVICE.fullmatch(node.value):
        return f"; write [{node}]"
    return ""

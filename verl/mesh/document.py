"""YAML read into values that know where they stand, so that a message can name the line.

Safe for text from anywhere: no tag makes an object, a cycle is refused, and aliases cannot multiply without bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import yaml
from yaml.reader import ReaderError

MAX_CHARACTERS = 256 * 1024
MAX_VALUES = 100_000
MAX_DEPTH = 100
_LONGEST_NUMBER = 1000  # characters; a longer scalar is text, since huge integers cost quadratic time
_SHOWN_CHARACTERS = 60
_TAG = "tag:yaml.org,2002:"
_REMEDIES = {
    r"'\t' that cannot start any token": "a tab stands where only spaces may",
    "that cannot start any token": "put quotes around the value",
    "unexpected end of stream": "close the quotation mark",
    "expected ',' or": "close the bracket, and part its entries by commas",
    "expected <block end>": "begin the keys of one mapping in one column, and put a space behind each colon",
    "mapping values are not allowed": "begin a key on a line of its own, under its neighbours",
    "could not find expected ':'": "put a colon and a space behind the key",
    "found undefined alias": "put the anchor (&) before its first use",
}
"""Part of PyYAML's words -> what to do."""

Scalar = None | bool | int | float | str


@dataclass(frozen=True)
class Node:
    """A value and its place, "file:line" (for an entry of a mapping the line of its key)."""

    value: Scalar | tuple[Node, ...] | dict[str, Node]
    place: str
    text: str = ""
    """A scalar as it is written."""
    size: int = 1
    """Values in it, itself included, with every alias written out."""

    def __str__(self) -> str:
        """The value as a message shows it, cut short."""
        if isinstance(self.value, dict):
            return "a mapping" if self.value else "{}"
        if isinstance(self.value, tuple):
            return "a list" if self.value else "[]"
        if self.value is None:
            return "nothing"
        return f'"{shorten(self.text)}"' if isinstance(self.value, str) else shorten(self.text)

    def plain(self) -> Any:
        """The value without places, as `yaml.safe_load` gives it."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return [node.plain() for node in self.value]
        return self.value


def read(text: str, source: str, *, numbered: bool = True) -> tuple[Node | None, list[str]]:
    """Reads one YAML document.

    Args:
        text: the document.
        source: its file, for the places.
        numbered: places are "source:line"; off: `source` alone.
    Returns:
        The root (None if the text cannot be read at all) and every problem found, each with its place.
    """
    if len(text) > MAX_CHARACTERS:
        return None, [f"{source}: {len(text)} characters are more than the {MAX_CHARACTERS} that are read"]
    reader = _Reader(source, numbered)
    try:
        return reader.root(text), reader.problems
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = reader.place(mark) if mark else source
        said = ", ".join(part for part in (error.context, error.problem) if part)
        return None, [f"{place}: not valid YAML: {said}{_remedy(error)}"]
    except ReaderError as error:
        line = f":{text[: error.position].count(chr(10)) + 1}" if numbered else ""
        what = f"the character U+{error.character:04X} may not stand in it; take it out"
        return None, [f"{source}{line}: not valid YAML: {what}"]
    except _Refused as refusal:
        return None, [*reader.problems, f"{reader.place(refusal.mark)}: {refusal}"]


def _remedy(error: yaml.MarkedYAMLError) -> str:
    """What to do about the commonest slips, of which YAML itself speaks in its grammar's words."""
    problem = error.problem or ""
    return next((f"; {remedy}" for sign, remedy in _REMEDIES.items() if sign in problem), "")


def wrap(value: object, place: Callable[[str], str], path: str = "") -> Node:
    """The Node of plain data. `place` gives the place of a dotted path; `value` is a tree of dict, list and scalars."""
    here = place(path)
    if isinstance(value, dict):
        return branch({str(key): wrap(item, place, f"{path}.{key}".lstrip(".")) for key, item in value.items()}, here)
    if isinstance(value, list):
        return branch(tuple(wrap(item, place, path) for item in value), here)
    if value is None or isinstance(value, bool | int | float | str):
        return Node(value, here, _spelt(value))
    return Node(str(value), here, str(value))


def _spelt(value: object) -> str:
    """A scalar as YAML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value).replace("inf", ".inf").replace("nan", ".nan")
    return str(value)


def branch(value: tuple[Node, ...] | dict[str, Node], place: str) -> Node:
    """The Node of a list or mapping."""
    children = value.values() if isinstance(value, dict) else value
    return Node(value, place, size=1 + sum(child.size for child in children))


def shorten(text: str) -> str:
    """Text of the user's as a message shows it: on one line and not too long."""
    line = text if text.isprintable() else text.encode("unicode_escape").decode()
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "..."


class _Refused(Exception):
    """A document that is not read any further, and where it stopped."""

    def __init__(self, mark: Any, what: str) -> None:
        super().__init__(what)
        self.mark = mark


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with the one change that everybody expects: 1e-5 is a number."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth == MAX_DEPTH:
            raise _Refused(
                self.peek_event().start_mark, f"more than {MAX_DEPTH} levels of lists and mappings are not read"
            )
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.add_implicit_resolver(_TAG + "float", re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789"))


class _Reader:
    def __init__(self, source: str, numbered: bool) -> None:
        self.source = source
        self.numbered = numbered
        self.problems: list[str] = []
        self._scalars = _Loader("")
        self._done: dict[int, Node] = {}  # by id of the YAML node, which is one object for an anchor and its aliases
        self._open: set[int] = set()
        self._copied = 0

    def root(self, text: str) -> Node:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        return self._convert(node) if node is not None else Node(None, self.source)

    def place(self, mark: Any) -> str:
        return f"{self.source}:{mark.line + 1}" if self.numbered else self.source

    def _convert(self, node: yaml.Node) -> Node:
        if id(node) in self._done:
            return self._done[id(node)]
        place = self.place(node.start_mark)
        if id(node) in self._open:
            raise _Refused(node.start_mark, "this value contains itself; an alias may not stand inside its own anchor")
        if node.tag not in (_TAG + "map", _TAG + "seq", _TAG + "str", self._implicit_tag(node)):
            raise _Refused(node.start_mark, f"the tag {node.tag.removeprefix(_TAG)} is not read; write the value alone")
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            converted = branch(self._mapping(node), place)
        elif isinstance(node, yaml.SequenceNode):
            converted = branch(tuple(self._convert(item) for item in node.value), place)
        else:
            assert isinstance(node, yaml.ScalarNode)
            converted = self._scalar(node, place)
        if converted.size > MAX_VALUES:
            raise _Refused(
                node.start_mark, f"{converted.size} values with all aliases written out; at most {MAX_VALUES} are read"
            )
        self._open.remove(id(node))
        self._done[id(node)] = converted
        return converted

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        own: dict[str, Node] = {}
        for key, value in node.value:
            place = self.place(key.start_mark)
            if key.tag == _TAG + "merge":
                merged = self._merged(value) | merged
            elif not isinstance(key, yaml.ScalarNode):
                self.problems.append(f"{place}: a key must be a name, not a list or a mapping")
            elif key.value in own:
                first = own[key.value].place
                self.problems.append(f"{place}: {shorten(key.value)}: stands twice, first at {first}; keep one of them")
            else:
                own[key.value] = replace(self._convert(value), place=place)
        return merged | own

    def _merged(self, node: yaml.Node) -> dict[str, Node]:
        """What `<<: *anchor` or `<<: [*first, *second]` brings in; the first of a list wins."""
        entries: dict[str, Node] = {}
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            converted = self._convert(source)
            if isinstance(converted.value, dict):
                entries = converted.value | entries
                self._copied += len(entries)  # a chain of merges copies quadratically
                if self._copied > MAX_VALUES:
                    raise _Refused(source.start_mark, f"merge keys copy more than {MAX_VALUES} entries")
            else:
                self.problems.append(f"{self.place(source.start_mark)}: << merges mappings, not {converted}")
        return entries

    def _implicit_tag(self, node: yaml.Node) -> str:
        """The tag of a value that is written without one."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return self._scalars.resolve(type(node), node.value, (plain, not plain))

    def _scalar(self, node: yaml.ScalarNode, place: str) -> Node:
        text: str = node.value
        sexagesimal = ":" in text  # YAML 1.1 reads 10:3 as 603; here it is device 3 of node "10"
        kinds = (_TAG + "null", _TAG + "bool", _TAG + "int", _TAG + "float")
        if node.tag in kinds and len(text) <= _LONGEST_NUMBER and not sexagesimal:
            try:
                return Node(self._scalars.construct_object(node), place, text)
            except ValueError:  # such as 0b_
                pass
        return Node(text, place, text)

"""The picture of a mesh as an SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from verl.advise.picture import LEGEND, NodeColumns, Picture, longest_label, roles_on, side_by_side

_LINE, _NOTE_LINE, _EDGE, _MARGIN, _NODE_GAP, _LETTER = 28, 22, 16, 96, 18, 7.5
_NARROWEST_CELL = 62
_WIDEST_ROW = 1160
"""Of nodes side by side; the others come below, so that many nodes stay legible on a page."""
_COLOURS = {
    "actor": "#2f6db3",
    "critic": "#b84f27",
    "reference": "#557686",
    "reward": "#8a6d1f",
    "rollout": "#2f7d34",
}
"""Each dark enough for white text (contrast 4.5 and more)."""
_TEXT = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12"'


def as_svg(picture: Picture, title: str) -> str:
    """A document of its own; `title` is shown at the top."""
    cell = max(_NARROWEST_CELL, _pixels(longest_label(picture)) + 8)

    def node_width(node: NodeColumns) -> int:
        return max(len(node[1]) * cell, _pixels(len(node[0]))) + _NODE_GAP

    notes = [LEGEND, *(f"{role}: {note}" for role, note in zip(picture.roles, picture.notes, strict=True))]
    body = [_text(_EDGE, 20, title, bold=True)]
    width, top = _EDGE + max(_pixels(len(line)) for line in (title, *notes)), _LINE
    for nodes in side_by_side(picture.nodes, _WIDEST_ROW - _MARGIN, node_width):
        roles = roles_on(picture, nodes)
        body += [_text(_EDGE, top + (2 + row) * _LINE + 18, picture.roles[role]) for row, role in enumerate(roles)]
        left = _MARGIN
        for node in nodes:
            body += _node(node, picture.roles, roles, left, top, cell)
            left += node_width(node)
        width, top = max(width, left), top + (2 + len(roles)) * _LINE + _NODE_GAP
    body += [_text(_EDGE, top + row * _NOTE_LINE + 12, note) for row, note in enumerate(notes)]
    width, height = width + _EDGE, top + len(notes) * _NOTE_LINE + _EDGE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{chr(10).join(body)}\n</svg>\n'
    )


def _pixels(letters: int) -> int:
    return round(letters * _LETTER)


def _node(
    node: NodeColumns, names: Sequence[str], roles: Sequence[int], left: int, top: int, cell: int
) -> Iterator[str]:
    """A node's name, the indices of its devices, and a row of cells for each of `roles` (numbers into `names`)."""
    yield _text(left, top + _LINE - 4, node[0], bold=True)
    for number, column in enumerate(node[1]):
        x = left + number * cell
        yield _text(x + cell // 2, top + 2 * _LINE - 8, column.head, middle=True)
        for row, role in enumerate(roles):
            yield _cell(x, top + (2 + row) * _LINE, cell, column.cells[role], _COLOURS[names[role]])


def _cell(x: int, y: int, width: int, label: str, colour: str) -> str:
    box = f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{_LINE - 2}" rx="3"'
    if not label:
        return f'{box} fill="#eeeeee"/>'
    return f'{box} fill="{colour}"/>{_text(x + width // 2, y + 18, label, middle=True, colour="#ffffff")}'


def _text(x: int, y: int, text: str, bold: bool = False, middle: bool = False, colour: str = "#222222") -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    return f'<text x="{x}" y="{y}" {_TEXT}{style} fill="{colour}">{escape(text)}</text>'

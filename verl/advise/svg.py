"""The picture of a mesh as an SVG file."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from verl.advise.picture import LEGEND, Picture

_CELL, _LINE, _MARGIN, _NODE_GAP, _LETTER = 62, 28, 96, 18, 7
_COLOURS = {
    "actor": "#2f6db3",
    "critic": "#c0562d",
    "reference": "#6b8e9f",
    "reward": "#8a6d1f",
    "rollout": "#3c8d40",
}
_TEXT = 'font-family="ui-monospace, Menlo, Consolas, monospace" font-size="12"'


def as_svg(picture: Picture, title: str) -> str:
    """A document of its own; `title` is shown at the top."""
    lines = [title, *_notes(picture)]
    columns = sum(len(node) for _, node in picture.nodes)
    grid = _MARGIN + columns * _CELL + len(picture.nodes) * _NODE_GAP
    width = max(grid, 16 + max(len(line) for line in lines) * _LETTER + 32)
    height = (len(picture.roles) + 3 + len(lines)) * _LINE
    body = "\n".join(_body(picture, title))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _notes(picture: Picture) -> Iterator[str]:
    yield LEGEND
    yield from (f"{role}: {note}" for role, note in zip(picture.roles, picture.notes, strict=True))


def _body(picture: Picture, title: str) -> Iterator[str]:
    yield _text(16, _LINE - 8, title, bold=True)
    top = 3 * _LINE
    for number, role in enumerate(picture.roles):
        yield _text(16, top + number * _LINE + 18, role)
    left = _MARGIN
    for name, columns in picture.nodes:
        yield _text(left, top - _LINE - 4, name, bold=True)
        for column in columns:
            yield _text(left + _CELL // 2, top - 8, column.head, middle=True)
            for number, (role, cell) in enumerate(zip(picture.roles, column.cells, strict=True)):
                yield _cell(left, top + number * _LINE, cell, _COLOURS[role])
            left += _CELL
        left += _NODE_GAP
    below = top + len(picture.roles) * _LINE + 8
    for number, line in enumerate(_notes(picture)):
        yield _text(16, below + (number + 1) * (_LINE - 6), line)


def _cell(x: int, y: int, label: str, colour: str) -> str:
    fill, shown = (
        (colour, _text(x + _CELL // 2, y + 18, label, middle=True, colour="#ffffff")) if label else ("#eeeeee", "")
    )
    return f'<rect x="{x + 1}" y="{y + 1}" width="{_CELL - 2}" height="{_LINE - 2}" rx="3" fill="{fill}"/>{shown}'


def _text(x: int, y: int, text: str, bold: bool = False, middle: bool = False, colour: str = "#222222") -> str:
    style = (' font-weight="bold"' if bold else "") + (' text-anchor="middle"' if middle else "")
    return f'<text x="{x}" y="{y}" {_TEXT}{style} fill="{colour}">{escape(text)}</text>'

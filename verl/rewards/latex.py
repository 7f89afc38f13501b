r"""Answers written in LaTeX: the content of `\boxed{...}`, and one notation for what means the same."""

from __future__ import annotations

import re
from fractions import Fraction

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*(\{)|\\.|([{}])", re.DOTALL)
_SPACING = re.compile(r"\\[!,;: ]|\\q?quad|~|\s")
_UNIT = re.compile(r"(?<=\S)\s*\\(?:text|mbox|mathrm)\{\s[^{}]*\}\s*$")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_BARE_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|(\w))(?:\{([^{}]*)\}|(\w))")
_BARE_ROOT = re.compile(r"\\sqrt(\w)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_NAME = re.compile(r"^[A-Za-z]{1,2}=")
_RATIONAL = re.compile(
    r"(-?)(?:(\d{1,400})/(\d{1,400})|\\frac\{(-?\d{1,400})\}\{(-?\d{1,400})\}|(\d{0,400}(?:\.\d{0,400})?))"
)


def boxed_answer(text: str) -> str | None:
    r"""The content of the last whole `\boxed{...}` (or `\fbox{...}`), braces balanced; None where there is none."""
    opened: list[int | None] = []  # for each open brace where its content starts if it is a box's
    last = None
    for brace in _BRACE.finditer(text):
        if brace[1]:
            opened.append(brace.end())
        elif brace[2] == "{":
            opened.append(None)
        elif brace[2] == "}" and opened:
            start = opened.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, brace.start())
    return None if last is None else text[slice(*last)]


def normalize_answer(answer: str) -> str:
    r"""One spelling for answers that mean the same.

    White space and LaTeX spacing, `$`, `\left` and `\right`, degree and percent signs, a trailing full stop, a unit
    (a closing `\text{ cm}` that begins with a space), thousands separators, and a short name before `=` are dropped;
    `\text{x}` is x;
    `\dfrac` and `\tfrac` are `\frac`; `\frac12` and `\sqrt3` get their braces. An answer that is then one integer,
    decimal or fraction becomes the reduced fraction: 0.5, 1/2 and `\frac{2}{4}` are alike. Nothing is computed beyond
    that: `2+2` is not 4.
    """
    text = answer.replace("\u2212", "-").replace(r"\$", "").replace("$", "")
    text = _WORDS.sub(r"\1", _UNIT.sub("", text))
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°|\\?%|\\left(?![a-z])|\\right(?![a-z])", "", text)
    text = _SPACING.sub("", text).removesuffix(".")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = _BARE_FRACTION.sub(_braced_fraction, text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    text = _NAME.sub("", _THOUSANDS.sub("", text))
    rational = _as_rational(text)
    return text if rational is None else str(rational)


def _braced_fraction(fraction: re.Match[str]) -> str:
    top, bottom = (braced if bare is None else bare for braced, bare in (fraction.group(1, 2), fraction.group(3, 4)))
    return rf"\frac{{{top}}}{{{bottom}}}"


def _as_rational(text: str) -> Fraction | None:
    match = _RATIONAL.fullmatch(text)
    if match is None:
        return None
    sign, plain_top, plain_bottom, top, bottom, decimal = match.groups()
    try:
        value = (
            Fraction(decimal) if decimal is not None else Fraction(int(plain_top or top), int(plain_bottom or bottom))
        )
    except (ValueError, ZeroDivisionError):  # no digit at all; a zero denominator
        return None
    return -value if sign else value

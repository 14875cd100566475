"""Pieces of HTML for ``_repr_html_``: every text is escaped, nothing is a script, and colours are left to the page.

Borders are half transparent and letters keep the page's colour, so that light and dark notebooks can both be read.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Joiners that emoji and several scripts need; they cannot reorder or hide anything.
_JOINERS = "\u200c\u200d"
_LINE = "border-bottom:1px solid #8886;padding:.2em .7em"
_PERCENT = re.compile(r"[+−-]?[0-9.,]+ %")
#: Characters of a cell.
MOST = 120
#: Names like ``$\href{...}{...}$`` must not be typeset: MathJax of any age leaves elements of these classes alone.
_CLASSES = "inrun tex2jax_ignore mathjax_ignore"


def shown(text: object, most: int = MOST) -> str:
    """Return one line in which control, bidirectional and other format characters can be seen and do nothing; not yet escaped."""
    whole = str(text)
    cut = whole if len(whole) <= most else whole[: max(most - 1, 0)] + "…"
    if not (cut.isascii() and cut.isprintable()):
        cut = " ".join("".join(map(_visible, cut)).split())
    return cut


def _visible(char: str) -> str:
    if char.isspace() or char in _JOINERS:
        return char if char in _JOINERS else " "
    return f"⟨U+{ord(char):04X}⟩" if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else char


def escaped(text: object, most: int = MOST) -> str:
    """Return a text for the inside of an element or an attribute."""
    return html.escape(shown(text, most), quote=True)


def number(value: float, signed: bool = False) -> str:
    """Return a number for people, with a real minus."""
    if not math.isfinite(value):
        return str(value)
    return (f"{value:+.4g}" if signed and value else f"{value:.4g}").replace("-", "−")


def cell(value: Any, signed: bool = False) -> tuple[str, bool]:
    """Return a cell, escaped, and whether it is a number."""
    if value is None:
        return "–", False
    if isinstance(value, bool):
        return ("yes" if value else "no"), False
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−"), True
    if isinstance(value, float):
        return number(value, signed), True
    return escaped(value), isinstance(value, str) and bool(_PERCENT.fullmatch(value))


def table(header: Sequence[str], rows: Iterable[Sequence[Any] | None], signed: Sequence[str] = ()) -> str:
    """Return a table.

    Args:
        header: Names of the columns; untrusted.
        rows: Their cells: text (untrusted), numbers or None. A row of None stands for rows that are left out.
        signed: Columns whose numbers always have a sign.
    """
    cells = [[("⋮", True) if row is None else cell(row[i], n in signed) for i, n in enumerate(header)] for row in rows]
    right = [any(row[i][1] for row in cells) for i in range(len(header))]

    def put(tag: str, text: str, i: int) -> str:
        place = "right" if right[i] else "left"
        scope = ' scope="col"' if tag == "th" else ""
        return f'<{tag}{scope} style="{_LINE};text-align:{place}">{text}</{tag}>'

    head = "".join(put("th", escaped(name), i) for i, name in enumerate(header))
    body = "".join(f"<tr>{''.join(put('td', text, i) for i, (text, _) in enumerate(row))}</tr>" for row in cells)
    return f'<table style="border-collapse:collapse;margin:.3em 0"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def facts(known: Mapping[str, Any]) -> str:
    """Return a table of names and what is known of each; None is left out."""
    rows = "".join(
        f'<tr><th scope="row" style="{_LINE};text-align:left">{escaped(name)}</th>'
        f'<td style="{_LINE};text-align:left">{escaped(value, 400)}</td></tr>'
        for name, value in known.items()
        if value is not None
    )
    return f'<table style="border-collapse:collapse;margin:.3em 0"><tbody>{rows}</tbody></table>'


def lines(texts: Iterable[str]) -> str:
    """Return paragraphs."""
    return "".join(f'<p style="margin:.2em 0">{escaped(text, 600)}</p>' for text in texts)


def block(title: str, *pieces: str) -> str:
    """Return pieces of HTML under a title, which is untrusted."""
    return f'<div class="{_CLASSES}"><p style="margin:.2em 0"><strong>{escaped(title, 200)}</strong></p>{"".join(pieces)}</div>'

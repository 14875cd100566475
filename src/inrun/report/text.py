"""Untrusted text and numbers on their way into the page."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

#: Joiners that emoji and several scripts need; they cannot reorder or hide anything.
_JOINERS = "\u200c\u200d"
#: What a script element, an HTML parser or an old JavaScript engine could take for more than text.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def visible(text: object, most: int | None = None) -> str:
    """Return a text in which control, bidirectional and other format characters can be seen and do nothing.

    Args:
        text: Anything; it is turned into text first.
        most: Characters to keep; what is cut is marked by ``…``.
    """
    whole = str(text)
    cut = whole if most is None or len(whole) <= most else whole[: max(most - 1, 0)] + "…"
    cut = cut.replace("\r\n", "\n")
    return cut if cut.isascii() and cut.isprintable() else "".join(map(_shown, cut))


def _shown(char: str) -> str:
    if char in "\n\t" or char in _JOINERS:
        return char
    if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"⟨U+{ord(char):04X}⟩"
    return char


def one_line(text: object, most: int) -> str:
    """Return a name for labels: :func:`visible`, with line breaks and tabs as spaces."""
    return " ".join(visible(text, most).split()) or "(empty)"


def safe_json(data: Any) -> str:
    """Return JSON that can stand inside a script element: no character of it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char, escape in _ESCAPES.items():
        text = text.replace(char, escape)
    return text


def digits(value: float | None, keep: int = 5) -> float | None:
    """Round to significant digits, so that pages are small; None for what is not a finite number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{keep}g}") + 0.0  # no negative zero


def signed(value: float | None, keep: int = 3) -> str:
    """Return a number for people, always with its sign; a real minus, since these are read, not parsed."""
    if value is None:
        return "not measured"
    if value == 0:
        return "0"
    return _plain(value, keep, "+")


def number(value: float | None, keep: int = 3) -> str:
    """Return a number for people."""
    return "not measured" if value is None else _plain(value, keep, "")


def _plain(value: float, keep: int, sign: str) -> str:
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        head, _, power = f"{value:{sign}.{keep - 1}e}".partition("e")
        return f"{head}e{int(power)}".replace("-", "−")
    text = f"{value:{sign}.{keep}g}"
    return (f"{value:{sign}.0f}" if "e" in text else text).replace("-", "−")


def percent(value: float | None) -> str:
    """Return a share for people, with a digit more where it is small."""
    if value is None:
        return "not measured"
    shown = 100 * value
    if shown and abs(shown) < 0.1:
        return f"{shown:.1g}\u00a0%".replace("-", "−")
    return f"{shown:.{1 if shown and abs(shown) < 9.95 else 0}f}\u00a0%".replace("-", "−")


def counted(count: int, what: str) -> str:
    """Return a number of things: ``1 step``, ``2 steps``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def aligned(values: list[float]) -> list[str]:
    """Return numbers for a column: signed, and all with as many decimals as give the largest four digits."""
    most = max((abs(v) for v in values), default=0.0)
    decimals = max(3 - math.floor(math.log10(most)), 0) if most > 0 else 0
    if decimals > 8 or most >= 1e9:
        return [signed(v, 4) for v in values]
    return [f"{v:+.{decimals}f}".replace("-", "−") for v in values]

"""Untrusted text on a terminal."""

from __future__ import annotations

import unicodedata


def printable(text: str | bytes, width: int) -> str:
    """Return at most ``width`` characters with control, format and undecodable characters made visible as ``·``."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    shown = "".join("·" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029\ufffd" else c for c in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"

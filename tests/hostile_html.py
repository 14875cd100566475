"""What HTML in a notebook may be made of, read by a parser: whoever adds a tag or an attribute adds it here."""

from __future__ import annotations

import re
from html.parser import HTMLParser

TAGS = {"div", "p", "strong", "table", "thead", "tbody", "tr", "th", "td", "progress"}
ATTRIBUTES = {"class", "style", "scope", "value", "max", "aria-label"}


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.ignored = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in ATTRIBUTES, (tag, name)
            assert name != "style" or not re.search(r"url|expression|(?<![-a-z])color|background", value or ""), value
            self.ignored += "mathjax_ignore" in (value or "")

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")

    handle_decl = handle_pi = unknown_decl = handle_comment

    def handle_data(self, data: str) -> None:
        self.text += data


def plain_text(html: str) -> str:
    """Return the text of our HTML; AssertionError if anything but our own elements is in it, or letters that hide or reorder."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.ignored, "MathJax would typeset names"
    assert not set(reader.text) & set("\x00\x07\x1b\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u200b\u2028\ufeff")
    return reader.text

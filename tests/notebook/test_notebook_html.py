"""Pieces of HTML: escaped, whatever they hold."""

from __future__ import annotations

import pyarrow as pa
import pytest

from hostile_html import plain_text
from inrun.notebook import block, facts, html, lines, marked, table
from inrun.notebook.progress import bar_html
from inrun.notebook.scores import ENDS, scores_html
from report_payloads import PAYLOADS


def pieces(payload: str) -> str:
    hostile = [payload, f"a{payload}b"]
    made = table(hostile, [hostile, [1, -2.5]]), facts({payload: payload}), lines(hostile)
    return block(payload, *made) + bar_html(payload, 1, 2, 3.0)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_hostile_text_stays_text(payload: str) -> None:
    plain_text(pieces(payload))


def test_control_unescaped_text_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html.html, "escape", lambda text, quote=True: text)
    with pytest.raises(AssertionError):
        plain_text(pieces("<img src=x onerror=alert(1)>"))


def test_control_hidden_letters_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "_visible", lambda char: char)
    with pytest.raises(AssertionError):
        plain_text(pieces("\u202etxt.exe"))


def test_numbers_and_gaps_are_readable() -> None:
    text = plain_text(block("t", table(["score", "n", "x"], [[-0.25, 1234, None], [0.5, -1, True]], signed=["score"])))
    assert all(word in text for word in ("−0.25", "+0.5", "1,234", "−1", "–", "yes"))


def test_long_tables_show_both_ends_and_say_so() -> None:
    found = marked(pa.table({"sample_id": range(1000), "score": [0.5] * 1000}), "scores")
    text = plain_text(scores_html(found))
    assert "1,000 rows" in text and f"{ENDS} at either end" in text and "⋮" in text and "999" in text and "500" not in text
    short = plain_text(scores_html(found.slice(0, 3)))
    assert "3 rows." in short and "⋮" not in short


def test_the_mark_changes_nothing_else() -> None:
    plain = pa.table({"sample_id": [1, 2], "score": [0.5, None]}, metadata={"mine": "kept"})
    found = marked(plain, "scores")
    assert type(found) is pa.Table and found.equals(plain) and found.schema.equals(plain.schema)
    assert found.schema.metadata[b"mine"] == b"kept" and found.sort_by("score").schema.metadata[b"inrun"] == b"scores"
    assert b"inrun" not in plain.schema.metadata


def test_two_columns_of_one_name_and_many_columns() -> None:
    twice = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert "12" in plain_text(scores_html(marked(twice, "groups")))
    wide = pa.table({f"c{i}": [i] for i in range(40)})
    assert "24 more columns" in plain_text(scores_html(marked(wide, "scores")))

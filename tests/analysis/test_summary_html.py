"""The summary in a notebook: the words of the page, escaped."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostile_html import plain_text
from inrun.analysis import Summary, summarise_run
from inrun.analysis.summary_page import accounts_of
from report_hostile import SETS, hostile_run


def test_hostile_run_stays_text_and_says_what_the_page_says(tmp_path: Path) -> None:
    summary = summarise_run(hostile_run(tmp_path / "run"))
    text = plain_text(summary._repr_html_())
    assert SETS[0] in text and SETS[1] in text
    for s in summary.sets:
        assert s.verdict in text and all(line in text for line in s.advice)
        assert all(name in text and what in text for name, _, what in accounts_of(s, summary.method))


def test_control_the_page_of_text_would_not_do(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        plain_text(f"<div class='mathjax_ignore'>{summarise_run(hostile_run(tmp_path / 'run'))}</div>")


def test_nothing_yet() -> None:
    assert plain_text(Summary("first", [])._repr_html_()) == "no steps yet"

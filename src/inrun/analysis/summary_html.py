"""The summary of a run for a notebook: the same words and figures as its page of text."""

from __future__ import annotations

from inrun.analysis.summary import MOST_PAGES, SetSummary, Summary
from inrun.analysis.summary_page import accounts_of, heading, standing_out, sums
from inrun.notebook import block, lines, table


def summary_html(summary: Summary) -> str:
    """Return a block per validation set."""
    blocks = [_set_html(s, summary) for s in summary.sets[:MOST_PAGES]]
    if len(summary.sets) > MOST_PAGES:
        blocks.append(lines([f"and {len(summary.sets) - MOST_PAGES} more validation sets; as_dict() has all"]))
    return "".join(blocks) or block("no steps yet")


def _set_html(s: SetSummary, summary: Summary) -> str:
    rows = [
        (name, "not measured" if value is None else value, "" if value is None or not s.fall else _share(value / s.fall), what)
        for name, value, what in accounts_of(s, summary.method)
    ]
    books = table(("account", "value", "of the fall", "what it is"), rows, signed=("value",))
    said = [*sums(s, summary.method == "whole"), *standing_out(s), s.verdict, *(f"→ {line}" for line in s.advice)]
    return block(heading(s, summary), books, lines(said))


def _share(share: float) -> str:
    return f"{100 * share:.1f} %".replace("-", "−")

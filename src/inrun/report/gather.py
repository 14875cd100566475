"""Everything the page shows, read from the ledger in bounded size: aggregates, and a bounded number of samples."""

from __future__ import annotations

from pathlib import Path

from inrun.analysis.queries import info as count_run
from inrun.errors import ConfigurationError
from inrun.ledger import LedgerReader
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import Ask, add_up
from inrun.ledger.tables import Tables
from inrun.report.about import writer_at_work
from inrun.report.accounts import read_accounts
from inrun.report.columns import columns_to_offer
from inrun.report.distribution import distribution
from inrun.report.findings import Findings
from inrun.report.metrics import read_metrics
from inrun.report.panels import PANELS
from inrun.report.samples import samples_to_show

#: Validation sets that are shown; a set that is scored point by point may have thousands.
MOST_SETS = 8


def gather(run: LedgerReader | str | Path, *, by: str | None, top: int, text: bool) -> Findings:
    """Read a run, also one that is being written, or holds nothing yet.

    Args:
        run: A reader, or the path of a run.
        by: A metadata column to group by first.
        top: Samples to show at either end of every validation set.
        text: Whether texts of samples go into the page.
    """
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= 1000:
        raise ConfigurationError(f"top is {top!r}; it must be an integer from 1 to 1000")
    reader = reader_of(run)
    at_work = writer_at_work(reader.path)
    counted = count_run(reader)
    found = Findings(
        path=str(reader.path),
        about=reader.about,
        at_work=at_work,
        steps=counted.steps,
        first_step=counted.first_step,
        last_step=counted.last_step,
        skipped=dict(list(counted.skipped.items())[:10]),
        rows=counted.rows,
        samples_used=counted.samples_used,
        samples_registered=counted.samples_registered,
        used_without_metadata=counted.used_without_metadata,
        text=text,
        pending=counted.pending,
        metrics=read_metrics(reader.path),
    )
    with reader.tables() as tables:
        _read(tables, found, by, top)
    return found


def _read(tables: Tables, found: Findings, by: str | None, top: int) -> None:
    columns = columns_to_offer(tables, by) if tables.columns or by else []
    sets = dict(list(tables.sets().items())[:MOST_SETS])
    names = list(sets) or list(tables.sets_in_accounts())[:MOST_SETS]
    found.sets = {name: len(sets.get(name, [""])) for name in names}
    found.more_sets = max(len(tables.sets()) - len(names), 0)
    found.accounts = read_accounts(tables, names, found.method)
    if sets:
        add_up(tables, sets, Ask())
        found.columns = columns
        found.distributions = [distribution(tables, name) for name in names]
        found.shown = samples_to_show(tables, names, columns, top, found.text, found.samples_used)
    for panel in PANELS:
        data = panel.read(tables, found) if sets or not panel.needs_scores else None
        if data is not None:
            found.panels[panel.id] = data

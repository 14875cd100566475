"""Everything the page shows, read from the ledger in bounded size: aggregates, and a bounded number of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inrun.analysis.queries import info as count_run
from inrun.errors import ConfigurationError
from inrun.ledger import LedgerReader
from inrun.ledger.reader import reader_of
from inrun.ledger.scores import Ask, add_up
from inrun.ledger.tables import Tables
from inrun.report.about import writer_at_work
from inrun.report.accounts import SetAccounts, read_accounts
from inrun.report.distribution import Agreements, Distribution, agreements, distribution
from inrun.report.groups import Grouping, Stages, columns_to_offer, group_by, stages_of
from inrun.report.metrics import Metrics, read_metrics
from inrun.report.samples import Shown, samples_to_show

#: Validation sets that are shown; a set that is scored point by point may have thousands.
MOST_SETS = 8


@dataclass
class Findings:
    """What is known about a run."""

    path: str
    about: dict[str, Any]
    #: A process writes to the run; None: the ledger is open, and nobody here writes to it.
    at_work: bool | None
    steps: int
    first_step: int | None
    last_step: int | None
    #: Steps that scored nothing, by reason.
    skipped: dict[str, int]
    rows: int
    samples_used: int
    samples_registered: int
    used_without_metadata: int
    text: bool
    #: Validation sets that are shown, each with its number of folds; how many more the run has.
    sets: dict[str, int] = field(default_factory=dict)
    more_sets: int = 0
    accounts: list[SetAccounts] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    agreement: Agreements | None = None
    stages: Stages | None = None
    groupings: list[Grouping] = field(default_factory=list)
    shown: Shown = field(default_factory=Shown)
    metrics: Metrics | None = None

    @property
    def columns(self) -> list[str]:
        """The metadata columns that samples are grouped by."""
        return [g.column for g in self.groupings]


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
    method, update = str(found.about.get("method", "?")), str(found.about.get("update", "?"))
    found.accounts = read_accounts(tables, names, method, update)
    if not sets:
        return
    add_up(tables, sets, Ask())
    found.distributions = [distribution(tables, name) for name in names]
    found.agreement = agreements(tables, names, found.samples_used)
    first, last = tables.row("SELECT min(step), max(step) FROM contributions")
    found.stages = stages_of(first, last)
    found.groupings = [group_by(tables, column, sets, found.stages) for column in columns]
    found.shown = samples_to_show(tables, names, columns, top, found.text, found.samples_used)

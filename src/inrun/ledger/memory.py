"""A ledger that lives as long as the process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.about import credit_of
from inrun.ledger.answers import answer
from inrun.ledger.labels import set_of
from inrun.ledger.live import MemoryReader
from inrun.ledger.memory_scores import Credited, sum_up, uses_of
from inrun.ledger.record import SettledCredits, StepRecord
from inrun.ledger.samples import as_samples_table
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, SCORES
from inrun.ledger.scores import Names
from inrun.ledger.settled import SettledSteps, check_settlement, credit_table
from inrun.ledger.writer import Ledger
from inrun.notebook import marked

if TYPE_CHECKING:
    from inrun.figures import Plots


class MemoryLedger:
    """Keeps all records of a run in memory and adds them up on demand.

    Args:
        about: What ``run.json`` would say; ``method`` decides whether uses without a settled credit are pending.

    Attributes:
        about: The same.
    """

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        """Start empty."""
        self.about = dict(about or {})
        self._records: list[StepRecord] = []
        self._credits: list[SettledCredits] = []
        self._settled = SettledSteps()
        self._at_step = 0
        self._samples: pa.Table | None = None

    def write(self, record: StepRecord) -> None:
        """Add one step, and the credits that were settled when it was finished."""
        at_step = max(self._at_step, record.step + 1)
        self._credits += self._settled.take(record.settled, at_step)
        self._records.append(record)
        self._at_step = at_step

    def settle(self, settled: Sequence[SettledCredits]) -> None:
        """Add credits that are settled without a step, as when a run is closed; LedgerError if one was settled already."""
        self._credits += self._settled.take(settled, self._at_step)

    def _column(self, label: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return steps, sample ids and contributions of a label, in the order written."""
        found = [(r.step, r.sample_ids, r.contributions[label]) for r in self._records if label in r.contributions]
        steps = [np.full(len(values), step, np.int64) for step, _, values in found]
        return np.concatenate(steps), np.concatenate([ids for _, ids, _ in found]), np.concatenate([v for _, _, v in found])

    def _labels(self) -> list[str]:
        return list(dict.fromkeys(label for record in self._records for label in record.contributions))

    def contributions(self) -> pa.Table:
        """Return every contribution, label by label, in the order written."""
        parts = []
        for label in self._labels():
            steps, ids, values = self._column(label)
            names = pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int32), pa.array([label])).cast(pa.string())
            parts.append(pa.table([pa.array(steps), pa.array(ids), names, pa.array(values)], schema=CONTRIBUTIONS))
        return pa.concat_tables(parts).combine_chunks() if parts else CONTRIBUTIONS.empty_table()

    def credits(self) -> pa.Table:
        """Return every settled credit, in the order settled; empty but for `method="whole"`."""
        return credit_table(self._credits)

    def accounts(self) -> pa.Table:
        """Return the accounts: one row per step and validation label (a set, one of its points, or one of its folds)."""
        return pa.Table.from_pylist([row for record in self._records for row in record.accounts], schema=ACCOUNTS)

    def uses(self) -> pa.Table:
        """Return what every use of a sample was worth: its settled credit, or its contribution where there is none."""
        credited, pending = [Credited(c, False) for c in self._credits], credit_of(self.about) == "whole"
        parts = []
        for label in self._labels():
            found = uses_of(label, self._records, credited, pending)
            columns = {"step": found.step, "sample_id": found.sample_id, "validation": [label] * len(found.step)}
            parts.append(pa.table({**columns, "value": found.value, "pending": found.pending}))
        return pa.concat_tables(parts) if parts else CONTRIBUTIONS.empty_table().rename_columns({"contribution": "value"})

    def register_samples(self, data: Any, *, text_preview: int = 400) -> int:
        """Add sample metadata, as :meth:`inrun.Ledger.register_samples` does; returns the number of rows."""
        table = as_samples_table(data, self._samples, text_preview)
        known = [] if self._samples is None else [self._samples]
        self._samples = pa.concat_tables([*known, table], promote_options="default")
        return table.num_rows

    def samples(self) -> pa.Table | None:
        """Return the samples table, or None if none was registered."""
        return self._samples

    @property
    def plot(self) -> Plots:
        """Return the figures; see :attr:`inrun.ledger.LedgerReader.plot`."""
        return MemoryReader(self).plot

    def scores(
        self,
        validation: Names = None,
        view: str = "plain",
        *,
        top: int | None = None,
        bottom: int | None = None,
        by: str | None = None,
        open_credits: Sequence[SettledCredits] = (),
    ) -> pa.Table:
        """Return one row per sample and validation set; sets in the order they were first written, samples by id.

        ``score`` is the sum over uses of the settled credit, or of the contribution where none is settled; of a set in folds it is
        their mean, and ``standard_error`` tells its error. See :meth:`inrun.ledger.LedgerReader.scores`, which has the arguments.

        Args:
            validation: A set, several, or None for all.
            view: How a use is seen. Where this or what follows is given, sets are ordered by name.
            top: Only the so many highest scores of every set.
            bottom: Only the so many lowest.
            by: A column of the registered samples to add up by.
            open_credits: Credit so far of windows that are open; it takes the place of the contributions and counts as pending.
        """
        if (validation, view, top, bottom, by) == (None, "plain", None, None, None):
            return marked(self._every_score(open_credits), "scores")
        with MemoryReader(self, open_credits).tables() as tables:
            return answer(tables, validation, view, top=top, bottom=bottom, by=by)

    def _every_score(self, open_credits: Sequence[SettledCredits]) -> pa.Table:
        given = [check_settlement(s) for s in open_credits]
        credited = [Credited(s, False) for s in self._credits] + [Credited(s, True) for s in given if s.step not in self._settled]
        sets: dict[str, list[str]] = {}
        for label in dict.fromkeys([*self._labels(), *(label for c in credited for label in c.credits.credits)]):
            sets.setdefault(set_of(label), []).append(label)
        parts = [self._sum_up(name, labels, credited) for name, labels in sets.items()]
        return pa.concat_tables(parts) if parts else SCORES.empty_table()

    def _sum_up(self, name: str, labels: list[str], credited: list[Credited]) -> pa.Table:
        folds = [uses_of(label, self._records, credited, credit_of(self.about) == "whole") for label in labels]
        own = [uses_of(label, self._records, (), False) for label in labels] if credited else None
        return sum_up(name, folds, own)

    def save(self, folder: str | Path, about: dict[str, Any]) -> Path:
        """Write what is held so far as a ledger, with ``about`` in ``run.json``; refuses a folder that has a run already."""
        path = Path(folder)
        if (path / "run.json").exists():
            raise LedgerError(f"{path} holds a run already; give a new folder")
        with Ledger(path, flush_every="1h", about={**self.about, **about}) as ledger:
            if self._samples is not None:
                ledger.register_samples(self._samples, text_preview=0)
            for record in self._records:
                ledger.write(replace(record, settled=()))
            ledger.settle(self._credits)
        return path

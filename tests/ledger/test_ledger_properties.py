"""Any interleaving of writes, settlements, flushes, marks, kills and resumes gives the books of a plain list."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from faulty_files import QuickFiles
from inrun.errors import LedgerError
from inrun.ledger import Ledger, SettledCredits, StepRecord
from inrun.ledger.verify import verify
from long import LONG

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LABELS = st.lists(st.sampled_from(["v", "w", "w#0", "w[1]", "数"]), unique=True, min_size=1, max_size=3)


@st.composite
def columns(draw) -> tuple[list[int], dict[str, list[float]]]:
    ids = draw(st.lists(INT64, max_size=4))
    return ids, {label: draw(st.lists(FLOAT32, min_size=len(ids), max_size=len(ids))) for label in draw(LABELS)}


def settled(step: int, credit: float) -> SettledCredits:
    return SettledCredits(
        step, np.array([step, -1]), {"v": np.float32([credit, 1])}, {"v": np.float32([0, 2])}, np.float32([1, 0.5])
    )


class Books(RuleBasedStateMachine):
    """The model is a list of records; what is committed is a prefix of it."""

    @initialize(rows=st.sampled_from([1, 3, 10, 10**6]))
    def begin(self, rows: int) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path, self.rows = self.folder / "run", rows
        self.ledger: Ledger | None = Ledger(self.path, flush_every=rows, files=QuickFiles())
        self.written: list[StepRecord] = []
        self.committed = 0
        #: (mark, records done), as checkpoints hold them; the first is no checkpoint at all.
        self.marks: list[tuple[dict | None, int]] = [(None, 0)]

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            if self.ledger is not None:
                self.ledger.close()
            shutil.rmtree(self.folder)

    def _write(self, record: StepRecord) -> None:
        before = self.ledger._manifest.count
        self.ledger.write(record)
        self.written.append(record)
        if self.ledger._manifest.count > before:
            self.committed = len(self.written)

    @property
    def last_step(self) -> int:
        return max((r.step for r in self.written if r.accounts), default=-1)

    @precondition(lambda self: self.ledger is not None)
    @rule(given=columns(), gap=st.sampled_from([1, 1, 1, 2, 1000]))
    def write(self, given, gap: int) -> None:
        step = self.last_step + gap
        ids, values = given
        accounts = [{"step": step, "validation": v, "data": float(sum(c))} for v, c in values.items()]
        self._write(StepRecord(step, np.array(ids, np.int64), {v: np.float32(c) for v, c in values.items()}, accounts))

    @property
    def open_steps(self) -> list[int]:
        """The steps that are written and not settled."""
        return sorted({r.step for r in self.written} - {s.step for r in self.written for s in r.settled})

    @precondition(lambda self: self.ledger is not None and self.open_steps)
    @rule(data=st.data(), credit=FLOAT32, with_a_step=st.booleans())
    def settle(self, data, credit: float, with_a_step: bool) -> None:
        done = tuple(settled(s, credit) for s in data.draw(st.lists(st.sampled_from(self.open_steps), unique=True, max_size=3)))
        if with_a_step:
            step = self.last_step + 1
            self._write(StepRecord(step, np.arange(0), {}, [{"step": step, "validation": "v"}], done))
            return
        before = self.ledger._manifest.count
        self.ledger.settle(done)
        self.written.append(StepRecord(0, np.arange(0), {}, [], done))
        if self.ledger._manifest.count > before:
            self.committed = len(self.written)

    @precondition(lambda self: self.ledger is not None and any(r.settled for r in self.written))
    @rule()
    def settle_a_step_again(self) -> None:
        last = [s for r in self.written for s in r.settled][-1]
        with pytest.raises(LedgerError, match="settled already"):
            self.ledger.settle([last])

    @precondition(lambda self: self.ledger is not None)
    @rule()
    def write_skipped(self) -> None:
        step = self.last_step + 1
        self._write(StepRecord(step, np.arange(3), {}, [{"step": step, "validation": "v", "skipped": "overflow"}]))

    @precondition(lambda self: self.ledger is not None and self.last_step >= 0)
    @rule(given=columns(), back=st.integers(0, 3))
    def write_late(self, given, back: int) -> None:
        ids, values = given
        step = max(0, self.last_step - back)
        self._write(StepRecord(step, np.array(ids, np.int64), {v: np.float32(c) for v, c in values.items()}, []))

    @precondition(lambda self: self.ledger is not None and self.last_step >= 0)
    @rule()
    def write_a_step_again(self) -> None:
        with pytest.raises(LedgerError, match="written already"):
            self.ledger.write(StepRecord(self.last_step, np.arange(0), {}, [{"step": self.last_step, "validation": "v"}]))

    @precondition(lambda self: self.ledger is not None)
    @rule()
    def flush(self) -> None:
        self.ledger.flush()
        self.committed = len(self.written)

    @precondition(lambda self: self.ledger is not None)
    @rule()
    def mark(self) -> None:
        self.marks.append((self.ledger.mark(), len(self.written)))
        self.committed = len(self.written)

    @precondition(lambda self: self.ledger is not None)
    @rule()
    def kill(self) -> None:
        self.ledger._lock._let_go()
        self.ledger, self.written = None, self.written[: self.committed]

    @precondition(lambda self: self.ledger is not None)
    @rule()
    def close(self) -> None:
        self.ledger.close()
        self.ledger, self.committed = None, len(self.written)

    @precondition(lambda self: self.ledger is None)
    @rule(data=st.data())
    def resume(self, data) -> None:
        which = data.draw(st.integers(0, len(self.marks) - 1), label="mark")
        mark, done = self.marks[which]
        self.ledger = Ledger.resume(self.path, mark, flush_every=self.rows, files=QuickFiles())
        self.written, self.committed = self.written[:done], done
        dropped, self.marks = self.marks[which + 1 :], self.marks[: which + 1]
        self.dropped = [m for m, n in dropped if n > done]

    @precondition(lambda self: getattr(self, "dropped", None) and self.ledger is not None)
    @rule()
    def resume_from_what_was_dropped(self) -> None:
        self.ledger.close()
        self.committed = len(self.written)
        with pytest.raises(LedgerError, match="branch that a resume"):
            Ledger.resume(self.path, self.dropped[-1], files=QuickFiles())
        self.ledger = None

    @invariant()
    def books_are_the_list(self) -> None:
        if not hasattr(self, "path"):
            return
        reader = Ledger.open(self.path)
        records = self.written[: self.committed]
        rows = reader.contributions()
        expected = [
            (r.step, int(i), v, np.float32(c).tobytes())
            for r in records
            for v, cs in r.contributions.items()
            for i, c in zip(r.sample_ids, cs, strict=True)
        ]
        found = zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)
        assert [(s, i, v, np.float32(c).tobytes()) for s, i, v, c in found] == expected
        credits = reader.credits()
        assert credits["step"].to_pylist() == [s.step for r in records for s in r.settled for _ in range(2)]
        assert credits["credit"].to_numpy().tobytes() == b"".join(s.credits["v"].tobytes() for r in records for s in r.settled)
        accounts = [(a["step"], a["validation"]) for r in records for a in r.accounts]
        assert [(a["step"], a["validation"]) for a in reader.accounts().to_pylist()] == accounts
        assert verify(self.path).good


def checked(examples: int):
    class Checked(Books.TestCase):
        settings = settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
        )

    return Checked


TestBooks = checked(15)
TestBooksLong = pytest.mark.slow(checked(1000 if LONG else 200))

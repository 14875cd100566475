"""Small runs for the explorer's tests, written step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inrun.ledger import Ledger, SettledCredits, StepRecord
from inrun.ledger.manifest import FOLDER

SAMPLES = 12
#: Seconds in which steps that are on disk must be seen, by the clock of the machine, however busy it is.
SOON = 5.0
#: Seconds that a test waits for them before it gives up: it fails all the same if they took longer than SOON.
PATIENCE = 60.0


def samples(count: int = SAMPLES, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "sample_id": first + i,
            "id": f"doc-{first + i}",
            "domain": ("math", "code", None)[i % 3],
            "tokens": 10 * i,
            "good": i % 2 == 0,
            "text": f"Text number {first + i} of the Zebra run\nsecond line",
        }
        for i in range(count)
    ]


class Written:
    """A run that is written while it is read."""

    def __init__(
        self, path: Path, labels: tuple[str, ...] = ("docs", "code#0", "code#1"), window: int | None = None, **more: Any
    ) -> None:
        about = {"method": "whole" if window else "step", "model": "tiny"}
        self.path, self.labels, self.window = path, labels, window
        self.ledger = Ledger(path, about=about, **more)
        self.rng, self.step, self.used = np.random.default_rng(0), 0, {}

    def steps(self, count: int, flush: bool = True, labels: tuple[str, ...] | None = None) -> None:
        for _ in range(count):
            ids = self.rng.integers(0, SAMPLES, 4)
            self.used[self.step] = ids
            labels = labels or self.labels
            values = {x: self.rng.normal(0, 1, 4).astype(np.float32) for x in labels}
            row = {"loss_before": 3.0 - 0.01 * self.step, "lr": 0.1, "skipped": None}
            accounts = [{"step": self.step, "validation": x, **row} for x in labels]
            self.ledger.write(StepRecord(self.step, ids, values, accounts, self._settled(self.step)))
            self.step += 1
        if flush:
            self.ledger.flush()

    def on_disk_at(self) -> float:
        """Return when the last part was on disk: the time of the manifest that counts it."""
        return max(f.stat().st_mtime for f in (self.path / FOLDER).iterdir())

    def _settled(self, step: int) -> tuple[SettledCredits, ...]:
        if self.window is None or step < self.window:
            return ()
        old = self.used[step - self.window]
        credits = {x: self.rng.normal(0, 1, len(old)).astype(np.float32) for x in self.labels}
        errors = {x: np.full(len(old), 0.1, np.float32) for x in self.labels}
        return (SettledCredits(step - self.window, old, credits, errors, np.full(len(old), 0.995, np.float32)),)


def finished(path: Path, steps: int, **more: Any) -> Path:
    """Write a run of so many steps, with all samples registered, and close it."""
    run = Written(path, **more)
    run.ledger.register_samples(samples())
    run.steps(steps)
    run.ledger.close()
    return run.path


def numbered(path: Path, documents: list[int], pieces: int = 3) -> Path:
    """A run as `inrun train` writes it: ids are the numbers of pieces, and a document is worth its own number."""
    rows = [
        {"sample_id": pieces * n + k, "document": f"d{d}", "text": f"{d}/{k}"}
        for n, d in enumerate(documents)
        for k in range(pieces)
    ]
    with Ledger(path) as ledger:
        ids, values = [r["sample_id"] for r in rows], [float(r["document"][1:]) - 5.5 for r in rows]
        ledger.write(StepRecord(0, ids, {"v": values}, [{"step": 0, "validation": "v"}]))
        ledger.register_samples(rows)
    return path

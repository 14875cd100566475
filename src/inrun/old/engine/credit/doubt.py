"""Whether estimated credits can tell samples apart: by their own errors, watched all along, and said once where they cannot."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from inrun.ledger.record import SettledCredits

log = logging.getLogger("inrun")
#: Errors that are larger than so much of what the credits of a step differ by are said.
TOO_LARGE = 0.5
#: Uses before anything is said: the error of a single estimate is rough.
USES = 200


class Doubt:
    """Adds up, by validation label, Σ error² and Σ (credit − mean of its step)²."""

    def __init__(self, size: int) -> None:
        """``size`` is the number of numbers that a sample's gradient is kept in."""
        self.size, self.uses, self.said = size, 0, False
        self._squares: dict[str, tuple[float, float]] = {}

    def add(self, settled: Sequence[SettledCredits]) -> None:
        """Take in what was settled, and say once if the errors hide the samples."""
        if self.said:
            return
        for s in (s for s in settled if len(s.sample_ids)):
            self.uses += len(s.sample_ids)
            for label, credit in s.credits.items():
                error, spread = self._squares.get(label, (0.0, 0.0))
                own = np.square(s.errors[label], dtype=np.float64).sum(), np.square(credit - credit.mean(), dtype=np.float64).sum()
                self._squares[label] = error + float(own[0]), spread + float(own[1])
        if self.uses >= USES:
            self._say()

    def worst(self) -> tuple[str, float]:
        """Return the label whose errors are largest beside what credits differ by, and how large."""
        sizes = {label: (error / max(spread, 1e-300)) ** 0.5 for label, (error, spread) in self._squares.items()}
        label = max(sizes, key=lambda name: sizes[name])
        return label, sizes[label]

    def _say(self) -> None:
        label, size = self.worst()
        # What the credits differ by holds their errors as well: where these are all that there is, the ratio is 1.
        if size > TOO_LARGE:
            self.said = True
            log.warning(
                "inrun: whole credit is estimated from %d numbers per sample, and by its own estimate errors are %.1f times what "
                "the credits of a step differ by (%s), so that single samples can hardly be told apart. Give sketch=%d or more, or "
                'credit_memory="exact"; the totals of steps are exact all the same.',
                self.size,
                size,
                label,
                4 * self.size,
            )

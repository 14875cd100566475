"""How long steps take."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator


class Timer:
    """Times steps; the mean over the last few seconds is what people see."""

    def __init__(self, batch: int) -> None:
        """``batch`` samples per step."""
        self._batch, self.plain_seconds, self._mean = batch, math.nan, math.nan

    def compare_with(self, plain: float) -> None:
        """Take the seconds of forward and backward without scores."""
        self.plain_seconds = plain

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time the block."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._mean = seconds if math.isnan(self._mean) else 0.9 * self._mean + 0.1 * seconds

    @property
    def samples_per_second(self) -> float:
        """Return how many samples are trained on in a second."""
        return self._batch / self._mean

    @property
    def overhead(self) -> float:
        """Return how much longer a step takes than without scores: 0.2 is a fifth longer."""
        return self._mean / self.plain_seconds - 1.0

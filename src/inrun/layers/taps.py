"""The taps of one microbatch, each with a key that is the same in every step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from inrun.layers.tap import Source, Tap


class Taps:
    """Taps in the order in which their functions were called: by the loop, and again by checkpoints in a backward."""

    def __init__(self) -> None:
        self.every: list[Tap] = []
        #: Those of functions that were called since the last backward.
        self.new: list[Tap] = []
        #: A backward runs: functions that are called now were called before, and are called again by checkpointing.
        self.recomputing = False
        self.recomputed: list[Tap] = []
        self._counts: dict[Any, int] = {}
        self._recounts: dict[Any, int] = {}

    def clear(self) -> None:
        """Let go of all taps and of the graph they are in."""
        for tap in (*self.every, *self.recomputed):
            tap.edge = None  # else tap and node would keep each other alive, unseen by the garbage collector
        self.every, self.new, self.recomputed, self._counts, self._recounts = [], [], [], {}, {}

    @property
    def latest(self) -> list[Tap]:
        """Return the list that grows: of first calls, or of those that are run again."""
        return self.recomputed if self.recomputing else self.every

    def key(self, func: Any, targets: Iterable[Source]) -> tuple[Any, ...]:
        """Return the function's name, the parameters, and how often they met in this microbatch before."""
        name = getattr(func, "__name__", str(func)).strip("_")
        place = (name, *(leaf.index for s in targets for leaf in s.leaves))
        counts = self._recounts if self.recomputing else self._counts
        count = counts[place] = counts.get(place, -1) + 1
        return (*place, count)

    def add(self, tap: Tap) -> None:
        """Add a tap."""
        self.latest.append(tap)
        if not self.recomputing:
            self.new.append(tap)

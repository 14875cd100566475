"""Which steps are audited."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Schedule:
    """Which steps are audited: every k-th, or as often as costs under one per cent."""

    every: int | None
    next_step: int = 0
    _step_seconds: list[float] = field(default_factory=list)
    _began: float = 0.0
    _spent: float = 0.0

    def due(self, step: int) -> bool:
        """Whether this step is audited."""
        if self.every is None:
            return step >= self.next_step
        return self.every > 0 and step % self.every == 0

    def begin(self) -> None:
        """Start the clock of a step."""
        self._began, self._spent = time.perf_counter(), 0.0

    def spent(self, seconds: float) -> None:
        """Count time that only the audit needed."""
        self._spent += seconds

    def finish(self, step: int, audited: bool) -> None:
        """Plan the next audit so that audits cost at most one per cent of the time."""
        plain = max(time.perf_counter() - self._began - self._spent, 1e-9)
        self._step_seconds = [*self._step_seconds[-9:], plain]
        if audited:
            typical = sorted(self._step_seconds)[len(self._step_seconds) // 2]
            self.next_step = step + max(1, round(100.0 * self._spent / typical))

    def replan(self, step: int) -> None:
        """Let the next audit come no later than planned, at this step if audits are planned by cost."""
        self.next_step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the phase."""
        return {"every": self.every, "next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the phase."""
        self.next_step = int(state["next_step"])

"""A warning for runs whose samples are given and taken far more than the validation loss fell: their scores nearly cancel."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inrun.analysis.verdict import far_exceeds, percent
from inrun.engine.record import Arrived, by_set

log = logging.getLogger("inrun")
#: Samples that the warning names, and steps that must have measured their fall before it.
MOST_SAMPLES, LEAST_STEPS = 3, 5


class ExcessWarning:
    """Adds Σ|credit| and the falls up over the steps that measured them; warns once per validation set."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        #: By validation set: Σ|credit|, Σ|fall|, Σ|loss|, and the steps that measured them.
        self._sums: dict[str, npt.NDArray[np.float64]] = {}
        self._warned: set[str] = set()

    def note(self, arrived: Arrived) -> None:
        """Add a step."""
        before, after, spread = (arrived.found.get(name) for name in ("before", "after", "abs_sum"))
        if before is None or after is None or spread is None or arrived.skipped is not None:
            return
        for name, columns in by_set(arrived.labels).items():
            step = np.abs(np.stack([spread, before - after, before, np.ones_like(before)]))[:, columns].mean(1)
            paid, fall, loss, steps = self._sums[name] = self._sums.get(name, np.zeros(4)) + step
            if steps >= LEAST_STEPS and far_exceeds(paid, fall, loss) and name not in self._warned:
                self._warned.add(name)
                log.warning("inrun: %s", self._words(arrived, name, columns, paid / fall if fall > 0 else float("inf")))

    def _words(self, arrived: Arrived, name: str, columns: list[int], times: float) -> str:
        place = max(columns, key=lambda j: arrived.found["abs_sum"][j])  # type: ignore[index]
        largest, contributions = arrived.largest_tensors(place), arrived.found["contributions"]
        said = (
            f"validation set {name!r}: up to step {arrived.pending.number} the samples were given and taken "
            f"{times:,.0f} times what the loss fell on audited steps. Their scores nearly cancel."
        )
        if largest is not None:
            named = ", ".join(f"{self._names[i]} ({percent(share)})" for i, share in zip(*largest, strict=True))
            said += f" Most of it by tensor: {named}."
        if contributions is not None and len(contributions):
            order = np.argsort(-np.abs(contributions[:, place]), kind="stable")[:MOST_SAMPLES]
            named = ", ".join(f"{arrived.pending.ids[i]} ({contributions[i, place]:+.2g})" for i in order.tolist())
            said += f" In this step by sample: {named}."
        return said

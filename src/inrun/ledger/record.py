"""What the engine hands to a ledger, and the sign and unit of every number in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Sign and unit of contributions and scores, everywhere.
SIGN = "positive = the sample lowered the validation loss"
UNIT = "validation loss (nats for a language model)"


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    #: ``[n]``; an id may occur more than once.
    sample_ids: npt.NDArray[np.int64]
    #: Per validation label, ``[n]``; empty if the step was skipped.
    contributions: dict[str, npt.NDArray[np.float32]]
    #: One row per validation label: loss_before, loss_after (None unless audited), data, lr, clip, n_samples, skipped.
    accounts: list[dict[str, Any]] = field(default_factory=list)


class LedgerWriter(Protocol):
    """Anything that takes steps."""

    def write(self, record: StepRecord) -> None:
        """Take one step."""
        ...

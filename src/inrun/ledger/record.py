"""What the engine hands to a ledger, why a step may have no scores, and the sign and unit of every number."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

#: Sign and unit of contributions and scores, everywhere.
SIGN = "positive = the sample lowered the validation loss"
UNIT = "validation loss (nats for a language model)"


class Skip(enum.Enum):
    """Why a step was not scored. The value is the text in the accounts, where details may follow after a colon."""

    VALIDATION_LOSS = "validation loss is not finite"
    #: A loss scaler, or a loop such as that of ``inrun train`` with nonfinite=skip, left the step out: the weights stayed.
    NO_STEP = "gradient is not finite and the optimizer did not step"
    #: The loop dropped the batch (``step.skip()``).
    DROPPED = "the loop dropped the batch"
    CONTRIBUTIONS = "gradient or contributions are not finite"
    FAILED = "an exception ended the step after the optimizer had stepped"
    OUTSIDE = "the optimizer stepped outside of accountant.step()"

    @classmethod
    def parse(cls, text: str) -> Skip | None:
        """Return the reason that a text of the accounts states; None if it is none of these."""
        stated = text.partition(":")[0].strip()
        return next((reason for reason in cls if reason.value == stated), None)

    @property
    def stepped(self) -> bool:
        """Whether the optimizer stepped all the same, so that the weights moved and it counted the step."""
        return self not in (Skip.NO_STEP, Skip.DROPPED)

    def text(self, details: str = "") -> str:
        """Return what the accounts say."""
        return f"{self.value}: {details}" if details else self.value


@dataclass(frozen=True)
class SettledCredits:
    """The settled credits of the uses of one step: what each sample earned over its whole window."""

    #: The step of use.
    step: int
    #: ``[n]``, row j of the step at place j, or as ``rows`` says.
    sample_ids: npt.NDArray[np.int64]
    #: Per validation label, ``[n]``.
    credits: dict[str, npt.NDArray[np.float32]]
    #: The standard error of each credit's estimate, ``[n]``; 0 where it is exact. The same labels as ``credits``.
    errors: dict[str, npt.NDArray[np.float32]]
    #: ``[n]``, the share of the sample's push that was paid out when it settled: above 0.99 after a whole window, less where
    #: training ended before.
    paid: npt.NDArray[np.float32]
    #: ``[n]``, the number of each row in the step, all ranks counted together; None where they are 0, 1, ... n - 1.
    rows: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step."""

    step: int
    #: ``[n]``; an id may occur more than once.
    sample_ids: npt.NDArray[np.int64]
    #: Per validation label (see ``labels``), ``[n]``; empty if the step was skipped.
    contributions: dict[str, npt.NDArray[np.float32]]
    #: One row per validation label with the columns of ``schema.ACCOUNTS``; ``skipped`` is the text of a :class:`Skip`.
    accounts: list[dict[str, Any]] = field(default_factory=list)
    #: What was settled when this step was finished: uses of earlier steps, or of this one.
    settled: tuple[SettledCredits, ...] = ()


class LedgerWriter(Protocol):
    """Anything that takes steps."""

    def write(self, record: StepRecord) -> None:
        """Take one step."""
        ...

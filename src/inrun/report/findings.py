"""What the page knows about a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from inrun.ledger import credit_of, method_of
from inrun.report.accounts import SetAccounts
from inrun.report.distribution import Distribution
from inrun.report.metrics import Metrics
from inrun.report.samples import Shown


@dataclass
class Findings:
    """What is known about a run."""

    path: str
    about: dict[str, Any]
    #: A process writes to the run; None: the ledger is open, and nobody here writes to it.
    at_work: bool | None
    steps: int
    first_step: int | None
    last_step: int | None
    #: Steps that scored nothing, by reason.
    skipped: dict[str, int]
    rows: int
    samples_used: int
    samples_registered: int
    used_without_metadata: int
    text: bool
    #: Steps with uses whose credit is not settled.
    pending: int = 0
    #: Validation sets that are shown, each with its number of folds; how many more the run has.
    sets: dict[str, int] = field(default_factory=dict)
    more_sets: int = 0
    accounts: list[SetAccounts] = field(default_factory=list)
    distributions: list[Distribution] = field(default_factory=list)
    #: The metadata columns that samples are grouped by.
    columns: list[str] = field(default_factory=list)
    shown: Shown = field(default_factory=Shown)
    metrics: Metrics | None = None
    #: What panels read, by their ids; those with nothing to show are not in it.
    panels: dict[str, Any] = field(default_factory=dict)

    @property
    def credit(self) -> str:
        """What scores add up: "whole" credit, or what a use did in its own "step"."""
        return credit_of(self.about)

    @property
    def method(self) -> str:
        """The method that scored the run."""
        return method_of(self.about)

"""What stands for validation callables in a run whose steps are merged."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn

from inrun.errors import ConfigurationError
from inrun.old.engine.processes import Processes
from inrun.old.engine.validation import Validation


class NoValidation(Validation):
    """Has a name, and measures nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Hold the model; nothing can be measured beside the steps."""
        self.model = model
        self.callables = {}
        self.processes = Processes()

    @property
    def names(self) -> list[str]:
        """Return the name that merged columns have."""
        return ["validation"]

    def _refuse(self) -> NoReturn:
        raise ConfigurationError(
            "this Accountant has no validation=, and takes validation gradients in merged steps only; make one with validation= "
            "to measure validation losses at other weights"
        )

    def scalar(self, name: str, step: int) -> NoReturn:
        """Refuse."""
        self._refuse()

    def losses(self, step: int) -> NoReturn:
        """Refuse."""
        self._refuse()

    def columns(self, step: int) -> NoReturn:
        """Refuse."""
        self._refuse()

    def gradients(self, *args: Any) -> NoReturn:
        """Refuse."""
        self._refuse()

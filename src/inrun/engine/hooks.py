"""Hooks around the optimizers' steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from inrun.errors import StepError

if TYPE_CHECKING:
    from inrun.engine.run import Run


class OptimizerHooks:
    """Tell the open step when an optimizer is about to step, and when it has.

    A closure is run before the step is looked at: torch's optimizers run theirs once, before they move anything.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], run: Run) -> None:
        self._optimizers, self._run = list(optimizers), run
        self._handles: list[Any] = []
        self.go_last()

    def go_last(self) -> None:
        """Come after all hooks that others registered: these may still change gradients."""
        self.remove()
        for i, o in enumerate(self._optimizers):
            self._handles += [o.register_step_pre_hook(self._before(i)), o.register_step_post_hook(self._after(i))]

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _before(self, index: int) -> Callable[..., Any]:
        run = self._run

        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if run.open_step is None:
                return None
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                run.open_step.before_optimizer(index)
                return None
            with torch.enable_grad():
                once = Once(closure())
            run.open_step.before_optimizer(index)
            return ((args[0], once, *args[2:]), kwargs) if "closure" not in kwargs else (args, {**kwargs, "closure": once})

        return before

    def _after(self, index: int) -> Callable[..., Any]:
        run = self._run

        def after(*_: Any) -> None:
            if run.open_step is not None:
                run.open_step.after_optimizer(index)
            else:
                run.moved_outside = True

        return after


class Once:
    """The result of a closure that was run."""

    def __init__(self, loss: Any) -> None:
        self._loss, self._given = loss, False

    def __call__(self) -> Any:
        """Return the loss."""
        if self._given:
            raise StepError("the optimizer ran its closure twice in one step. Only optimizers that run it once can be scored.")
        self._given = True
        return self._loss

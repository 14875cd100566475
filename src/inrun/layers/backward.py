"""What the tape does when the loop differentiates: layouts are read first, and what checkpoints run again is tapped, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.errors import InrunError, StepError
from inrun.layers.layout import Layout
from inrun.layers.tap import opened, run_grad

if TYPE_CHECKING:
    from inrun.layers.tape import Tape

BACKWARD = {Tensor.backward, torch.autograd.backward}
_run_backward = opened(torch.autograd.backward)


@contextlib.contextmanager
def differentiating(tape: Tape) -> Iterator[None]:
    """Read the layouts of what was called since the last backward. In the block, functions are those of recomputations."""
    taps = tape.taps
    before, taps.recomputing = taps.recomputing, True
    try:
        try:
            with tape:
                if not tape.blind:
                    tape.layouts.find(taps.new)
        except InrunError as error:
            if not tape.defers:
                raise
            tape.failed = error
            for tap in taps.every:
                tap.layout = Layout("all", 1)
        taps.new = []
        with tape:
            yield
    finally:
        taps.recomputing = before


def run_backward(tape: Tape, func: Any, args: Any, kwargs: Any) -> None:
    """Run ``loss.backward()`` or ``torch.autograd.backward``."""
    loss, *rest = args
    if func is Tensor.backward:  # (gradient, retain_graph, create_graph, inputs)
        kwargs = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), rest, strict=False)) | kwargs
        kwargs["grad_tensors"] = kwargs.pop("gradient", None)
        rest = []
    if kwargs.get("inputs") is not None or len(rest) > 4:
        raise StepError(
            "backward(inputs=...) inside a step: what samples push is not collected then. Call backward() without inputs, and "
            "freeze what must get no gradient."
        )
    with differentiating(tape):
        _run_backward(loss, *rest, **kwargs)


def differentiate(tape: Tape, args: Any, kwargs: Any) -> Any:
    """Run ``torch.autograd.grad``, which trains nothing: nothing is read."""
    if kwargs.get("create_graph") or (len(args) > 4 and args[4]):
        raise StepError(
            "torch.autograd.grad(create_graph=True) inside a step: the gradient of a gradient (a gradient penalty, forces of an "
            "energy) flows past the rows of the samples and is not scored. Leave it out of the loss; where it is no part of it, "
            "compute it inside accountant.paused()."
        )
    before, tape.silent = tape.silent, True
    try:
        with differentiating(tape):
            return run_grad(*args, **kwargs)
    finally:
        tape.silent = before

"""What a loop does between ``optimizer.step()`` and the end of the step changes no score: schedules, gradients, options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from loops import METHODS, adamw, attach, losses, perceptron, points, scores_by_id, sgd


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(torch.tanh(p.grad) * group["lr"])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "nesterov": lambda model: sgd(model, nesterov=True, weight_decay=0.1),
    "sgd without memory": lambda model: sgd(model, momentum=0.0),
    "adamw": adamw,
    "rate is a tensor": lambda model: adamw(model, lr=torch.tensor(0.01, dtype=torch.float64)),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "unknown": lambda model: Own(model.parameters()),
}

#: Whole credit needs a memory that is linear in the gradients.
PAIRS = [
    (method, name)
    for method, options in METHODS.items()
    for name in OPTIMIZERS
    if options["method"] != "whole" or name not in ("adafactor", "unknown")
]


def scores_of(build: Callable[[nn.Module], torch.optim.Optimizer], inside: bool, uneven: bool, **options: Any) -> dict[int, float]:
    """Train four steps whose rates differ; set the next rate and clear gradients in place, inside the step or behind it."""
    model = perceptron()
    optimizer = build(model)
    accountant = attach(model, optimizer, **options)

    def prepare() -> None:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.1)
            else:
                group["lr"] *= 0.1
        optimizer.zero_grad(set_to_none=False)

    for t in range(4):
        with accountant.step(range(4 * t, 4 * t + 4)):
            losses(model, points(4, t)).mean().backward()
            if uneven and t == 0:
                model.a.bias.grad = None  # from here on tensors have stepped unequally often
            optimizer.step()
            if inside:
                prepare()
        if not inside:
            prepare()
    accountant.close()
    return scores_by_id(accountant)


@pytest.mark.parametrize("uneven", [False, True], ids=["together", "unevenly"])
@pytest.mark.parametrize(("method", "optimizer"), PAIRS)
def test_rates_and_gradients_are_those_of_the_move(method: str, optimizer: str, uneven: bool) -> None:
    inside, behind = (scores_of(OPTIMIZERS[optimizer], x, uneven, **METHODS[method]) for x in (True, False))
    assert inside == behind
    assert any(behind.values())

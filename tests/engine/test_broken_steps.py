"""Credit after an exception in a step: nobody is paid for others' pushes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun

STEPS, LR, MU = 8, 0.05, 0.9


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def rows(t: int) -> tuple[Tensor, Tensor]:
    """Draw a batch of four; that of step 3 is thirty times as large."""
    draw = torch.Generator().manual_seed(t)
    size = 30.0 if t == 3 else 1.0
    return torch.randn(4, 6, generator=draw, dtype=torch.float64) * size, torch.randn(4, 3, generator=draw, dtype=torch.float64)


def linear_loss(model: nn.Module) -> tuple[Callable[[Any], Tensor], list[Tensor]]:
    """A validation loss that is linear in the weights, so that credits have a closed form, and its gradient."""
    along = [torch.randn(p.shape, generator=torch.Generator().manual_seed(9), dtype=p.dtype) for p in model.parameters()]

    def loss(m: Any) -> Tensor:
        return sum((p * r).sum() for p, r in zip(m.parameters(), along, strict=True)) + 0 * m(rows(99)[0]).sum()

    return loss, along


class Logging(Exception):
    """What fails behind the optimizer."""


def play(sketch: Any, fails: str) -> tuple[dict[int, float], dict[int, float]]:
    """Train, with an exception in step 3; return scores, and what they are without one."""
    model = net()
    validation, along = linear_loss(model)
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=LR, momentum=MU) for i in (0, 2)]
    accountant = inrun.Accountant(model, optimizers, validation, sketch=sketch, audit_every=0)
    truth = {}
    for t in range(STEPS):
        x, y = rows(t)
        plain = copy.deepcopy(model)
        for i in range(4):
            g = torch.autograd.grad((plain(x[i : i + 1]) - y[i : i + 1]).square().sum() / 4, list(plain.parameters()))
            pushed = float(sum((a * b).sum() for a, b in zip(g, along, strict=True)))
            truth[4 * t + i] = LR * pushed * sum(MU**k for k in range(STEPS - t))
        try:
            with accountant.step(range(4 * t, 4 * t + 4)):
                (model(x) - y).square().sum().div(4).backward()
                for j, optimizer in enumerate(optimizers):
                    optimizer.step()
                    if t == 3 and j == ("between", "behind").index(fails):
                        raise Logging
        except Logging:
            assert t == 3
        for optimizer in optimizers:
            optimizer.zero_grad()
    accountant.close()
    scores = accountant.scores()
    return dict(zip(scores["sample_id"].to_pylist(), scores["score"].to_pylist(), strict=True)), truth


@pytest.mark.parametrize("sketch", ["exact", None])
@pytest.mark.parametrize("fails", ["between", "behind"])
def test_a_step_that_failed_is_nobodys_and_the_run_goes_on(fails: str, sketch: Any) -> None:
    """What it left in the optimizers is inherited: uses of before are settled as they stand, and later ones get what is theirs."""
    found, truth = play(sketch, fails)
    assert set(truth) - set(range(12, 16)) == set(found)
    assert max(abs(found[i] - truth[i]) for i in range(16, 4 * STEPS)) < 1e-6
    before = {i: truth[i] * sum(MU**k for k in range(3 - i // 4)) / sum(MU**k for k in range(STEPS - i // 4)) for i in range(12)}
    assert max(abs(found[i] - before[i]) for i in before) < 1e-6

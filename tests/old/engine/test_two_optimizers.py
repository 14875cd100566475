"""Optimizers that step in turn, stand still, or whose parameters change their place; a part that is frozen for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import OptimizerError, StepError

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(7))


class Heads(nn.Module):
    """A body with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor, head: str) -> Tensor:
        out: Tensor = getattr(self, head)(torch.tanh(self.body(x)))
        return out


def play(set_to_none: bool, idle_steps: bool = False, **options: Any) -> tuple[list[Tensor], Any, list[Tensor]]:
    """Train head b with an optimizer of its own in the first two of four steps, then let it rest."""
    torch.manual_seed(0)
    model = Heads().double()
    first = torch.optim.SGD([*model.body.parameters(), *model.a.parameters()], lr=0.1, momentum=0.9)
    second = torch.optim.SGD(model.b.parameters(), lr=0.5, momentum=0.9)
    x = X.double()
    accountant = inrun.Accountant(
        model, [first, second], lambda m: (m(x, "a").sin() * m(x, "b").cos()).mean(), audit_every=1, **options
    )
    found = []
    for t in range(4):
        with accountant.step(range(4)):
            model(x, "b" if t < 2 else "a").square().mean().backward()
            first.step()
            if t < 2 or idle_steps:
                second.step()
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=set_to_none)
        found.append(accountant.last.contributions["validation"].clone())
    books = accountant.last.accounts["validation"]
    accountant.close()
    return found, books, [p.detach().clone() for p in model.parameters()]


GAMES = [{"method": m} for m in ("first", "lookahead", "midpoint", "second")] + [{"credit_memory": "exact"}, {"sketch": 256}]


@pytest.mark.parametrize("options", GAMES, ids=lambda o: "-".join(map(str, o.values())))
def test_zeros_in_grad_do_not_make_an_idle_optimizer_step(options: dict[str, Any]) -> None:
    zeros, books, weights = play(set_to_none=False, **options)
    nones, true_books, true_weights = play(set_to_none=True, **options)
    assert all(map(torch.equal, weights, true_weights))
    for a, b in zip(zeros, nones, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-15)
    assert books.residual == pytest.approx(true_books.residual, abs=1e-12)


@pytest.mark.parametrize("options", [{"method": "first"}, {}], ids=["step", "whole"])
def test_a_step_without_gradients_moves_nothing(options: dict[str, Any]) -> None:
    """To torch it is none: an optimizer passes over parameters whose gradient is None."""
    stepped, _, weights = play(set_to_none=True, idle_steps=True, **options)
    left_out, _, true_weights = play(set_to_none=True, **options)
    assert all(map(torch.equal, weights, true_weights))
    assert all(map(torch.equal, stepped, left_out))


@pytest.mark.parametrize("options", [{"method": "midpoint"}, {}], ids=["step", "whole"])
def test_a_step_on_zeros_that_momentum_moves_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(StepError, match=r"the optimizer of b\.weight steps although none of its parameters got gradient"):
        play(set_to_none=False, idle_steps=True, **options)


def test_a_part_that_is_frozen_for_a_while_with_zeros_in_grad() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(X).sin().mean(), method="first")
    for t in range(4):
        model[0].requires_grad_(t < 2)
        with accountant.step(range(4)):
            model(X).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert accountant.scores()["times_used"].to_pylist() == [4] * 4


def test_a_parameter_that_changes_its_group_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    groups = [{"params": [*model[0].parameters()], "lr": 0.1}, {"params": [*model[2].parameters()], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(X).sin().mean(), method="first", update="sgd")
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    with pytest.raises(OptimizerError, match=r"0\.weight is no longer in the parameter group"):
        with accountant.step(range(4)):
            pass


def test_an_optimizer_that_does_not_step_is_named() -> None:
    """Its parameters got gradient; what the samples pushed there would be in no step."""
    model = Heads().double()
    parts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.body, model.a)]
    accountant = inrun.Accountant(model, parts, lambda m: m(X.double(), "a").square().mean())
    with pytest.raises(StepError, match=r"before SGD \(optimizer 1\) stepped, although a.weight, a.bias got gradient"):
        with accountant.step(range(4)):
            model(X.double(), "a").square().mean().backward()
            parts[0].step()
    for p in model.parameters():
        p.grad = None
    model.a.requires_grad_(False)  # the way out
    with accountant.step(range(4)):
        model(X.double(), "a").square().mean().backward()
        parts[0].step()
    accountant.close()

"""What ``method="step"`` is the exact value of: the game in which the optimizer's factor is held and momentum takes part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import inrun

SAMPLES = 5
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-3, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-4, betas=(0.9, 0.95)),
}
#: Σ of the contributions beside the total of the real game: under AdamW its second moment falls where samples are out.
REAL = {"sgd with momentum": (0.0, 1e-3), "adamw": (0.05, 0.5)}


def factors(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor | float:
    """Return how far the step that was made moved an entry for its gradient, from the formulas."""
    group, state = optimizer.param_groups[0], optimizer.state[p]
    if isinstance(optimizer, torch.optim.SGD):
        return group["lr"]
    (b1, b2), t = group["betas"], float(state["step"])
    return group["lr"] * (1 - b1) / (1 - b1**t) / ((state["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"])


def shapley(utility: Callable[[tuple[int, ...]], float], n: int) -> Tensor:
    known = {s: utility(s) for k in range(n + 1) for s in itertools.combinations(range(n), k)}
    values = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        for s in (s for s in known if i not in s):
            weight = math.factorial(len(s)) * math.factorial(n - len(s) - 1) / math.factorial(n)
            values[i] += weight * (known[tuple(sorted((*s, i)))] - known[s])
    return values


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_step_is_the_value_of_the_game_with_the_factor_held(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer, parameters = OPTIMIZERS[name](model), list(model.parameters())
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.arange(60) % 3

    def validation(m: nn.Module) -> Tensor:
        return cross_entropy(m(x[:20] + 0.1), y[:20])

    def losses(m: nn.Module) -> Tensor:
        return cross_entropy(m(x[:SAMPLES]), y[:SAMPLES], reduction="none") / SAMPLES

    for _ in range(10):
        rows = torch.randint(0, 60, (SAMPLES,))
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    optimizer.zero_grad()

    with inrun.Accountant(model, optimizer, validation, method="step") as accountant:
        report = accountant.fidelity(losses, exact=True, methods=["step"], game="real")
    (result,) = report.results
    found = torch.tensor(result.contributions, dtype=torch.float64)

    before = [p.detach().clone() for p in parameters]
    gradients = [torch.autograd.grad(part, parameters, retain_graph=True) for part in losses(model)]
    for p, *parts in zip(parameters, *gradients, strict=True):
        p.grad = sum(parts)
    optimizer.step()
    pushes = [[-factors(optimizer, p) * g for p, g in zip(parameters, parts, strict=True)] for parts in gradients]
    moves = [p.detach() - w for p, w in zip(parameters, before, strict=True)]
    pushes.append([move - sum(own) for move, *own in zip(moves, *pushes, strict=True)])  # momentum and decay

    @torch.no_grad()
    def loss_of(players: tuple[int, ...]) -> float:
        for j, (p, w) in enumerate(zip(parameters, before, strict=True)):
            p.copy_(sum((pushes[i][j] for i in players), w))
        return float(validation(model))

    expected = shapley(lambda players: loss_of(()) - loss_of(players), SAMPLES + 1)[:SAMPLES]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-6
    low, high = REAL[name]
    assert low <= result.residual <= high

"""Under autocast gradients are rounded as the framework rounds them, and audits allow for that rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loops import METHODS, attach


class Added(nn.Module):
    """The linear layer of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 7)), nn.Parameter(torch.randn(7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:2], 7)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 7))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


#: By name: a model, and the shape of a sample.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), (3, 6)),
    "addmm": (lambda: nn.Sequential(nn.LayerNorm(6), Added(), nn.Tanh(), nn.Linear(7, 5)), (3, 6)),
    "product": (lambda: nn.Sequential(nn.LayerNorm(6), Product()), (3, 6)),
    "convolution": (lambda: nn.Sequential(nn.GroupNorm(1, 2), nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 3, 2)), (2, 6, 6)),
}


def step(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """Train one step under autocast, with an accountant if there are options; return the gradients."""

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if not options:
        loss().backward()
        return [p.grad.clone() for p in model.parameters()]
    accountant = attach(model, optimizer, lambda m: m(x[:2]).square().mean(), audit_every=1, **options)
    with accountant.step(range(len(x))):
        loss().backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
    accountant.close()
    return gradients


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_rounded_as_without_scores(name: str, method: str, bitwise: bool) -> None:
    build, shape = MODELS[name]
    differing = total = 0
    for seed in range(12):
        torch.manual_seed(seed)
        model, x = build(), torch.randn(2, *shape)
        plain = step(model, x)
        model.zero_grad()
        scored = step(model, x, **METHODS[method], bitwise=bitwise)
        differing += sum(int((a != b).sum()) for a, b in zip(plain, scored, strict=True))
        total += sum(p.numel() for p in plain)
        # One unit in the last place where a sum lies halfway between two numbers of bfloat16.
        assert all(torch.allclose(a, b, rtol=2**-7, atol=2**-9 * float(a.abs().max())) for a, b in zip(plain, scored, strict=True))
    assert differing == 0 if bitwise else differing < 0.02 * total

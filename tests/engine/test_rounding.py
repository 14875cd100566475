"""Moves that are nothing but rounding are nobody's: a bias in front of batch norm under Adam."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inrun import Accountant

EXACT: dict[str, Any] = {"sketch": "exact"}


def net(norm: bool = True, width: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm2d(width)] if norm else []
    return nn.Sequential(nn.Conv2d(1, width, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, dtype: torch.dtype, **options: Any) -> Accountant:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(64, 1, 8, 8, generator=generator).to(dtype), torch.randint(0, 4, (64,), generator=generator)
    accountant: Accountant | None = None
    for i in range(-3, steps):  # Adam's first steps divide every entry by itself
        if i == 0:
            accountant = Accountant(model, optimizer, lambda m: F.cross_entropy(m(x[:16]).float(), y[:16]), **options)
        rows = torch.arange(16) + 16 * (i % 3) + 16
        with contextlib.nullcontext() if accountant is None else accountant.step(rows):
            F.cross_entropy(model(x[rows]).float(), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert accountant is not None
    return accountant


def total(accountant: Accountant, column: str) -> float:
    found = accountant.ledger.accounts().column(column).to_pylist()  # type: ignore[attr-defined]
    return sum(abs(x) for x in found if x is not None)


@pytest.mark.parametrize("sketch", ["exact", 40])
@pytest.mark.parametrize("method", ["whole", "step"])
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-4)], ids=str)
def test_a_bias_in_front_of_batch_norm_is_paid_to_nobody(dtype: torch.dtype, least: float, method: str, sketch: Any) -> None:
    model = net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-8 if dtype == torch.float32 else 1e-6)
    with train(model, optimizer, 12, dtype, method=method, sketch=sketch) as accountant:
        assert total(accountant, "rounding") > least
    largest = max(abs(x) for x in accountant.scores()["score"].to_pylist())
    assert largest < 20 * total(accountant, "data")


def test_without_batch_norm_the_bias_is_its_samples_alone() -> None:
    """The control: the same bias, whose gradient does not cancel."""
    for dtype in (torch.float32, torch.bfloat16):
        model = net(norm=False).to(dtype)
        with train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), 6, dtype, **EXACT) as accountant:
            assert total(accountant, "rounding") == 0.0


def test_only_optimizers_that_make_noise_large_take_it_apart() -> None:
    """SGD leaves noise as small as it is: a score is the share that flows through a sample's rows."""
    model = net()
    with train(model, torch.optim.SGD(model.parameters(), lr=0.1), 4, torch.float32, **EXACT) as accountant:
        assert total(accountant, "rounding") == 0.0


def test_noise_that_becomes_a_gradient_is_paid_before_the_next_audit() -> None:
    """Two samples of opposite labels cancel in a head of zeros; later ones do not."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, held = torch.randn(3, 8, 3).double(), torch.randn(5, 3).double()
    y = [torch.tensor([0.0, 1.0] * 4).double(), *torch.rand(2, 8).double().round()]
    loss = lambda logits, t: F.binary_cross_entropy_with_logits(logits[:, 0], t)  # noqa: E731
    accountant = Accountant(model, optimizer, lambda m: loss(m(held), torch.ones(5).double()), method="step", audit_every=100)
    found: list[Tensor] = []
    for i in range(3):
        with accountant.step(range(8)):
            loss(model(x[i]), y[i]).backward()
            gradient = model.bias.grad.clone()
            optimizer.step()
            optimizer.zero_grad()
        account = accountant.last.accounts["validation"]
        assert account is not None and account.rounding is not None
        assert (abs(account.rounding) > 0) == (float(gradient) == 0 and i > 0) or i == 0
        found.append(accountant.last.contributions["validation"])
    assert all(float(c.abs().max()) > 0 for c in found[1:])

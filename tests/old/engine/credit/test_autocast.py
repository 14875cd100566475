"""Whole credit where gradients are rounded to bfloat16: sums are held to that precision, and what is missing is still seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import inrun
from inrun.errors import ConservationError, CreditError


@pytest.mark.parametrize("memory", ["sketch", "exact"])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_totals_are_held_to_the_precision_of_the_gradient(memory: str, penalty: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    accountant = inrun.Accountant(
        model, optimizer, lambda m: (m(x[:1]) - y[:1]).square().mean(), credit_memory=memory, audit_every=1
    )

    def train() -> None:
        for _ in range(3):
            with accountant.step() as step:
                for part in (slice(0, 2), slice(2, 4)):
                    with step.microbatch(range(4)[part]):
                        with torch.autocast("cpu", torch.bfloat16):
                            out = model(x[part])
                        loss = (out.float() - y[part]).square().mean() / 2
                        (loss + penalty * model[0].weight.square().sum()).backward()
                optimizer.step()
            optimizer.zero_grad()

    if penalty:
        with pytest.raises((ConservationError, CreditError), match="0.weight"):
            train()
    else:
        train()
        assert accountant.last.contributions["validation"].abs().sum() > 0
    accountant.close()


@pytest.mark.parametrize("options", [{}, {"method": "midpoint"}], ids=["whole", "step"])
@pytest.mark.parametrize("low", [True, False])
def test_no_pieces_are_cut_to_explain_rounding(options: dict[str, str], low: bool) -> None:
    """Losses along a move differ by rounding there; the control, in full precision, is cut into many pieces."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    x, y = torch.randn(4, 6), torch.randn(4, 3)

    def loss(m: nn.Module, rows: slice) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            out = m(x[rows])
        return (out.float() - y[rows]).square().mean()

    accountant = inrun.Accountant(model, optimizer, lambda m: loss(m, slice(0, 1)), audit_every=1, **options)
    points = []
    for _ in range(6):
        with accountant.step(range(4)):
            loss(model, slice(0, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        points.append(accountant.last.accounts["validation"].points)
    accountant.close()
    assert (max(points) > 3) is not low

"""Batch norm in training mode: what each row contributes to the gradient of weight and bias."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import inrun
from reference import relative_error


def test_batch_norm_gives_shares_of_rows(caplog: pytest.LogCaptureFixture) -> None:
    """Row n's share is the gradient at a copy of weight and bias that row n alone uses; one warning says so."""
    torch.manual_seed(0)
    n, lr = 5, 0.1
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Tanh()).double()
    norm: nn.BatchNorm1d = model[1]
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    x, held = torch.randn(n, 3, 6).double(), torch.randn(3, 3, 6).double()
    optimizer = torch.optim.SGD([norm.weight, norm.bias], lr=lr)

    def loss(net: nn.Module, rows: Tensor) -> Tensor:
        return net(rows).pow(3).sum()

    # The reference comes first: a step changes the weights.
    inner = model[0](x)
    mean, variance = inner.mean((0, 2), keepdim=True), inner.var((0, 2), correction=0, keepdim=True)
    copies = [p.detach().expand(n, -1).clone().requires_grad_() for p in (norm.weight, norm.bias)]
    out = (inner - mean) / (variance + norm.eps).sqrt() * copies[0].unsqueeze(2) + copies[1].unsqueeze(2)
    shares = torch.autograd.grad(out.tanh().pow(3).sum(), copies)
    model.eval()
    with caplog.at_level(logging.WARNING, logger="inrun"):
        accountant = inrun.Accountant(
            model, optimizer, lambda net: loss(net, held), credit="step", method="first", audit_every=1, validation_mode="eval"
        )
    assert sum("shares" in r.message or "couples the rows" in r.message for r in caplog.records) == 1
    directions = torch.autograd.grad(loss(model, held), [norm.weight, norm.bias])
    model.train()
    with accountant, accountant.step(range(n)):
        loss(model, x).backward()
        optimizer.step()
    expected = sum(lr * (share * v).sum(1) for share, v in zip(shares, directions, strict=True))
    assert relative_error(accountant.last.contributions["validation"], expected) < 1e-9
    assert {row.rule for row in accountant.coverage if row.parameter.startswith("1.")} == {"batch norm"}


@pytest.mark.parametrize(
    ("frozen", "whole", "told"),
    [(False, False, "in training mode (1)"), (True, False, ""), (False, True, "that is put into training mode (1)")],
)
def test_batch_norm_is_told_of_where_it_couples(frozen: bool, whole: bool, told: str, caplog) -> None:
    """Frozen statistics couple nothing; a model that is in eval mode as a whole may not stay in it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.train(not whole)
    model[1].train(not whole and not frozen)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inrun.Accountant(model, optimizer, lambda m: m(torch.ones(2, 3)).mean()).close()
    assert ("batch norm" in caplog.text) is bool(told)
    assert told in caplog.text

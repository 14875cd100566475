"""Documents packed into rows score as they do one per row, and as gradients of their own positions say."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from inrun.engine import Accountant
from packing import ONE_ROW, TWO_ROWS, Batch, both, gpt_logits, loss_of, packed_gpt
from reference import relative_error

LR = 1e-4


def contributions(model: nn.Module, batch: Batch, ids, method: str) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    held, _, _ = both(((6, 4),), seed=5)
    options = {} if method == "first" else {"sketch": "exact"}

    def validation(net: nn.Module) -> Tensor:
        return loss_of(gpt_logits(net, held), held.labels)

    with Accountant(model, optimizer, validation, method=method, audit_every=1, **options) as accountant:
        with accountant.step(ids):
            loss_of(gpt_logits(model, batch), batch.labels).backward()
            optimizer.step()
        (found,) = accountant.last.contributions.values()
    return found


@pytest.mark.parametrize("rows", [TWO_ROWS, ONE_ROW], ids=["two rows, padded", "one row"])
@pytest.mark.parametrize("method", ["first", "step", "whole"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_as_one_per_row(rows, method: str, tied: bool) -> None:
    packed, single, ids = both(rows)
    got = contributions(packed_gpt(tied), packed, packed.ids, method)
    expected = contributions(packed_gpt(tied), single, ids, method)
    assert relative_error(got, expected) < 1e-9
    assert relative_error(got.roll(1), expected) > 1e-3


@pytest.mark.parametrize("rows", [TWO_ROWS, ONE_ROW], ids=["two rows, padded", "one row"])
def test_packed_against_autograd(rows) -> None:
    packed, _, _ = both(rows)
    model = packed_gpt()
    got = contributions(model, packed, packed.ids, "first")
    held, _, _ = both(((6, 4),), seed=5)
    reference = packed_gpt()
    parameters = list(reference.parameters())
    v = torch.autograd.grad(loss_of(gpt_logits(reference, held), held.labels), parameters)
    expected = []
    for document in range(int(packed.documents.max()) + 1):
        labels = packed.labels.where(packed.documents == document, -100)
        share = int((labels >= 0).sum()) / int((packed.labels >= 0).sum())
        if share == 0:
            expected.append(torch.zeros((), dtype=torch.float64))
            continue
        loss = share * loss_of(gpt_logits(reference, packed), labels)
        g = torch.autograd.grad(loss, parameters)
        expected.append(LR * torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)]).sum())
    assert relative_error(got, torch.stack(expected)) < 1e-9

"""Documents packed into rows score as they do one per row, and as gradients of their own positions say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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


# Drawn packings


IDS = st.integers(1, 3).flatmap(
    lambda n: st.integers(1, 8).flatmap(
        lambda t: st.lists(st.lists(st.integers(-1, 3), min_size=t, max_size=t), min_size=n, max_size=n)
    )
)
LAYERS = {
    "linear": lambda: nn.Linear(4, 3),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=1),
    "layer norm": lambda: nn.LayerNorm(4),
    "RMS norm": lambda: nn.RMSNorm(4),
}


class Positions(nn.Module):
    """A layer over positions, in rows or laid end to end."""

    def __init__(self, layer: nn.Module, flat: bool) -> None:
        super().__init__()
        self.layer, self.flat = layer, flat

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.flat else self.layer(x)


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(rows=IDS.filter(lambda rows: any(i >= 0 for row in rows for i in row)), flat=st.booleans(), whole=st.booleans())
def test_runs_of_an_id_are_uses(name: str, rows: list[list[int]], flat: bool, whole: bool) -> None:
    """Documents in any order, ids that come back, padding anywhere."""
    ids = torch.tensor(rows)
    torch.manual_seed(ids.numel())
    model = Positions(LAYERS[name](), flat).double()
    x = torch.randint(0, 5, ids.shape) if name == "embedding" else torch.randn(*ids.shape, 4, dtype=torch.float64)
    begins = torch.cat([torch.ones_like(ids[:, :1], dtype=torch.bool), ids[:, 1:] != ids[:, :-1]], 1) & (ids >= 0)
    use = torch.where(ids >= 0, begins.flatten().cumsum(0).view_as(ids) - 1, -1)

    def loss(m: nn.Module, some: Tensor) -> Tensor:
        return (m(x).sin().sum(-1) * some).sum()

    parameters = list(model.parameters())
    v = torch.autograd.grad(loss(model, ids == ids), parameters)
    expected = []
    for u in range(int(use.max()) + 1):
        g = torch.autograd.grad(loss(model, use == u), parameters)
        expected.append(LR * torch.stack([(a * b).sum() for a, b in zip(g, v, strict=True)]).sum())
    optimizer = torch.optim.SGD(parameters, lr=LR)
    options = {"method": "whole", "sketch": "exact"} if whole else {"method": "first"}
    with Accountant(model, optimizer, lambda m: loss(m, ids == ids), audit_every=1, **options) as accountant:
        with accountant.step(ids):
            loss(model, ids >= 0).backward()
            optimizer.step()
        (found,) = accountant.last.contributions.values()
    assert accountant.last.sample_ids.tolist() == ids[begins].tolist()
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-3 if whole else 1e-9, atol=1e-3 * LR if whole else 1e-12 * LR)

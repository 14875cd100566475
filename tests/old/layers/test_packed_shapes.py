"""Drawn packings: every layer that treats positions by themselves, against one document at a time by plain autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from draws import draw
from inrun.old.engine import documents as documents_module
from inrun.old.engine.documents import Documents
from inrun.old.layers import Formed, find_rule, from_bits
from inrun.old.layers.sketch import SketchPlan

D, O, ROWS = 4, 3, 5  # noqa: E741


class Packings:
    """Ids ``[n, t]`` as people give them: documents in a row, repeated ids, padding anywhere."""

    ids = st.integers(1, 3).flatmap(
        lambda n: st.integers(1, 9).flatmap(
            lambda t: st.lists(st.lists(st.integers(-1, 3), min_size=t, max_size=t), min_size=n, max_size=n)
        )
    )
    usable = ids.filter(lambda rows: any(i >= 0 for row in rows for i in row))


LAYERS = {
    "linear": lambda: nn.Linear(D, O),
    "embedding": lambda: nn.Embedding(ROWS, O, padding_idx=1),
    "layer norm": lambda: nn.LayerNorm(D),
    "RMS norm": lambda: nn.RMSNorm(D),
}


def case(name: str, ids: Tensor, flat: bool, heads: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a module, its input and an output gradient that is 0 where nobody is."""
    torch.manual_seed(ids.numel())
    module = LAYERS[name]().double()
    lead = (ids.numel(),) if flat else tuple(ids.shape)
    lead = (*lead, 2) if heads and name != "embedding" else lead
    x = torch.randint(0, ROWS, lead) if name == "embedding" else torch.randn(*lead, D, dtype=torch.float64)
    b = torch.randn(module(x).shape, dtype=torch.float64)
    b.view(ids.numel(), -1)[ids.reshape(-1) < 0] = 0.0
    return module, x, b


def alone(module: nn.Module, x: Tensor, b: Tensor, unit: Tensor, documents: int) -> dict[str, Tensor]:
    """Return the gradients of every document, one after the other."""
    found: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    features = x.shape[2:] if x.shape[:1] != unit.shape else x.shape[1:]
    for u in range(documents):
        mine = x.reshape(len(unit), *features)[unit == u]
        grads = torch.autograd.grad(
            module(mine), list(module.parameters()), b.reshape(len(unit), -1)[unit == u].view_as(module(mine))
        )
        for name, g in zip(found, grads, strict=True):
            found[name].append(g)
    return {name: torch.stack(g) for name, g in found.items()}


@pytest.mark.parametrize("name", LAYERS)
@draw("documents in rows")
@given(rows=Packings.usable, flat=st.booleans(), heads=st.booleans(), cost=st.sampled_from([0, 1, 32]))
def test_documents_one_at_a_time(name: str, rows: list[list[int]], flat: bool, heads: bool, cost: int) -> None:
    ids = torch.tensor(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "CHUNK_COST", cost)
        documents = Documents(ids, torch.device("cpu"))
    packing = documents.packing
    module, x, b = case(name, ids, flat, heads)
    rule = find_rule(module)
    assert rule is not None and rule.positionwise
    truth = alone(module, x, b, documents.unit, packing.documents)
    names, constants = tuple(truth), rule.constants(module)
    for label, shape in packing.gradients(rule, constants, (x,), b, documents.places, names).items():
        whole = truth[label]
        v = torch.randn(2, *whole.shape[1:], dtype=torch.float64)
        expected = torch.einsum("n...,k...->nk", whole, v) if whole.dim() == 2 else torch.einsum("npq,kpq->nk", whole, v)
        close = lambda a, e: torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-12)  # noqa: E731
        close(shape.form(), whole)
        close(shape.total(), whole.sum(0))
        close(shape.contract(v), expected)
        total, c = shape.total_and_contract(v, by_rows=False)
        close(total, whole.sum(0))
        close(c, expected)
        if whole.dim() == 3 and name == "linear":
            close(shape.contract_by_rows(v), torch.einsum("npq,kpq->nkp", whole, v))
            plan = SketchPlan(O, D, 2, 4, heavy=1)
            signs, weights = torch.ones(O * D, dtype=torch.float64), torch.rand(O * 2, dtype=torch.float64) + 0.5
            direct = Formed(whole).sketch(signs, weights, plan)
            for a, e in zip(shape.sketch(signs, weights, plan), direct, strict=True):
                close(a.nan_to_num(), e.nan_to_num())
            for a, e in zip(shape.total_and_sketch(v, signs, weights, plan)[2], direct, strict=True):
                close(a.nan_to_num(), e.nan_to_num())
        kind, parts = packing.kept_as(rule, constants, label, module.get_parameter(label), (x,), b.dtype)
        kept = shape.keep(kind)
        assert [(tuple(p.shape), p.dtype) for p in kept.parts()] == [(tuple(s), d) for s, d in parts]
        restored = documents.gather(rule.restore(constants, kind, kept.parts()))
        close(restored.contract(v), expected)
        if name == "embedding":
            values, bits = shape.sketch(torch.ones(ROWS * O).double(), torch.ones(ROWS * O).double(), SketchPlan(ROWS, O, 1, 4))
            table = torch.zeros(packing.chunks, ROWS, O, dtype=torch.float64)
            table.scatter_add_(1, from_bits(bits).unsqueeze(-1).expand_as(values), values)
            summed = torch.zeros_like(whole).index_add_(0, documents.places[:, 0], table)
            close(summed, whole)


def test_chunks_take_little_more_memory_than_the_batch() -> None:
    """Padding to the longest document would take many times as much."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.cat([torch.tensor([4096]), torch.randint(20, 200, (60,), generator=generator)])
    ids = torch.repeat_interleave(torch.arange(len(sizes)), sizes).unsqueeze(0)
    packing = Documents(ids, torch.device("cpu")).packing
    assert packing.chunks * packing.chunk_length < 1.5 * ids.numel()
    assert len(sizes) * int(sizes.max()) > 20 * ids.numel()

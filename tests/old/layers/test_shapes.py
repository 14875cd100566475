"""Gradient shapes against per-sample gradients that are formed in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inrun.old.layers import shapes
from inrun.old.layers.registry import nbytes_of
from inrun.old.layers.running import _chains, shared_outer
from inrun.old.layers.shapes import Formed, GradientShape, LookUp, Outer
from inrun.old.layers.sketch import SketchPlan, fold, from_bits

N, T, P, Q, K, ROWS = 4, 3, 5, 6, 2, 7


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outer() -> tuple[GradientShape, Tensor]:
    x, y = floats(N, T, P), floats(N, T, Q, seed=1)
    return Outer(x, y), torch.einsum("ntp,ntq->npq", x, y)


def formed() -> tuple[GradientShape, Tensor]:
    g = floats(N, P, Q)
    return Formed(g), g


def look_up(padding: int | None = None) -> tuple[GradientShape, Tensor]:
    tokens = torch.randint(0, ROWS, (N, T), generator=torch.Generator().manual_seed(2))
    b = floats(N, T, Q)
    whole = torch.zeros(N, ROWS, Q, dtype=torch.float64)
    for n in range(N):
        for t in range(T):
            if tokens[n, t] != padding:
                whole[n, tokens[n, t]] += b[n, t]
    return LookUp(tokens, b, ROWS, padding), whole


SHAPES = {"outer": outer, "formed": formed, "look-up": look_up, "look-up with padding": lambda: look_up(3)}


@pytest.mark.parametrize("scratch", [1, 10**6])
@pytest.mark.parametrize("k", [1, 2, 8, 20])
@pytest.mark.parametrize("t", [2, 6, 40])
def test_few_and_many_directions(t: int, k: int, scratch: int, monkeypatch) -> None:
    """Projected or formed, some samples at a time or all at once: the same products, for samples and directions in their places."""
    monkeypatch.setattr(shapes, "SCRATCH_BYTES", scratch)
    x, y, v = floats(N, t, P), floats(N, t, Q, seed=1), floats(k, P, Q, seed=5)
    formed_here: list[int] = []
    usual = Outer._formed_dots
    monkeypatch.setattr(Outer, "_formed_dots", lambda self, v: formed_here.append(1) or usual(self, v))
    got = Outer(x, y).contract(v)
    torch.testing.assert_close(got, torch.einsum("ntp,ntq,kpq->nk", x, y, v))
    assert bool(formed_here) == (k * t > t + 4 * k)
    torch.testing.assert_close(Formed(torch.einsum("ntp,ntq->npq", x, y)).contract(v), got)


@pytest.mark.parametrize("name", SHAPES)
def test_contract_total_and_sketch(name: str) -> None:
    shape, whole = SHAPES[name]()
    v = floats(K, *whole.shape[1:], seed=5)
    signs = torch.randint(0, 2, whole.shape[1:], generator=torch.Generator().manual_seed(3)).double() * 2 - 1
    torch.testing.assert_close(shape.contract(v), torch.einsum("npq,kpq->nk", whole, v))
    torch.testing.assert_close(shape.total(), whole.sum(0))
    torch.testing.assert_close(shape.form(), whole)
    total, c = shape.total_and_contract(v, by_rows=False)
    torch.testing.assert_close(total, whole.sum(0))
    torch.testing.assert_close(c, torch.einsum("npq,kpq->nk", whole, v))
    for segment in (1, whole.shape[2]):
        sums = (whole * signs).flatten(1).view(len(whole), -1, segment).sum(2)
        weights = torch.arange(1, sums.shape[1] + 1).double()
        for buckets in (1, 4, 9):
            plan = SketchPlan(whole.shape[1], whole.shape[2], segment, buckets)
            sketch = torch.zeros(len(whole), buckets, dtype=torch.float64)
            for j, column in enumerate((sums * weights).t()):
                sketch[:, j % buckets] += column
            found = shape.sketch(signs.reshape(-1), weights, plan)
            if isinstance(shape, LookUp):
                found = (scattered(found, plan, buckets),)
            torch.testing.assert_close(found[0], sketch)
            torch.testing.assert_close(shape.total_and_sketch(v, signs.reshape(-1), weights, plan)[1], c)


def scattered(found: tuple[torch.Tensor, ...], plan: SketchPlan, buckets: int) -> torch.Tensor:
    """Let rows that were kept apart fall into buckets after all."""
    values, rows = found[0], from_bits(found[1])
    table = torch.zeros(len(values), plan.rows, plan.per_row, dtype=torch.float64)
    for n in range(len(values)):
        for t, row in enumerate(rows[n]):
            table[n, row] += values[n, t]
    return fold(table.flatten(1), torch.ones(()), buckets)


@pytest.mark.parametrize(
    ("n", "p", "q", "sums"),
    [(4, 8, 16, 4), (40, 64, 64, 20), (7, 256, 80, 4), (9, 256, 128, 1), (3, 512, 600, 1), (1, 16, 16, 1)],
)
@pytest.mark.parametrize("k", [1, 3])
def test_running_sums(n: int, p: int, q: int, sums: int, k: int) -> None:
    """All samples at once, groups of like size, and one running sum give weight gradient, contractions and segments alike."""
    x, y, v = floats(n, T, p), floats(n, T, q, seed=1), floats(k, p, q, seed=2)
    whole = torch.einsum("ntp,ntq->npq", x, y)
    signs = floats(p * q, seed=3).sign()
    assert _chains(n, n, p * q * 8) == sums
    for most in (None, 2):
        total, c, none = shared_outer(x, y, v, most=most)
        assert none is None
        torch.testing.assert_close(total, whole.sum(0))
        torch.testing.assert_close(c, torch.einsum("npq,kpq->nk", whole, v))
        torch.testing.assert_close(shared_outer(x, y, v, by_rows=True, most=most)[1], torch.einsum("npq,kpq->nkp", whole, v))
        _, c, segments = shared_outer(x, y, v, signs=signs, segment=q, most=most)
        torch.testing.assert_close(c, torch.einsum("npq,kpq->nk", whole, v))
        torch.testing.assert_close(segments, (whole * signs.view(p, q)).sum(2))
    # Directions of more precision than the products are not rounded to theirs.
    single = shared_outer(x.float(), y.float(), v)
    torch.testing.assert_close(single[0], whole.sum(0).float(), rtol=1e-3, atol=1e-3)
    assert single[1].dtype == torch.float64


@pytest.mark.parametrize("room", [1, 400, 4 << 20], ids=["row by row", "some rows", "all rows"])
@pytest.mark.parametrize(("n", "t", "segment", "projected"), [(4, 1, 4, True), (3, 4, 4, True), (3, 5, 4, False), (0, 2, 4, True)])
def test_few_positions_are_projected_on_the_signs(
    n: int, t: int, segment: int, projected: bool, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inrun.old.layers.shapes.SCRATCH_BYTES", room)
    x, y = floats(n, t, 5), floats(n, t, 12, seed=1)
    signs = torch.randint(0, 2, (5, 12), generator=torch.Generator().manual_seed(3)).double() * 2 - 1
    formed = []
    monkeypatch.setattr(Outer, "form", lambda self: formed.append(self) or torch.einsum("ntp,ntq->npq", self.x, self.y))
    found = Outer(x, y).segment_sums(signs.flatten(), SketchPlan(5, 12, segment, 7))
    whole = torch.einsum("ntp,ntq->npq", x, y)
    torch.testing.assert_close(found, (whole * signs).view(n, -1, segment).sum(2) if n else found.new_zeros(0, 15))
    assert projected == (not formed)


@pytest.mark.parametrize("heavy", [1, 2])
def test_the_heaviest_rows_are_kept_apart(heavy: int) -> None:
    shape, whole = outer()
    signs, weights = torch.ones(P * Q).double(), torch.ones(P).double()
    plan = SketchPlan(P, Q, Q, 3, heavy)
    rest, values, bits = shape.sketch(signs, weights, plan)
    rows = from_bits(bits)
    energy = whole.sum(2).square()
    assert torch.equal(rows, torch.topk(energy, heavy, dim=1).indices)
    torch.testing.assert_close(values[..., 0], whole.sum(2).gather(1, rows))
    plain = shape.sketch(signs, weights, SketchPlan(P, Q, Q, 3))[0]
    torch.testing.assert_close(rest.sum(1) + values.sum((1, 2)), plain.sum(1))  # nothing is lost, nothing counted twice


def test_sketches_estimate_inner_products() -> None:
    """Unbiased: the mean over random signs of ⟨Sg, Sv⟩ is ⟨g, v⟩, with weights ρ on one side and 1/ρ on the other."""
    shape, whole = outer()
    v = floats(1, P, Q, seed=5)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(P * Q, generator=generator, dtype=torch.float64) + 0.5
    plan = SketchPlan(P, Q, 1, 8)
    found = []
    for _ in range(4000):
        signs = torch.randint(0, 2, (P * Q,), generator=generator).double() * 2 - 1
        found.append(shape.sketch(signs, weights, plan)[0] @ Formed(v).sketch(signs, 1 / weights, plan)[0][0])
    expected = torch.einsum("npq,kpq->n", whole, v)
    spread = torch.stack(found).std(0) / 4000**0.5
    assert bool(((torch.stack(found).mean(0) - expected).abs() < 4 * spread).all())


def test_rows_apart() -> None:
    shape, whole = outer()
    v = floats(K, P, Q, seed=5)
    by_rows = torch.einsum("npq,kpq->nkp", whole, v)
    torch.testing.assert_close(shape.contract_by_rows(v), by_rows)
    torch.testing.assert_close(shape.total_and_contract(v, by_rows=True)[1], by_rows)


def test_touched_rows_alone() -> None:
    shape, whole = look_up()
    shape = LookUp(shape.tokens, shape.b, 100, None)  # a table with more rows than tokens
    rows = shape.touched()
    assert rows.tolist() == sorted(set(shape.tokens.flatten().tolist()))
    v = floats(K, 100, Q, seed=5)
    torch.testing.assert_close(shape.contract_touched(rows, v[:, rows]), torch.einsum("npq,kpq->nk", whole, v[:, :ROWS]))


@pytest.mark.parametrize(("t", "kind"), [(1, Outer), (30, Formed)])
def test_the_smaller_is_kept_and_comes_back(t: int, kind: type) -> None:
    x, y = floats(N, t, P), floats(N, t, Q, seed=1)
    chosen, parts = Outer.kept_as(N, t, P, Q, (x.dtype, y.dtype))
    assert chosen is kind
    buffer = torch.empty(N, P, Q, dtype=x.dtype) if kind is Formed else None
    kept = Outer(x, y).keep(chosen, buffer)
    assert [(tuple(p.shape), p.dtype) for p in kept.parts()] == list(parts)
    assert kept.nbytes == nbytes_of(parts)
    again = kind.of(kept.parts())
    v = floats(K, P, Q, seed=5)
    torch.testing.assert_close(again.contract(v), Outer(x, y).contract(v))


def test_tokens_leave_as_bits() -> None:
    """Tokens are no floating-point numbers, but only those leave a backward."""
    tokens = torch.tensor([[0, 2**40 + 1, 3], [-1, 5, 2**62]])
    shape = LookUp(tokens, floats(2, 3, Q), 2**63 - 1, None)
    parts = shape.parts()
    assert all(p.is_floating_point() for p in parts)
    again = LookUp.of(tuple(p.clone() for p in parts), 2**63 - 1, None)
    assert torch.equal(again.tokens, tokens)
    tokens.zero_()
    assert not torch.equal(again.tokens, tokens)

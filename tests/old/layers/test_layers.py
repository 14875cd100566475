"""Every rule and form against one-sample-at-a-time autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import inrun
from cases import CASES, Case, D, masked_sum, model_of, position_mask
from draws import draw, drawn
from inrun.old.layers.running import shared_outer
from inrun.old.layers.shapes import Outer
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

COMBINATIONS = [pytest.param(case, form, id=f"{case.name}-{form}") for case in CASES for form in case.forms]


def run_case(
    case: Case,
    form: str,
    dtype: torch.dtype,
    n: int,
    t: int,
    seed: int,
    sets: int = 2,
    points: bool = False,
    scales: list[float] | None = None,
):
    """Score one step and return (got, expected) per validation set, and the accountant's coverage.

    With ``points``, validation callables return a vector, one loss per row, and every row has its own column. ``scales`` gets the
    largest ‖P∘g_n‖‖∇ℓ‖ of every set: what the rounding of an inner product that cancels is relative to.
    """
    g = torch.Generator().manual_seed(seed)
    reference = model_of(case)
    model = copy.deepcopy(reference).to(dtype)
    x, mask = case.draw(n, t, g), position_mask(n, t, g)
    validation = [(case.draw(v, t, g), torch.ones(v, t)) for v in (1, 3, 2)[:sets]]
    cast = (lambda z: z.to(dtype)) if x.is_floating_point() else (lambda z: z)
    norm = mask.sum()

    def losses(net: nn.Module, index: int, like: Callable[[Tensor], Tensor]) -> Tensor:
        rows, m = validation[index]
        if not points:
            return masked_sum(net(like(rows)), m) / m.sum()
        out = net(like(rows))
        return torch.stack([masked_sum(out[j : j + 1], m[j : j + 1]) / m.sum() for j in range(len(rows))])

    def val_loss(index: int):
        return lambda net: losses(net, index, cast)

    trainable = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    acc_form = form if form in ("shared", "project") else "auto"
    with inrun.Accountant(
        model, optimizer, {str(i): val_loss(i) for i in range(sets)}, form=acc_form, audit_every=1, credit="step"
    ) as accountant:
        with accountant.step(range(n)):
            (masked_sum(model(cast(x)), mask) / norm).backward()
            optimizer.step()
        got = accountant.last.contributions
        coverage = accountant.coverage
    g_n = sample_gradients(lambda j: masked_sum(reference(x[j : j + 1]), mask[j : j + 1]) / norm, n, trainable)
    reference_optimizer = torch.optim.SGD(trainable, lr=0.1)
    gains = [sgd_gain(reference_optimizer, p, p) for p in trainable]
    results = {}
    for i in range(sets):
        each = []
        for j in range(len(validation[i][0]) if points else 1):
            loss = losses(reference, i, lambda z: z).reshape(-1)[j]
            direction = gradients(loss, trainable)
            each.append(contributions(g_n, gains, direction))
            if scales is not None:
                pushes = [torch.stack([(p * x).square().sum() for p, x in zip(gains, g, strict=True)]).sum().sqrt() for g in g_n]
                push = torch.stack([x.square().sum() for x in direction]).sum().sqrt()
                scales.append(float(max(pushes) * push))
        results[str(i)] = (got[str(i)], torch.stack(each, 1) if points else each[0])
    return results, coverage


@pytest.mark.parametrize(("case", "form"), COMBINATIONS)
@pytest.mark.parametrize(("n", "points"), [(1, False), (5, False), (5, True)])
def test_float64_against_reference(case: Case, form: str, n: int, points: bool) -> None:
    results, coverage = run_case(case, form, torch.float64, n, 4, seed=1, points=points)
    for got, expected in results.values():
        assert got.shape == expected.shape
        assert relative_error(got, expected) < case.accuracy
    assert coverage.scored_share == 1.0
    if n == 1 and case.rule in ("read", "fallback"):
        return  # all gradient of what is read is the one sample's
    used = [row for row in coverage if row.rule == case.rule]
    assert used, f"expected rule {case.rule}, got {coverage}"
    assert any(form in row.form for row in used), str(coverage)
    assert coverage.scored_share == 1.0


@pytest.mark.parametrize(("case", "form"), COMBINATIONS)
def test_float32_against_reference(case: Case, form: str) -> None:
    results, _ = run_case(case, form, torch.float32, 6, 4, seed=2, sets=3)
    for got, expected in results.values():
        assert relative_error(got, expected) < 1e-5


@draw("outer products")
@given(
    n=st.integers(1, 9),
    t=st.integers(1, 12),
    p=st.integers(1, 5),
    q=st.integers(1, 5),
    k=st.integers(1, 9),
    seed=st.integers(0, 2**20),
)
def test_outer_products_of_any_shape(n: int, t: int, p: int, q: int, k: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, y, v = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, t, p), (n, t, q), (k, p, q)))
    per_sample = torch.einsum("ntp,ntq->npq", x, y)
    expected = torch.einsum("npq,kpq->nk", per_sample, v)
    signs = torch.randint(0, 2, (p * q,), generator=g).double() * 2 - 1
    total, shared, segments = shared_outer(x, y, v, signs=signs, segment=q)
    torch.testing.assert_close(segments, (per_sample.flatten(1) * signs).view(n, p, q).sum(-1), rtol=1e-12, atol=1e-11)
    _, rows, _ = shared_outer(x, y, v, by_rows=True)
    torch.testing.assert_close(rows, torch.einsum("npq,kpq->nkp", per_sample, v), rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(Outer(x, y).contract_by_rows(v), rows, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(total, per_sample.sum(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(Outer(x, y).contract(v), expected, rtol=1e-12, atol=1e-11)


ANY_SHAPE = {
    "index": st.integers(0, len(COMBINATIONS) - 1),
    "n": st.integers(1, 6),
    "t": st.integers(1, 6),
    "points": st.booleans(),
    "seed": st.integers(0, 2**20),
}


def check_case_of_any_shape(index: int, n: int, t: int, points: bool, seed: int) -> None:
    case, form = COMBINATIONS[index].values
    if "two dimensions" in case.name:
        t = 4
    scales: list[float] = []
    results, _ = run_case(case, form, torch.float64, n, t, seed=seed, points=points, scales=scales)
    for got, expected in results.values():
        # Modules that compute in single precision, whatever they are given, round relative to what cancels.
        rounding = 1e-6 * max(scales) if case.accuracy > 1e-9 else 0.0
        assert float((got - expected).abs().max()) <= case.accuracy * float(expected.abs().max()) + rounding


@draw("cases")
@given(**ANY_SHAPE)
def test_cases_of_any_shape(**drawn: Any) -> None:
    check_case_of_any_shape(**drawn)


@pytest.mark.slow
@draw("cases", slow=True)
@given(**ANY_SHAPE)
def test_more_cases_of_any_shape(**drawn: Any) -> None:
    check_case_of_any_shape(**drawn)


def test_two_thousand_shapes_are_drawn() -> None:
    assert drawn(slow=False) > 1_500
    assert drawn(slow=True) >= 2_000


def test_the_reference_sees_a_wrong_rule() -> None:
    """Control: scores that drop one use of a reused weight are far from the reference."""
    results, _ = run_case(next(c for c in CASES if c.name == "weight used three times"), "shared", torch.float64, 5, 4, 1)
    got, expected = results["0"]
    assert relative_error(got * 0.99, expected) > 1e-3
    assert relative_error(got.roll(1), expected) > 1e-3
    assert relative_error(-got, expected) > 1


def test_shared_weight_gradients_equal_the_frameworks() -> None:
    """Training itself: the gradients that the shared form produces are those of plain autograd."""
    for case, form in [c.values for c in COMBINATIONS]:
        model = model_of(case)
        plain = copy.deepcopy(model)
        g = torch.Generator().manual_seed(3)
        x, mask = case.draw(5, 4, g), torch.ones(5, 4)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.0)
        accountant = inrun.Accountant(
            model,
            optimizer,
            lambda net, x=x: masked_sum(net(x[:1]), torch.ones(1, 4)),
            form=form if form in ("shared", "project") else "auto",
            credit="step",
        )
        with accountant.step(range(5)):
            masked_sum(model(x), mask).backward()
            optimizer.step()
        masked_sum(plain(x), mask).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if p.requires_grad:
                assert relative_error(p.grad, q.grad) < 1e-12, (case.name, name)
        accountant.close()


@pytest.mark.parametrize(("case", "form"), [c for c in COMBINATIONS if c.values[0].rule == "read"])
def test_whole_credit_kept_and_sketched(case: Case, form: str) -> None:
    """What is kept until the optimizer steps, and sketches with a number for every entry, give the credits of the gradients."""
    g = torch.Generator().manual_seed(5)
    x, mask, n = case.draw(4, 4, g), position_mask(4, 4, g), 4
    found = []
    for options in ({"credit_memory": "exact"}, {"sketch": 1 << 20}):
        model = model_of(case)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.01, momentum=0.5)
        with inrun.Accountant(
            model,
            optimizer,
            lambda net: masked_sum(net(x[:2]), mask[:2]),
            form=form if form in ("shared", "project") else "auto",
            audit_every=1,
            credit="whole",
            **options,
        ) as accountant:
            for _ in range(2):
                optimizer.zero_grad()
                with accountant.step(range(n)):
                    (masked_sum(model(x), mask) / mask.sum()).backward()
                    optimizer.step()
        table = accountant.ledger.credits().sort_by([("step", "ascending"), ("row", "ascending")])
        found.append(torch.tensor(table["credit"].to_numpy().astype(float)))
    assert relative_error(found[1], found[0]) < max(1e-6, case.accuracy), case.name  # the books are in single precision


class DropoutInside(nn.Module):
    """Dropout inside a module without a rule: the repeated forward must draw the same mask."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * self.scale, 0.5, self.training)


def test_fallback_replays_dropout() -> None:
    """Conservation is checked on the step; with another mask it would fail."""
    torch.manual_seed(0)
    model = DropoutInside().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 3, D, dtype=torch.float64)
    with inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), audit_every=1, credit="step") as accountant:
        with accountant.step(range(4)):
            model(x).square().sum().backward()
            optimizer.step()
        assert accountant.last.contributions["validation"].abs().min() > 0


def test_temporaries_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit the scratch buffer is done in pieces, with the same result."""
    from inrun.old.layers import norm, shapes

    for module in (shapes, norm):
        monkeypatch.setattr(module, "SCRATCH_BYTES", 200)
    for case, form in [c.values for c in COMBINATIONS]:
        results, _ = run_case(case, form, torch.float64, 5, 4, seed=4)
        for got, expected in results.values():
            assert relative_error(got, expected) < case.accuracy, case.name

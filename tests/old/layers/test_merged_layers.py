"""Every rule in a merged pass, scalar and per point, against one-sample-at-a-time autograd; gram, and the choice of forms."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import inrun
from cases import CASES, Case, masked_sum, model_of, position_mask
from draws import draw
from inrun.errors import CoverageError, ValidationError
from inrun.old.layers import Outer
from inrun.old.layers.forms import FORMS, Contraction
from inrun.old.layers.merged import gram
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

N, M, T = 4, 3, 4
COMBINATIONS = [
    pytest.param(case, form, points, id=f"{case.name}-{form}-{'points' if points else 'scalar'}")
    for case in CASES
    for form in ("auto", "shared", "project", "gram")
    for points in (False, True)
]


def own_losses(out: Tensor, mask: Tensor) -> Tensor:
    return torch.stack([masked_sum(out[j : j + 1], mask[j : j + 1]) for j in range(len(out))])


def check(case: Case, form: str, points: bool, n: int, m: int, t: int, seed: int) -> None:
    """Score one merged step; layers that cannot be merged are refused by name."""
    g = torch.Generator().manual_seed(seed)
    reference = model_of(case)
    model = copy.deepcopy(reference)
    x, mask, held, theirs = case.draw(n, t, g), position_mask(n, t, g), case.draw(m, t, g), torch.ones(m, t)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    g_n = sample_gradients(lambda j: masked_sum(reference(x[j : j + 1]), mask[j : j + 1]) / mask.sum(), n, trainable)
    gains = [sgd_gain(torch.optim.SGD(trainable, lr=0.1), p, p) for p in trainable]
    each = [gradients(own_losses(reference(held[j : j + 1]), theirs[j : j + 1])[0], trainable) for j in range(m)]
    apart = torch.stack([contributions(g_n, gains, g_val) for g_val in each], 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with inrun.Accountant(model, optimizer, form=form, update="sgd", audit_every=1) as accountant:
        sites = accountant._setup.sites
        if any(site.rule.replays or site.rule.reads or site.rule.whole for site in sites):
            with pytest.raises(CoverageError, match="rule"), accountant.step(range(n), merged=m):
                pass
            return
        try:
            with accountant.step(range(n), merged=m, points=points) as step:
                out = model(torch.cat([x, held]))
                losses = own_losses(out[n:], theirs)
                step.merge(masked_sum(out[:n], mask) / mask.sum(), losses if points else losses.mean()).backward()
                got_gradients = [p.grad.clone() for p in model.parameters() if p.requires_grad]
                optimizer.step()
        except ValidationError as error:  # right only where no validation row has a gradient at all
            assert "no gradient came through the last" in str(error)
            assert not any(bool(x.any()) for g_val in each for x in g_val)
            return
        got = accountant.last.contributions["validation"]
        assert accountant.coverage.scored_share == 1.0
    if bool(apart.any()):
        assert relative_error(got, apart if points else apart.mean(1)) < case.accuracy
    else:  # rows of tables that training and validation do not share: 0 is right, and step.merge was told both losses
        assert not bool(got.any())
    for i, found in enumerate(got_gradients):
        assert relative_error(found, sum(g[i] for g in g_n)) < case.accuracy


@pytest.mark.parametrize(("case", "form", "points"), COMBINATIONS)
def test_against_reference(case: Case, form: str, points: bool) -> None:
    check(case, form, points, N, M, T, seed=1)


MERGEABLE = [c.values for c in COMBINATIONS if c.values[0].rule not in ("read", "fallback", "recurrent")]
ANY_SHAPE = {
    "index": st.integers(0, len(MERGEABLE) - 1),
    "n": st.integers(1, 5),
    "m": st.integers(1, 4),
    "t": st.integers(1, 6),
    "seed": st.integers(0, 2**20),
}


def check_any_shape(index: int, n: int, m: int, t: int, seed: int) -> None:
    case, form, points = MERGEABLE[index]
    check(case, form, points, n, m, 4 if "two dimensions" in case.name else t, seed)


@draw("merged cases")
@given(**ANY_SHAPE)
def test_cases_of_any_shape(**drawn: int) -> None:
    check_any_shape(**drawn)


@pytest.mark.slow
@draw("merged cases", slow=True)
@given(**ANY_SHAPE)
def test_more_cases_of_any_shape(**drawn: int) -> None:
    check_any_shape(**drawn)


@draw("gram")
@given(
    n=st.integers(1, 6),
    m=st.integers(1, 4),
    t=st.integers(1, 6),
    s=st.integers(1, 6),
    p=st.integers(1, 5),
    q=st.integers(1, 5),
    seed=st.integers(0, 2**20),
)
def test_gram_of_any_shape(n: int, m: int, t: int, s: int, p: int, q: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    a = Outer(*(torch.randn(n, t, size, generator=g, dtype=torch.float64) for size in (p, q)))
    b = Outer(*(torch.randn(m, s, size, generator=g, dtype=torch.float64) for size in (p, q)))
    expected = a.form().flatten(1) @ b.form().flatten(1).t()
    torch.testing.assert_close(gram(a, b), expected, rtol=1e-11, atol=1e-11)


def test_gram_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    a = Outer(*(torch.randn(7, 3, size, generator=g, dtype=torch.float64) for size in (5, 4)))
    whole = gram(a, a.samples(4, 7))
    monkeypatch.setattr("inrun.old.layers.merged.SCRATCH_BYTES", 3 * 3 * 3 * 8 * 2)
    torch.testing.assert_close(gram(a, a.samples(4, 7)), whole)
    assert gram(a.samples(0, 0), a).shape == (0, 7)


CHOICES = [
    (Contraction(16, 256, 256, 256, m=1), FORMS, "shared"),
    (Contraction(16, 16, 512, 512, m=1), FORMS, "gram"),
    (Contraction(16, 1024, 768, 3072, m=1), FORMS, "shared"),
    (Contraction(16, 1, 512, 512), ("shared", "project"), "project"),
    (Contraction(16, 256, 512, 512), ("shared", "project"), "shared"),
    (Contraction(16, 16, 512, 512, k=8, m=8), FORMS, "gram"),
]


@pytest.mark.parametrize(("sizes", "allowed", "expected"), CHOICES)
def test_choice_of_form(sizes: Contraction, allowed: tuple[str, ...], expected: str) -> None:
    assert sizes.cheapest(allowed, torch.float32, "cpu") == expected
    assert sizes.cheapest(tuple(reversed(allowed)), torch.float32, "cpu") == expected

"""Accounts: what scores add up to, what folds say of their errors, and that rounding alone fails no audit."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from inrun.engine import quadrature
from inrun.errors import ConfigurationError, ConservationError, CreditError, ValidationError
from inrun.ledger import StepRecord
from inrun.training.gpt import GPT, GPTConfig, next_token_loss
from loops import METHODS, adamw, attach, distance, held_out, losses, perceptron, points, run_step, train
from reference import gradients

EVERY = pytest.mark.parametrize("method", METHODS)

# What scores are


@pytest.mark.parametrize("method", ["first", "second"])
def test_scores_are_the_shapley_values_of_the_taylor_utility(method: str) -> None:
    """By all subsets of a batch of five: U(S) is the fall of the loss to first, or to second order."""
    n, lr = 5, 0.05
    model = perceptron()
    parameters, x = list(model.parameters()), points(n, 0)
    each = [torch.cat([g.flatten() for g in gradients(losses(model, x[j : j + 1]).sum() / n, parameters)]) for j in range(n)]
    flat, held = torch.cat([p.detach().flatten() for p in parameters]), points(3, 99)

    def value(w: Tensor) -> Tensor:
        parts = [v.view(p.shape) for v, p in zip(w.split([p.numel() for p in parameters]), parameters, strict=True)]
        named = dict(zip(dict(model.named_parameters()), parts, strict=True))
        return losses(lambda z: torch.func.functional_call(model, named, (z,)), held).mean()

    slope, bend = torch.func.grad(value)(flat), torch.func.hessian(value)(flat)

    def utility(some: tuple[int, ...]) -> float:
        move = -lr * sum((each[j] for j in some), torch.zeros_like(flat))
        return -float(slope @ move + (0.5 * move @ bend @ move if method == "second" else 0.0))

    values = {s: utility(s) for r in range(n + 1) for s in itertools.combinations(range(n), r)}
    truth = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        for some in (s for r in range(n) for s in itertools.combinations(others, r)):
            weight = math.factorial(len(some)) * math.factorial(n - len(some) - 1) / math.factorial(n)
            truth[i] += weight * (values[tuple(sorted((*some, i)))] - values[some])
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)
    got = run_step(attach(model, optimizer, method=method), lambda: losses(model, x).mean(), range(n))
    assert distance(got, truth) < 1e-9
    assert float(got.sum()) == pytest.approx(values[tuple(range(n))], rel=1e-9)  # efficiency
    assert distance(got, truth.roll(1)) > 1e-2


@EVERY
def test_accounts_add_up_and_are_measured(method: str) -> None:
    model = perceptron()
    accountant = attach(model, adamw(model), audit_every=1, **METHODS[method])
    for t in range(4):
        before = float(held_out(model).detach())
        train(accountant, [t])
        a = accountant.last.accounts["validation"]
        assert a.loss_before == pytest.approx(before, rel=1e-12)
        assert a.loss_after == pytest.approx(float(held_out(model).detach()), rel=1e-12)
        told = sum(x or 0.0 for x in (a.data, a.decay, a.inherited, a.rounding, a.momentum, a.residual))
        assert told == pytest.approx(a.loss_before - a.loss_after, abs=1e-12)
        if method not in ("first", "second"):
            assert abs(a.residual) <= quadrature.RESIDUAL * a.spread
        if method in ("first", "second", "step"):
            assert a.data == pytest.approx(float(accountant.last.contributions["validation"].sum()), rel=1e-9)


@pytest.mark.parametrize(("method", "order"), [("first", 2), ("second", 3), ("step", 3)])
def test_residuals_shrink_with_the_step_as_the_order_says(method: str, order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))
    found = []
    for lr in (0.02, 0.01, 0.005):
        model = perceptron()
        accountant = attach(model, torch.optim.SGD(model.parameters(), lr=lr), audit_every=1, method=method)
        train(accountant, range(1))
        found.append(abs(accountant.last.accounts["validation"].residual))
    rates = [math.log2(a / b) for a, b in itertools.pairwise(found)]
    assert all(abs(rate - order) < 0.3 for rate in rates), rates


@pytest.mark.parametrize("method", ["whole", "step"])
def test_calm_steps_take_no_extra_pass_and_rough_ones_are_known_by_cheap_signs(method: str) -> None:
    passes: list[int] = []

    def counted(model: Any, step: int) -> Tensor:
        passes.append(step)
        return held_out(model)

    model = perceptron()
    accountant = attach(model, torch.optim.SGD(model.parameters(), lr=1e-3), counted, method=method)
    measured = []
    for t in range(20):
        accountant.optimizers[0].param_groups[0]["lr"] = 5e-3 if t == 12 else 1e-3
        clip = (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) if t == 16 else (lambda: None)
        run_step(accountant, lambda: losses(model, points(4, 0)).mean(), range(4), between=clip)
        measured.append(accountant.last.accounts["validation"] is not None)
    assert [t for t in range(20) if measured[t]] == [0, 1, 2, 3, 4, 12, 16]
    assert all(passes.count(t) == (1 if not measured[t] else passes.count(t)) for t in range(20))
    state = accountant.state_dict()
    accountant.close()
    resumed = attach(model, torch.optim.SGD(model.parameters(), lr=1e-3), counted, method=method)
    resumed.load_state_dict(state)
    train(resumed, [20])
    assert resumed.last.accounts["validation"] is None  # it knows what is usual


# Folds


def test_the_error_of_a_fold_score_comes_from_sums_over_steps() -> None:
    ledger, parts = inrun.MemoryLedger(), np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)
    for step in range(5):
        ledger.write(StepRecord(step, np.arange(3), {f"v#{j}": parts[step, j] for j in range(4)}, []))
    table, sums = ledger.scores(), parts.astype(np.float64).sum(0)
    assert np.allclose(table["score"], sums.mean(0))
    assert np.allclose(table["standard_error"], sums.std(0, ddof=1) / 2)


@pytest.mark.slow
def test_fold_errors_are_honest() -> None:
    """95 % intervals cover the true score 90 to 98 % of the time, where the noise is known."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 1, generator=generator)
    quantile, covered, trials = stats.t.ppf(0.975, 9), 0, 150
    for _ in range(trials):
        strength = 1.0 + 2.0 * torch.randn(40, generator=generator)  # the population's mean pull is 1
        found = {}
        sampled = inrun.folds(lambda m, s=strength: s * m(torch.ones(1, 1)).sum(), 10)
        for name, fn in (("sampled", sampled), ("true", lambda m: m(torch.ones(1, 1)).sum())):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            accountant = attach(model, optimizer, {"v": fn}, method="first", check_rows=False)
            for _ in range(3):
                run_step(accountant, lambda model=model: (model(x) * x).sum(), range(4))
            accountant.close()
            found[name] = accountant.scores().to_pylist()[0]
        # All samples see the same validation points, so one of them is one trial.
        off = abs(found["sampled"]["score"] - found["true"]["score"])
        covered += off <= quantile * found["sampled"]["standard_error"]
    assert 0.90 <= covered / trials <= 0.985, covered / trials


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: inrun.folds(lambda m: None, 1), "at least 2"),
        (lambda: inrun.folds(lambda m: None, True), "at least 2"),
        (lambda: inrun.folds(3, 2), "callable"),
    ],
)
def test_bad_folds(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        make()


@pytest.mark.parametrize("make", [lambda m: losses(m, points(5, 0)), lambda m: losses(m, points(4, 0)).mean()])
def test_folds_need_a_vector_that_divides(make: Callable[[Any], Tensor]) -> None:
    with pytest.raises(ValidationError, match="multiple of k=2"):
        train(attach(perceptron(), validation=inrun.folds(make, 2)), range(1))


@EVERY
def test_spread_and_figure_of_merit_are_those_of_the_set_not_of_its_folds(method: str) -> None:
    """Folds that disagree must not make the residual look smaller."""
    sets = {"folds": inrun.folds(lambda m: losses(m, points(8, 5)), 4), "whole": lambda m: losses(m, points(8, 5)).mean()}
    accountant = attach(perceptron(), validation=sets, audit_every=1, **METHODS[method])
    train(accountant, range(3))
    folds, whole = (accountant.last.accounts[name] for name in sets)
    near = 1e-6 if method != "whole" else 0.2
    assert folds.residual == pytest.approx(whole.residual, rel=1e-6, abs=near * whole.spread)
    assert folds.spread == pytest.approx(whole.spread, rel=near)


# Rounding is no lost gradient, and lost gradient is no rounding


class RawHead(nn.Module):
    """A tied head that a custom function multiplies: its gradient is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(50, 32), nn.Linear(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return Product.apply(torch.tanh(self.inner(self.table(tokens))).to(self.table.weight.dtype), self.table.weight)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        g = g.to(w.dtype)
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


def low(dtype: torch.dtype, autocast: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


@pytest.mark.parametrize("method", ["whole", "first"])
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
def test_lost_gradient_is_seen_in_any_precision(dtype: torch.dtype, autocast: bool, method: str) -> None:
    torch.manual_seed(0)
    model = RawHead().to(dtype)
    tokens = torch.randint(0, 50, (16, 8))

    def loss(m: Any) -> Tensor:
        with low(dtype, autocast):
            return F.cross_entropy(m(tokens).float().flatten(0, 1), tokens.roll(1).flatten())

    accountant = attach(model, adamw(model), loss, audit_every=1, **METHODS[method])
    with pytest.raises(ConservationError, match=r"table\.weight"):
        for _ in range(2):
            run_step(accountant, lambda: loss(model), range(16))


@EVERY
@pytest.mark.parametrize(("dtype", "autocast"), [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)])
def test_rounding_alone_passes(dtype: torch.dtype, autocast: bool, method: str) -> None:
    """Also in Adam's first step, where v = η/|G| ∘ ∇ℓ: where samples cancel in G, the rounding of each counts for much."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab=300, context=32, width=32, layers=1, heads=2)).to(dtype)
    rows, held = torch.randint(0, 300, (16, 32)), torch.randint(0, 300, (2, 32))

    def loss(m: Any, some: Tensor) -> Tensor:
        with low(dtype, autocast):
            return next_token_loss(m, some)

    accountant = attach(model, adamw(model, lr=1e-3), lambda m: loss(m, held), audit_every=1, **METHODS[method])
    for _ in range(2):
        with accountant.step() as step:
            for part, ids in zip(rows.split(8), torch.arange(16).split(8), strict=True):
                with step.microbatch(ids):
                    (loss(model, part) / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            accountant.optimizers[0].step()
            accountant.optimizers[0].zero_grad()
    assert accountant.last.skipped is None


@pytest.mark.parametrize("penalty", [0.0, 0.1])
@pytest.mark.parametrize("loss_scale", [1.0, 1000.0])
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_cancel_are_no_lost_gradient(dtype: torch.dtype, method: str, loss_scale: float, penalty: float) -> None:
    """A head that begins at zero, and as many samples of each class: next to no gradient at its bias, and much of each sample.

    The control is a penalty of a fifth of what the samples push.
    """
    torch.manual_seed(0)
    model = nn.Linear(5, 2).to(dtype)
    with torch.no_grad():
        model.weight.mul_(1e-3)
        model.bias.zero_()
    x, y = 1e-3 * torch.randn(16, 5, dtype=dtype), torch.arange(16) % 2
    towards = torch.tensor([1.0, -1.0], dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / loss_scale)
    accountant = attach(model, optimizer, lambda m: F.cross_entropy(m(x[:3]), y[:3]), audit_every=1, **METHODS[method])
    refused = pytest.raises((ConservationError, CreditError), match="bias|weight") if penalty else contextlib.nullcontext()
    with refused:
        for _ in range(2):
            loss = lambda: loss_scale * (F.cross_entropy(model(x), y) + penalty * (model.bias @ towards))  # noqa: E731
            run_step(accountant, loss, range(16))

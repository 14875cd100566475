"""Every update rule against the real optimizer: the move, the move without a gradient, the gain, and what is registered."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
from torch import Tensor, nn, optim

from inrun.errors import OptimizerError
from inrun.old.optimizers import UpdateRule, find_update, plain, register
from inrun.old.optimizers.registry import gauss_legendre
from reference import frozen_gain, relative_error

#: Updates that work entry by entry, by name: how the optimizer is made.
ELEMENTWISE = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd decay": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.3),
    "sgd momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.2),
    "sgd maximize": lambda p: optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "sgd foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "sgd tensor lr": lambda p: optim.SGD(p, lr=torch.tensor(0.1), momentum=0.9),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adam decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3),
    "adam decoupled": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True),
    "adam amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, betas=(0.8, 0.7)),
    "adam amsgrad decay": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, betas=(0.8, 0.7), weight_decay=0.3),
    "adam maximize": lambda p: optim.Adam(p, lr=0.1, maximize=True, weight_decay=0.2),
    "adam sign": lambda p: optim.Adam(p, lr=0.1, betas=(0.5, 0.0)),
    "adam tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(0.125)),
    "adam fused decay": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.3, fused=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw amsgrad": lambda p: optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw maximize": lambda p: optim.AdamW(p, lr=0.1, maximize=True),
    "adamw foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "nadam decay": lambda p: optim.NAdam(p, lr=0.1, weight_decay=0.3, momentum_decay=0.1),
    "nadam decoupled": lambda p: optim.NAdam(p, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True, betas=(0.8, 0.95)),
    "nadam foreach maximize": lambda p: optim.NAdam(p, lr=0.1, foreach=True, maximize=True),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "radam decay": lambda p: optim.RAdam(p, lr=0.1, weight_decay=0.3, betas=(0.8, 0.95)),
    "radam decoupled": lambda p: optim.RAdam(p, lr=0.1, weight_decay=0.3, decoupled_weight_decay=True),
    "radam foreach maximize": lambda p: optim.RAdam(p, lr=0.1, foreach=True, maximize=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "adamax decay": lambda p: optim.Adamax(p, lr=0.1, weight_decay=0.3, betas=(0.8, 0.7)),
    "adamax foreach maximize": lambda p: optim.Adamax(p, lr=0.1, foreach=True, maximize=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.1),
    "rmsprop decay": lambda p: optim.RMSprop(p, lr=0.1, weight_decay=0.3, alpha=0.8),
    "rmsprop momentum": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.9),
    "rmsprop centered": lambda p: optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5, weight_decay=0.1),
    "rmsprop foreach maximize": lambda p: optim.RMSprop(p, lr=0.1, centered=True, foreach=True, maximize=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "adagrad options": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.2, initial_accumulator_value=0.4, weight_decay=0.3),
    "adagrad foreach maximize": lambda p: optim.Adagrad(p, lr=0.1, foreach=True, maximize=True),
    "adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.7),
    "adadelta decay": lambda p: optim.Adadelta(p, lr=0.7, rho=0.8, weight_decay=0.3),
    "adadelta foreach maximize": lambda p: optim.Adadelta(p, lr=0.7, foreach=True, maximize=True),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
    "asgd decay": lambda p: optim.ASGD(p, lr=0.1, lambd=0.2, t0=2, weight_decay=0.3, maximize=True),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "rprop maximize": lambda p: optim.Rprop(p, lr=0.1, maximize=True, step_sizes=(0.09, 0.12)),
}
#: Some numbers of the formula are float32 tensors in torch.
ROUNDED = {
    "adamw differentiable": lambda p: optim.AdamW(p, lr=0.1, differentiable=True),
    "nadam differentiable": lambda p: optim.NAdam(p, lr=0.1, differentiable=True),
    "asgd foreach": lambda p: optim.ASGD(p, lr=0.1, lambd=0.2, weight_decay=0.3, foreach=True),
}
#: torch has no capturable optimizers on a CPU, but says so only at the step; the formulas are the same.
CAPTURABLE = {
    c.__name__.lower(): c
    for c in (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adadelta, optim.ASGD)
}


def _lion(module: str, **options):
    def make(p):
        return pytest.importorskip(module).Lion(p, lr=0.1, **options)

    return make


#: Only where the packages are installed; they are no dependency of ours.
LIONS = {
    "lion-pytorch": _lion("lion_pytorch.lion_pytorch", weight_decay=0.2),
    "lion-pytorch decoupled": _lion("lion_pytorch.lion_pytorch", weight_decay=0.02, decoupled_weight_decay=True),
    "lion-pytorch foreach": _lion("lion_pytorch.foreach", weight_decay=0.2),
    "timm": _lion("timm.optim.lion", weight_decay=0.2),
    "timm corrected": _lion("timm.optim.lion", weight_decay=0.2, corrected_weight_decay=True, maximize=True),
    "pytorch-optimizer": _lion("pytorch_optimizer.optimizer.lion", weight_decay=0.2),
    "pytorch-optimizer coupled": _lion("pytorch_optimizer.optimizer.lion", weight_decay=0.2, weight_decouple=False, maximize=True),
    "pytorch-optimizer fixed": _lion("pytorch_optimizer.optimizer.lion", weight_decay=0.02, fixed_decay=True, foreach=False),
}
ALL = ELEMENTWISE | ROUNDED | LIONS


class Setup:
    """A parameter, its optimizer after some real steps, and the real optimizer's answer to any gradient."""

    def __init__(self, make, steps: int, shape=(7, 5), dtype=torch.float64) -> None:
        torch.manual_seed(1)
        self.make, self.p = make, nn.Parameter(torch.randn(shape, dtype=dtype))
        self.optimizer = make([self.p])
        for _ in range(steps):
            self.p.grad = torch.randn_like(self.p)
            self.step(self.optimizer)
        self.rule = find_update(self.optimizer)
        self.w, self.group = self.p.detach(), self.optimizer.param_groups[0]
        self.state = dict(self.optimizer.state.get(self.p, {}))
        self.arguments = (self.w, self.group, self.state)

    @staticmethod
    def step(optimizer) -> None:
        """Step; the parameters of a differentiable optimizer must not be leaves that want a gradient."""
        for p in optimizer.param_groups[0]["params"]:
            p.requires_grad_(not optimizer.param_groups[0].get("differentiable", False))
        optimizer.step()

    def real(self, gradient: Tensor) -> Tensor:
        """Run the real optimizer from the present state with a gradient; return w' − w."""
        twin = nn.Parameter(self.w.clone())
        other = self.make([twin])
        other.param_groups[0].update({k: copy.deepcopy(v) for k, v in self.group.items() if k != "params"})
        if self.state:
            other.state[twin] = copy.deepcopy(self.state)
        twin.grad = gradient.clone()
        self.step(other)
        return twin.detach() - self.w


def real_error(got: Tensor, s: Setup, gradient: Tensor) -> float:
    """Largest difference to the real step relative to its largest entry, beyond what subtracting weights rounds off."""
    real = s.real(gradient)
    beyond = (got - real).abs() - 2 * torch.finfo(s.w.dtype).eps * s.w.abs()
    return float(beyond.max().clamp_min(0) / real.abs().max().clamp_min(1e-300))


def tolerance(name: str, tight: float) -> float:
    """Where torch itself computes a scalar in float32; 1 − 0.999ᵗ loses the most."""
    return max(tight, 2e-4 if "differentiable" in name else 1e-6) if name in ROUNDED or name == "adam tensor lr" else tight


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(ALL))
def test_move_is_the_real_step(name: str, steps: int) -> None:
    s = Setup(ALL[name], steps)
    before = copy.deepcopy(s.state)
    for size in (1.0, 1e-3):
        g = size * torch.randn_like(s.w)
        assert real_error(s.rule.move(g, *s.arguments), s, g) < tolerance(name, 1e-12)
    for k, x in before.items():
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(s.state[k])), "the state was modified"


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(ALL))
def test_move_without_a_gradient(name: str, steps: int) -> None:
    s = Setup(ALL[name], steps)
    decay, whole = s.rule.zero_move(*s.arguments)
    assert real_error(whole, s, torch.zeros_like(s.w)) < tolerance(name, 1e-12)
    assert whole.dtype == torch.float64
    if decay is None:
        assert s.group["weight_decay"] != 0
        return
    # The decay part is the difference to the same step without decay.
    options = {k: 0.0 for k in ("weight_decay", "lambd") if k in s.group}
    other = s.rule.zero_move(s.w, s.group | options, s.state)[1]
    assert decay.shape == s.w.shape
    assert float((whole - decay - other).abs().max()) < 1e-12
    if s.group.get("weight_decay", 0) == 0 and "lambd" not in s.group:
        assert float(decay.abs().max()) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if "fused" not in n])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """A move has the dtype of the gradient; the zero-gradient move at least float32."""
    s = Setup(ELEMENTWISE[name], 4, dtype=dtype)
    g = torch.randn(s.w.shape)
    assert s.rule.move(g, *s.arguments).dtype == torch.float32
    assert s.rule.zero_move(*s.arguments)[1].dtype == torch.float32
    gain = s.rule.secant(g, *s.arguments)
    assert isinstance(gain, float) or gain.dtype == torch.float32
    if dtype == torch.float32:
        assert real_error(s.rule.move(g, *s.arguments), s, g) < 2e-6


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(ALL))
def test_secant_against_two_real_steps(name: str, steps: int) -> None:
    s = Setup(ALL[name], steps)
    for size in (1.0, 1e-3):
        g = size * torch.randn_like(s.w)
        gain = torch.as_tensor(s.rule.secant(g, *s.arguments), dtype=s.w.dtype).expand_as(s.w)
        moved = s.real(g) - s.real(torch.zeros_like(g))
        assert relative_error(gain, -moved / g) < tolerance(name, 1e-9 / size)
        assert relative_error(-gain * g, moved) < tolerance(name, 1e-9 / size)


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if n != "adam sign"])  # β₂ = 0 jumps at 0 with a history too
def test_closed_form_against_the_generic_difference(name: str, steps: int) -> None:
    """What a rule gets that brings only ``move``, against the closed forms; also for gradients that cancelled to nothing."""
    s = Setup(ELEMENTWISE[name], steps)
    largest = 0.0
    for ratio in (1.0, 1e-4, 1e-6, 1e-12, 0.0):
        g = ratio * torch.randn_like(s.w)
        if steps == 0 and ratio < 1e-6:
            continue  # nothing to measure so small a gradient by, and most updates jump there
        gain = torch.as_tensor(s.rule.secant(g, *s.arguments), dtype=s.w.dtype).expand_as(s.w)
        generic = UpdateRule.secant(s.rule, g, *s.arguments)
        assert torch.isfinite(gain).all()
        assert torch.isfinite(generic).all()
        largest = max(largest, float(gain.abs().max()))
        entries = (generic - gain).abs() / gain.abs().clamp_min(1e-2 * largest + 1e-300)
        assert float(entries.max()) < 1e-5, ratio


@pytest.mark.parametrize("name", [n for n in ALL if n not in ("rprop", "rprop maximize") and "asgd" not in n])
def test_learning_rate_zero(name: str) -> None:
    """No learning rate, no move by the data, and never nan; entries without history and without gradient included."""
    for steps in (0, 4):
        s = Setup(ALL[name], steps)
        s.group["lr"] = 0.0
        g = torch.randn_like(s.w)
        g[0] = 0
        gain = torch.as_tensor(s.rule.secant(g, *s.arguments), dtype=s.w.dtype)
        assert (gain == 0).all()
        assert (s.rule.move(g, *s.arguments) == s.rule.zero_move(*s.arguments)[1]).all()


def test_asgd_uses_the_step_size_left_by_the_step_before() -> None:
    s = Setup(ELEMENTWISE["asgd decay"], 4)
    s.group["lr"] = 0.0
    g = torch.randn_like(s.w)
    assert relative_error(s.rule.move(g, *s.arguments), s.real(g)) < 1e-12
    assert abs(s.rule.secant(g, *s.arguments)) > 0
    assert s.rule.frozen(g, *s.arguments) is None
    s.group["lr"] = 0.2
    assert s.rule.frozen(g, *s.arguments) * 0.2 == pytest.approx(s.rule.secant(g, *s.arguments))


@pytest.mark.parametrize("name", list(ALL))
def test_rows_of_a_parameter(name: str) -> None:
    """Rows give what the whole gives, and so do strided columns and chunks."""
    s = Setup(ALL[name], 4)
    g, rows = torch.randn_like(s.w), torch.tensor([4, 1])
    whole = torch.as_tensor(s.rule.secant(g, *s.arguments), dtype=s.w.dtype).expand_as(s.w)
    for index in (rows, (slice(None), slice(2))):
        state = {k: x[index] if isinstance(x, Tensor) and x.shape == s.w.shape else x for k, x in s.state.items()}
        gain = torch.as_tensor(s.rule.secant(g[index], s.w[index], s.group, state), dtype=s.w.dtype)
        assert torch.equal(gain.expand_as(whole[index]), whole[index])
        assert torch.equal(s.rule.move(g[index], s.w[index], s.group, state), s.rule.move(g, *s.arguments)[index])


@pytest.mark.parametrize("name", ["adamw", "adam decay", "lion-pytorch"])
def test_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = Setup(ALL[name], 3)
    g = torch.randn_like(s.w)
    whole = s.rule.secant(g, *s.arguments)
    monkeypatch.setitem(importlib.import_module("inrun.old.optimizers.registry").CHUNK, "cpu", 8)
    assert torch.equal(s.rule.secant(g, *s.arguments), whole)


def test_a_scalar_parameter() -> None:
    """The state's step has the same shape as the parameter."""
    for name in ELEMENTWISE:
        s = Setup(ELEMENTWISE[name], 3, shape=())
        g = torch.randn_like(s.w)
        moved = s.real(g) - s.real(torch.zeros_like(g))
        assert float(-s.rule.secant(g, *s.arguments) * g) == pytest.approx(float(moved), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", list(CAPTURABLE))
def test_capturable(name: str) -> None:
    try:
        s = Setup(lambda p: CAPTURABLE[name](p, lr=0.1, capturable=True), 4)
    except (AssertionError, RuntimeError) as error:
        pytest.skip(f"torch: {error}")
    g = torch.randn_like(s.w)
    assert relative_error(s.rule.move(g, *s.arguments), s.real(g)) < 1e-6


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if n.startswith(("sgd", "adam ", "adamw")) or n == "adam"])
def test_frozen_against_the_formula(name: str, steps: int) -> None:
    if name == "adam sign":
        pytest.skip("β₂ = 0: the formula divides by 1 − β₂⁰")
    s = Setup(ELEMENTWISE[name], steps)
    raw = torch.randn(3, *s.w.shape, dtype=s.w.dtype)
    made = raw.clone()
    factor = s.rule.frozen(made, *s.arguments)
    if name.startswith("sgd"):
        gain = torch.full_like(s.w, s.rule.secant(torch.ones_like(s.w), *s.arguments))
    else:
        gain = frozen_gain(s.optimizer, s.p, torch.randn_like(s.w))
    assert relative_error(made * factor * float(s.group["lr"]), raw * gain) < tolerance(name, 1e-12)


def test_frozen_without_history() -> None:
    """No state: unknown. A second moment of 0: the gain is 0, not 1/ε."""
    s = Setup(ELEMENTWISE["adamw"], 0)
    assert s.rule.frozen(torch.ones(1, 7, 5, dtype=s.w.dtype), *s.arguments) is None
    s.p.grad = torch.randn_like(s.p)
    s.p.grad[3] = 0
    s.optimizer.step()
    made = torch.ones(1, 7, 5, dtype=s.w.dtype)
    s.rule.frozen(made, s.w, s.group, s.optimizer.state[s.p])
    assert (made[0, 3] == 0).all()
    assert (made[0, [0, 1, 2, 4, 5, 6]] > 0).all()
    assert torch.isfinite(made).all()


@pytest.mark.parametrize("name", ["adamw", "adam amsgrad", "nadam", "adamax", "rmsprop", "rmsprop centered", "adagrad", "rprop"])
def test_secant_where_nothing_was_ever_seen(name: str) -> None:
    """Entries with no history and no gradient have no gain, at the first step and later; no nan, no 1/ε."""
    for steps in (0, 3):
        p = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
        optimizer = ELEMENTWISE[name]([p])
        for _ in range(steps):
            p.grad = torch.randn_like(p)
            p.grad[1:] = 0
            optimizer.step()
        g = torch.zeros_like(p)
        g[0] = torch.randn(5, dtype=p.dtype)
        gain = find_update(optimizer).secant(g, p.detach(), optimizer.param_groups[0], optimizer.state.get(p, {}))
        assert torch.isfinite(gain).all()
        assert (gain[1:] == 0).all()
        if steps == 0 and name == "adamw":
            assert relative_error(gain[0], 0.1 / (g[0].abs() + 1e-8)) < 1e-9


def test_gauss_legendre() -> None:
    for points in (1, 2, 4, 7):
        for power in range(2 * points):
            assert sum(w * s**power for s, w in gauss_legendre(points)) == pytest.approx(1 / (power + 1), abs=1e-14)


class Cubed(optim.Optimizer):
    """Moves by the cube root of a running mean of gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                p -= group["lr"] * state["mean"].sign() * state["mean"].abs() ** (1 / 3)


def test_registering_an_optimizer() -> None:
    """One formula is enough: the rest follows from it."""
    with pytest.raises(OptimizerError, match="Cubed"):
        find_update(Cubed([nn.Parameter(torch.zeros(1))]))

    @register(Cubed)
    class CubedRule(UpdateRule):
        def move(self, gradient, parameter, group, state):
            mean = 0.9 * state.get("mean", torch.zeros_like(parameter)).to(gradient.dtype) + gradient
            return -group["lr"] * mean.sign() * mean.abs() ** (1 / 3)

    s = Setup(Cubed, 4)
    assert isinstance(s.rule, CubedRule)
    g = torch.randn_like(s.w)
    moved = s.real(g) - s.real(torch.zeros_like(g))
    assert relative_error(s.rule.move(g, *s.arguments), s.real(g)) < 1e-12
    assert relative_error(-s.rule.secant(g, *s.arguments) * g, moved) < 1e-9
    raw = torch.randn(2, *s.w.shape, dtype=s.w.dtype)
    assert relative_error(s.rule.direction(raw, g, *s.arguments) @ g.T, -(raw * moved / g) @ g.T) < 1e-9
    # Where gradients cancelled: the derivative of the update at 0.
    mean = 0.9 * s.state["mean"]
    flat = s.rule.secant(torch.zeros_like(g), *s.arguments)
    assert relative_error(flat, s.group["lr"] / 3 * mean.abs() ** (-2 / 3)) < 1e-6
    decay, whole = s.rule.zero_move(*s.arguments)
    assert (decay == 0).all()
    assert relative_error(whole, s.real(torch.zeros_like(g))) < 1e-12
    assert s.rule.frozen(raw, *s.arguments) is None


def test_subclasses() -> None:
    """A subclass is known as long as it keeps ``step``."""

    class Renamed(optim.AdamW):
        pass

    class Changed(optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    p = [nn.Parameter(torch.zeros(1))]
    assert type(find_update(Renamed(p))).__name__ == "AdamWRule"
    with pytest.raises(OptimizerError, match="Changed.*known are.*Adafactor.*register"):
        find_update(Changed(p))
    with pytest.raises(OptimizerError, match="LBFGS"):
        find_update(optim.LBFGS(p))


def test_lion_options_that_are_not_described() -> None:
    lion = pytest.importorskip("timm.optim.lion").Lion
    with pytest.raises(OptimizerError, match="caution"):
        find_update(lion([nn.Parameter(torch.zeros(1))], caution=True))


def test_the_proxy() -> None:
    s = Setup(ELEMENTWISE["adamw"], 2)
    g = torch.randn_like(s.w)
    assert plain.secant(g, *s.arguments) == s.group["lr"]
    assert torch.equal(plain.move(g, *s.arguments), -s.group["lr"] * g)
    assert all(float(x.abs().max()) == 0 for x in plain.zero_move(*s.arguments))
    assert plain.frozen(g, *s.arguments) == 1.0


def test_rules_import_no_other_package() -> None:
    """Lions and transformers are recognised by name; their packages stay out."""
    import subprocess
    import sys

    code = (
        "import sys, inrun.old.optimizers; assert not {'transformers','timm','lion_pytorch','pytorch_optimizer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("share", [0.002, 0.5])
def test_adam_in_single_precision_where_terms_cancel(share: float) -> None:
    """Few entries whose two terms nearly cancel are done again in double precision by themselves, many with their chunk."""
    g = torch.Generator().manual_seed(0)
    w = torch.nn.Parameter(torch.randn(40_000, generator=g))
    optimizer = optim.AdamW([w], lr=0.1, betas=(0.9, 0.95))
    w.grad = torch.randn(40_000, generator=g)
    optimizer.step()
    state, group = optimizer.state[w], optimizer.param_groups[0]
    # m G / ((r₀ + r₁) D₀) = (1 - small) (1 - β₁) β₂ / (β₁ (1 - β₂)) by the choice of m.
    hard = torch.rand(40_000, generator=g) < share
    real, s = w.grad.double(), state["exp_avg_sq"].double()
    unit, entering = (0.95 / (1.0 - 0.95**2)) ** 0.5, 0.05 / 0.95
    r0, r1 = s.sqrt(), (s + entering * real.square()).sqrt()
    near = (1.0 - 1e-5) * 0.1 / (0.9 * entering) * (r0 + r1) * (r0 + 1e-8 / unit) / real
    state["exp_avg"] = torch.where(hard, near.float(), 0.5 * state["exp_avg"])
    wide = {k: x.double() for k, x in state.items()}
    raw = torch.randn(1, 40_000, generator=g)
    rule = find_update(optimizer)
    got = rule.direction(raw, w.grad, w.detach(), group, state)
    expected = rule.direction(raw.double(), real, w.detach().double(), group, wide)
    assert ((got - expected).abs() / expected.abs()).max() < 1e-6

"""Shares of a real step: they sum to it, single entries are accurate in float32, and updates that mix entries."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from test_optimizers import ALL, CAPTURABLE, ELEMENTWISE, ROUNDED, Setup, real_error
from torch import Tensor, nn, optim

from inrun.errors import OptimizerError
from inrun.old.optimizers import UpdateRule, find_update
from reference import relative_error

#: Updates with a history in the denominator: single entries of their gain are hard in float32.
CURVED = [n for n in ELEMENTWISE if not n.startswith(("sgd", "asgd", "rprop")) and n != "adam sign"]


def widened(s: Setup) -> Setup:
    """The same float32 numbers in float64."""
    wide = copy.copy(s)
    wide.w = s.w.double()
    wide.state = {k: x.double() if isinstance(x, Tensor) and x.dim() else x for k, x in s.state.items()}
    wide.arguments = (wide.w, wide.group, wide.state)
    return wide


def with_unseen_rows(name: str, steps: int) -> Setup:
    """A float32 optimizer whose last two rows never had a gradient, so that their second moment is 0; small weights."""
    torch.manual_seed(1)
    s = object.__new__(Setup)
    s.make, s.p = ELEMENTWISE[name], nn.Parameter(1e-2 * torch.randn(9, 40))
    s.optimizer = s.make([s.p])
    for _ in range(steps):
        s.p.grad = torch.randn_like(s.p)
        s.p.grad[7:] = 0
        s.optimizer.step()
    s.rule, s.w, s.group = find_update(s.optimizer), s.p.detach(), s.optimizer.param_groups[0]
    s.state = dict(s.optimizer.state[s.p])
    s.arguments = (s.w, s.group, s.state)
    return s


def remembered(s: Setup) -> Tensor:
    """The size of an entry's memory in units of the gradient, 1 where it has none."""
    size = torch.zeros_like(s.w)
    for k in ("exp_avg", "grad_avg"):
        size = torch.maximum(size, s.state[k].abs()) if k in s.state else size
    for k in ("square_avg", "sum"):
        size = torch.maximum(size, s.state[k].sqrt()) if k in s.state and "grad_avg" not in s.state else size
    return torch.where(size == 0, 1.0, size)


def entry_error(gain: Tensor | float, s: Setup, g: Tensor) -> float:
    """Largest relative error of a single gain against two real steps in float64, beyond the rounding of those steps."""
    wide, g = widened(s), g.double()
    still = wide.real(torch.zeros_like(g))
    moved = wide.real(g) - still
    expected = -moved / g
    rounding = 4 * torch.finfo(torch.float64).eps * (wide.w.abs() + still.abs()) / g.abs()
    error = (torch.as_tensor(gain).double().expand_as(expected) - expected).abs() - rounding
    return float((error / expected.abs().clamp_min(1e-300)).max())


@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(ALL))
def test_shares_sum_to_the_real_move(name: str, steps: int) -> None:
    """Eight samples, some of whose entries cancel: Σ P∘g_n is the real step less the real step without a gradient."""
    s = Setup(ALL[name], steps)
    g_n = torch.randn(8, *s.w.shape, dtype=s.w.dtype)
    g_n[1, 0] = -g_n[0, 0]
    g_n[2:, 0] = 0
    g = g_n.sum(0)
    shares = -(g_n * s.rule.secant(g, *s.arguments))
    moved = s.real(g) - s.real(torch.zeros_like(g))
    least = 2e-4 if "differentiable" in name else 1e-6
    assert torch.linalg.vector_norm(shares.sum(0) - moved) <= least * torch.linalg.vector_norm(moved)
    assert torch.isfinite(shares).all()
    # ... and so do contributions.
    raw = torch.randn(2, *s.w.shape, dtype=s.w.dtype)
    v = s.rule.direction(raw, g, *s.arguments)
    assert v.shape == raw.shape
    assert relative_error((v * g).sum((1, 2)), -(raw * moved).sum((1, 2))) < least


@pytest.mark.parametrize("name", list(CAPTURABLE))
def test_shares_of_capturable_optimizers(name: str) -> None:
    """Their scalars are tensors, and on a CPU only the rule can be asked."""
    usual = Setup(lambda p: CAPTURABLE[name](p, lr=0.1), 4)
    g = torch.randn_like(usual.w)
    group = usual.group | {"capturable": True, "lr": torch.tensor(0.1, dtype=torch.float64)}
    gain = usual.rule.secant(g, usual.w, group, usual.state)
    assert relative_error(torch.as_tensor(gain), torch.as_tensor(usual.rule.secant(g, *usual.arguments))) < 1e-12


@pytest.mark.parametrize("ratio", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", CURVED)
def test_single_gains_in_float32(name: str, ratio: float) -> None:
    """Every entry to 1e-6 of itself, however small the gradient is beside the momentum; rows without history too."""
    for steps in (1, 5, 12):
        s = with_unseen_rows(name, steps)
        g = ratio * remembered(s) * torch.sign(torch.randn_like(s.w)) * (0.5 + torch.rand_like(s.w))
        assert entry_error(s.rule.secant(g, *s.arguments), s, g) < 1e-6


@pytest.mark.parametrize("ratio", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "adam amsgrad", "radam decay", "adamax", "rmsprop momentum"])
def test_single_gains_without_a_closed_form(name: str, ratio: float) -> None:
    """The default of a rule that brings only ``move`` is as accurate, down to a gradient of 1e-6 of the momentum."""
    s = with_unseen_rows(name, 5)
    g = ratio * remembered(s) * torch.sign(torch.randn_like(s.w)) * (0.5 + torch.rand_like(s.w))

    class OnlyMove(UpdateRule):
        def move(self, gradient, parameter, group, state):
            return s.rule.move(gradient, parameter, group, state)

    assert entry_error(OnlyMove().secant(g, *s.arguments), s, g) < 1e-6


@pytest.mark.parametrize("name", CURVED)
def test_gradients_that_cancelled(name: str) -> None:
    """At G = 0 the gain is the limit for small gradients, in float32, where there is a history; else finite."""
    s = with_unseen_rows(name, 5)
    gain = torch.as_tensor(s.rule.secant(torch.zeros_like(s.w), *s.arguments)).expand_as(s.w)
    near = torch.as_tensor(s.rule.secant(1e-7 * remembered(s), *s.arguments)).expand_as(s.w)
    assert torch.isfinite(gain).all()
    scale = near.abs()[:7].clamp_min(1e-2 * float(near.abs()[:7].max()))
    assert float(((gain - near).abs()[:7] / scale).max()) < 1e-4


@pytest.mark.parametrize("name", ["adamw", "adamw maximize", "adam decoupled"])
def test_the_fast_path_of_adam(name: str) -> None:
    """Its own code, the same numbers as the general closed form."""
    from inrun.old.optimizers.quotient import QuotientRule

    s = with_unseen_rows(name, 5)
    for size in (1.0, 1e-3, 1e-6, 0.0):
        g = size * torch.randn_like(s.w)
        general = QuotientRule.secant(s.rule, g, *s.arguments)
        # In single precision where no terms cancel, in double elsewhere.
        assert torch.allclose(s.rule.secant(g, *s.arguments), general, rtol=1e-6, atol=0)
        weight, group, state = s.arguments
        there, gain = weight.detach().clone(), torch.empty_like(weight)
        assert s.rule.travel(there, g, group, state, 0.5, gain)
        assert torch.equal(gain, s.rule.secant(g, *s.arguments))
        coasted = weight.detach().clone()
        assert s.rule.coast(coasted, group, state)
        assert torch.allclose(coasted, weight + s.rule.zero_move(*s.arguments)[1], rtol=1e-5, atol=1e-7)
        middle = weight + s.rule.zero_move(*s.arguments)[1] - 0.5 * general * g
        assert torch.allclose(there, middle, rtol=1e-5, atol=1e-7)


# --- controls: what must fail ---


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam"])
def test_control_subtraction_in_float32_is_not_accurate(name: str) -> None:
    s = with_unseen_rows(name, 5)
    g = 1e-4 * remembered(s) * torch.sign(torch.randn_like(s.w))
    naive = (s.rule.move(torch.zeros_like(g), *s.arguments) - s.rule.move(g, *s.arguments)) / g
    assert naive.dtype == torch.float32
    assert entry_error(naive, s, g) > 1e-4


def test_control_the_closed_form_in_float32_is_not_accurate_where_its_terms_cancel() -> None:
    """Why it is computed in float64: an entry the gradient hardly moves is the difference of two like terms."""
    s = with_unseen_rows("adamw", 5)
    torch.manual_seed(0)
    g = 4 * torch.randn_like(s.w)
    (beta1, beta2), t = s.group["betas"], float(s.state["step"]) + 1
    entering = (1 - beta2) / (1 - beta2**t)
    q0 = s.state["exp_avg_sq"] * (beta2 / (1 - beta2**t))
    r0, r1 = q0.sqrt(), (q0 + entering * g * g).sqrt()
    drag = beta1 * s.state["exp_avg"] * entering * g / ((r0 + r1) * (r0 + 1e-8))
    single = ((1 - beta1) - drag) / (r1 + 1e-8) * (0.1 / (1 - beta1**t))
    assert entry_error(single, s, g) > 1e-6
    assert entry_error(s.rule.secant(g, *s.arguments), s, g) < 1e-6


def test_control_frozen_gains_do_not_sum_to_adams_move() -> None:
    s = Setup(ELEMENTWISE["adamw"], 4)
    g = torch.randn_like(s.w)
    ones = torch.ones(1, *s.w.shape, dtype=s.w.dtype)
    frozen = ones * 1.0
    factor = s.rule.frozen(frozen, *s.arguments)
    moved = s.real(g) - s.real(torch.zeros_like(g))
    missed = torch.linalg.vector_norm(-frozen[0] * factor * s.group["lr"] * g - moved) / torch.linalg.vector_norm(moved)
    assert missed > 0.05


def test_control_the_derivative_is_no_share() -> None:
    """P from the slope at the real gradient, as autograd gives it, does not sum to the move."""
    s = Setup(ELEMENTWISE["adamw"], 4)
    g = torch.randn_like(s.w).requires_grad_()
    (slope,) = torch.autograd.grad(s.rule.move(g, *s.arguments).sum(), g)
    g = g.detach()
    moved = s.real(g) - s.real(torch.zeros_like(g))
    assert torch.linalg.vector_norm(slope * g - moved) / torch.linalg.vector_norm(moved) > 0.05


# --- updates that are not elementwise ---


def _transformers(**options):
    def make(p):
        return pytest.importorskip("transformers.optimization").Adafactor(p, **options)

    return make


MUON = {
    "muon": lambda p: optim.Muon(p, lr=0.02),
    "muon plain": lambda p: optim.Muon(p, lr=0.02, nesterov=False, weight_decay=0.0),
    "muon matched": lambda p: optim.Muon(p, lr=0.02, adjust_lr_fn="match_rms_adamw", ns_steps=3, momentum=0.8),
    "muon forgets": lambda p: optim.Muon(p, lr=0.02, momentum=0.0, ns_coefficients=(3.0, -3.2, 1.2)),
}
ADAFACTOR = {
    "adafactor": lambda p: optim.Adafactor(p, lr=0.02),
    "adafactor options": lambda p: optim.Adafactor(
        p, lr=0.5, weight_decay=0.1, beta2_decay=-0.5, d=1.5, eps=(1e-4, 1e-2), maximize=True
    ),
    "adafactor foreach": lambda p: optim.Adafactor(p, lr=0.02, foreach=True),
    "transformers": _transformers(),
    "transformers fixed": _transformers(
        lr=0.02, relative_step=False, scale_parameter=False, weight_decay=0.1, beta1=0.9, clip_threshold=0.7
    ),
    "transformers warmup": _transformers(warmup_init=True),
}
if not hasattr(optim, "Muon"):
    MUON = {}


def real_optimizer(table, name: str, steps: int, shape, dtype=torch.float64, drift: float = 0.5) -> Setup:
    """Like Setup, with gradients that have something in common from step to step."""
    s = object.__new__(Setup)
    s.make, s.p = table[name], nn.Parameter(0.1 * torch.randn(shape, dtype=dtype))
    s.optimizer, s.drift = s.make([s.p]), drift * torch.randn(shape, dtype=dtype)
    for _ in range(steps):
        s.p.grad = s.drift + torch.randn(shape, dtype=dtype)
        s.optimizer.step()
    s.rule, s.w, s.group = find_update(s.optimizer), s.p.detach(), s.optimizer.param_groups[0]
    s.state = dict(s.optimizer.state.get(s.p, {}))
    s.arguments = (s.w, s.group, s.state)
    return s


def muon_by_singular_values(s: Setup, g: Tensor) -> Tensor:
    """Muon's step from a singular value decomposition: the iteration acts on each singular value alone."""
    group, mu = s.group, s.group["momentum"]
    buffer = mu * s.state.get("momentum_buffer", torch.zeros_like(g)).double() + (1 - mu) * g
    x = (1 - mu) * g + mu * buffer if group["nesterov"] else buffer
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    sigma = sigma / max(float(x.norm()), group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    rows, columns = g.shape
    ratio = 0.2 * math.sqrt(max(rows, columns)) if group["adjust_lr_fn"] == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
    return -group["lr"] * group["weight_decay"] * s.w - group["lr"] * ratio * (u * sigma) @ vh


@pytest.mark.parametrize("shape", [(24, 16), (16, 24), (20, 20)])
@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(MUON))
def test_muon_move(name: str, steps: int, shape) -> None:
    torch.manual_seed(2)
    s = real_optimizer(MUON, name, steps, shape)
    g = s.drift + torch.randn_like(s.w)
    moved = s.rule.move(g, *s.arguments)
    assert relative_error(moved, muon_by_singular_values(s, g)) < 1e-10
    # The real one works in bfloat16, with 8 bits.
    real = s.real(g)
    assert torch.linalg.vector_norm(moved - real) < 0.05 * torch.linalg.vector_norm(real)
    decay, whole = s.rule.zero_move(*s.arguments)
    zero = torch.zeros_like(g)
    assert relative_error(whole, muon_by_singular_values(s, zero)) < 1e-10
    assert relative_error(decay, -s.group["lr"] * s.group["weight_decay"] * s.w) < 1e-14
    assert torch.linalg.vector_norm(whole - s.real(zero)) <= 0.05 * torch.linalg.vector_norm(s.real(zero)) + 1e-12


@pytest.mark.parametrize("shape", [(24, 16), (11,), (3, 6, 5)])
@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", list(ADAFACTOR))
def test_adafactor_move(name: str, steps: int, shape) -> None:
    torch.manual_seed(2)
    s = real_optimizer(ADAFACTOR, name, steps, shape)
    for size in (1.0, 1e-3):
        g = size * torch.randn_like(s.w)
        assert real_error(s.rule.move(g, *s.arguments), s, g) < 1e-12
    assert real_error(s.rule.zero_move(*s.arguments)[1], s, torch.zeros_like(s.w)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("drift", [0.0, 1.0])
@pytest.mark.parametrize("steps", [0, 1, 4, 12])
@pytest.mark.parametrize("name", [*MUON, *ADAFACTOR])
def test_directions_of_mixing_updates_sum_to_the_move(name: str, steps: int, drift: float, dtype: torch.dtype) -> None:
    """Σ⟨g_n, v⟩ is −⟨u(G) − u(0), ∇ℓ⟩ to 5 % of Σ|c_n| or of itself, for any ∇ℓ; at the first step too."""
    torch.manual_seed(3)
    for shape in ((24, 16), (16, 24)):
        s = real_optimizer(MUON | ADAFACTOR, name, steps, shape, dtype, drift)
        g_n = (s.drift + torch.randn(8, *shape, dtype=dtype)) / 8
        g, raw = g_n.sum(0), torch.randn(2, *shape, dtype=dtype)
        v = s.rule.direction(raw, g, *s.arguments)
        assert v.shape == raw.shape
        assert v.dtype == dtype
        moved = s.rule.move(g, *s.arguments) - s.rule.zero_move(*s.arguments)[1]
        for k in range(2):
            c = (g_n * v[k]).sum((1, 2))
            truth = -float((moved * raw[k]).sum())
            assert abs(float(c.sum()) - truth) < 0.05 * max(float(c.abs().sum()), abs(truth))


def test_adafactor_rows_that_were_never_seen() -> None:
    """A row without history jumps at the first gradient it gets; its share is not lost."""
    torch.manual_seed(4)
    s = real_optimizer(ADAFACTOR, "adafactor", 0, (12, 8))
    for _ in range(5):
        s.p.grad = torch.randn_like(s.p)
        s.p.grad[4:] = 0
        s.optimizer.step()
    w, state = s.p.detach(), s.optimizer.state[s.p]
    g, raw = torch.randn_like(w), torch.zeros(1, 12, 8, dtype=w.dtype)
    raw[0, 4:] = torch.randn(8, 8, dtype=w.dtype)
    v = s.rule.direction(raw, g, w, s.group, state)
    moved = s.rule.move(g, w, s.group, state) - s.rule.zero_move(w, s.group, state)[1]
    assert float((g * v[0]).sum()) == pytest.approx(-float((moved * raw[0]).sum()), rel=1e-6)
    # The control: points on the way alone do not see the jump.
    blind = UpdateRule.direction(s.rule, raw, g, w, s.group, state)
    assert abs(float((g * blind[0]).sum())) < 0.5 * abs(float((moved * raw[0]).sum()))


def test_mixing_updates_have_no_gain_per_entry() -> None:
    s = real_optimizer(ADAFACTOR, "adafactor", 1, (4, 3))
    with pytest.raises(OptimizerError, match="not elementwise"):
        s.rule.secant(torch.ones_like(s.w), *s.arguments)
    assert s.rule.frozen(torch.ones(1, 4, 3), *s.arguments) is None


def test_tables_are_complete() -> None:
    """Every optimizer of torch that has a rule is in a table, and the others are named here."""
    made = {type(make([nn.Parameter(torch.zeros(2, 2))])) for make in (ELEMENTWISE | ROUNDED | MUON).values()}
    made.add(optim.Adafactor)
    without = {optim.Optimizer, optim.LBFGS, optim.SparseAdam}
    classes = {c for c in vars(optim).values() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert classes - made == without


def test_the_example_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text(encoding="utf-8")
    block = text.split("```python\n")[1].split("```")[0]
    exec(block, {})  # noqa: S102 - our own documentation
    assert "0.0500, 0.0250, 0.1000" in capsys.readouterr().out

"""Gains against the real optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from inrun.errors import OptimizerError
from inrun.optimizers import UpdateRule, find_update, register
from reference import frozen_gain, real_move, relative_error, secant_gain

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd maximize": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.3),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, betas=(0.8, 0.7)),
    "adam maximize": lambda p: torch.optim.Adam(p, lr=0.1, maximize=True, weight_decay=0.2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def prepared(name: str, steps: int):
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    optimizer = OPTIMIZERS[name]([p])
    for _ in range(steps):
        p.grad = torch.randn_like(p)
        optimizer.step()
    return p, optimizer, optimizer.param_groups[0], optimizer.state.get(p, {})


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_secant_against_two_real_steps(name: str, steps: int) -> None:
    p, optimizer, group, state = prepared(name, steps)
    for size in (1.0, 1e-3):
        g = size * torch.randn_like(p)
        gain = find_update(optimizer).secant(g, p.detach(), group, state)
        expected = secant_gain(optimizer, p, g)
        assert relative_error(torch.as_tensor(gain, dtype=p.dtype).expand_as(p) * group["lr"], expected) < 1e-9 / size
        # The shares sum to the real move.
        moved = real_move(optimizer, p, g) - real_move(optimizer, p, torch.zeros_like(g))
        assert relative_error(-group["lr"] * gain * g, moved) < 1e-9 / size


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_frozen_against_the_formula(name: str, steps: int) -> None:
    p, optimizer, group, state = prepared(name, steps)
    raw = torch.randn(3, *p.shape, dtype=p.dtype)
    made = raw.clone()
    factor = find_update(optimizer).frozen(made, p.detach(), group, state)
    expected = raw * frozen_gain(optimizer, p, torch.randn_like(p))
    assert relative_error(made * factor * group["lr"], expected) < 1e-12


def test_frozen_without_history() -> None:
    """No state: unknown. A second moment of 0: the gain is 0, not 1/ε."""
    p, optimizer, group, state = prepared("adamw", 0)
    rule = find_update(optimizer)
    assert rule.frozen(torch.ones(1, 7, 5, dtype=p.dtype), p.detach(), group, state) is None
    p.grad = torch.randn_like(p)
    p.grad[3] = 0
    optimizer.step()
    made = torch.ones(1, 7, 5, dtype=p.dtype)
    rule.frozen(made, p.detach(), group, optimizer.state[p])
    assert (made[0, 3] == 0).all()
    assert (made[0, [0, 1, 2, 4, 5, 6]] > 0).all()
    assert torch.isfinite(made).all()


@pytest.mark.parametrize("ratio", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("name", ["adam", "adam decay", "adamw", "adamw amsgrad"])
def test_secant_in_float32_with_small_gradients(name: str, ratio: float) -> None:
    """Single entries stay accurate in float32, however small the gradient is beside the momentum."""
    p, optimizer, group, state = prepared(name, 4)
    g = ratio * state["exp_avg"].abs() * torch.sign(torch.randn_like(p))
    rule = find_update(optimizer)
    exact = rule.secant(g, p.detach(), group, state)
    single = {k: v.float() if v.dim() else v for k, v in state.items()}
    got = rule.secant(g.float(), p.detach().float(), group, single)
    scale = exact.abs().clamp_min(1e-3 * float(exact.abs().max()))
    assert float(((got.double() - exact).abs() / scale).max()) < 2e-5


def test_secant_where_nothing_was_ever_seen() -> None:
    p, optimizer, group, state = prepared("adamw", 0)
    g = torch.zeros_like(p)
    g[0] = torch.randn(5, dtype=p.dtype)
    gain = find_update(optimizer).secant(g, p.detach(), group, state)
    assert torch.isfinite(gain).all()
    assert (gain[1:] == 0).all()
    assert relative_error(gain[0], 1 / (g[0].abs() + group["eps"])) < 1e-9


def test_registering_an_optimizer() -> None:
    class Half(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            return None

    with pytest.raises(OptimizerError, match="Half"):
        find_update(Half([nn.Parameter(torch.zeros(1))]))

    @register(Half)
    class HalfRule(UpdateRule):
        linear = True

        def frozen(self, raw, parameter, group, state):
            return 0.5

    assert isinstance(find_update(Half([nn.Parameter(torch.zeros(1))])), HalfRule)

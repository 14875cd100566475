"""What a step pays its own samples, with and without a linear memory, and first steps."""

from __future__ import annotations

import copy

import pytest
import torch
from optimizer_runs import Lion, factors, off, run, same, snapshot
from torch import optim

from inrun.optimizers import UpdateRule, agree, find_rule

MATRICES = ((6, 4), (4, 6), (3, 3))


def like(tensors):
    return [torch.randn_like(x) for x in tensors]


def inner(xs, ys):
    return torch.stack([(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)])


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
        (optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (optim.Adam, {"lr": 0.1, "maximize": True}),
        (optim.NAdam, {"lr": 0.1}),
        (optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
        (optim.Adafactor, {"lr": 0.1}),
        (Lion, {"lr": 0.1, "maximize": True}),
    ],
)
def test_samples_are_paid_for_what_their_gradient_moved(cls, options):
    """With A held fixed: the push with the gradient less the push without it, by the recursion."""
    for seen in run(cls, options):
        step, rule = seen.step, seen.rule
        raw, sample = like(step.before), like(step.before)
        direction = rule.own_direction(raw, seen.moved, step)
        paid = inner(sample, direction)
        sign = -1.0 if step.group.get("maximize") else 1.0
        entry = rule.entry(step) or [1.0] * len(raw)
        for i, (a, memory) in enumerate(zip(factors(seen), rule.memory(step), strict=True)):
            move = a * (memory.read * memory.enter + memory.direct) * sign * entry[i] * sample[i]
            want = move * raw[i]
            assert off(paid[i], want.sum(), want.abs().sum()) < 1e-12


def test_without_momentum_the_scores_sum_to_what_the_move_did():
    for cls, options in (
        (optim.SGD, {"lr": 0.1}),
        (optim.Adagrad, {"lr": 0.1}),
        (optim.Adafactor, {"lr": 0.1}),
    ):
        for seen in run(cls, options):
            raw = like(seen.step.before)
            direction = seen.rule.own_direction(raw, seen.moved, seen.step)
            assert off(inner(seen.step.gradients, direction), inner(seen.moved, raw)) < 1e-12


class Unknown(optim.Optimizer):
    """Momentum that nobody described."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.mul_(0.9).add_(p.grad)
                p.sub_(self.param_groups[0]["lr"] * buffer)


def test_an_unknown_optimizer_shares_all_of_its_move_by_agreement():
    for seen in run(Unknown, {"lr": 0.1}):
        assert type(seen.rule) is UpdateRule
        assert seen.rule.memory(seen.step) is None
        assert seen.rule.is_early(seen.step) == [False] * len(seen.counts)
        raw = like(seen.step.before)
        direction = seen.rule.own_direction(raw, seen.moved, seen.step)
        assert off(inner(seen.step.gradients, direction), inner(seen.moved, raw)) < 1e-12
        for d, g in zip(direction, seen.step.gradients, strict=True):
            assert off(d * g.norm() ** 2, g * (d * g).sum()) < 1e-12  # along G


def test_a_rule_that_knows_only_the_decay_leaves_it_out_of_the_move():
    class Decays(UpdateRule):
        decoupled = True

    for seen in run(Unknown, {"lr": 0.1}):
        group = {**seen.step.group, "weight_decay": 0.5}
        step = copy.copy(seen.step)
        object.__setattr__(step, "group", group)
        raw = like(step.before)
        beside = [m - group["lr"] * 0.5 * w for m, w in zip(seen.moved, step.before, strict=True)]
        direction = Decays().own_direction(raw, seen.moved, step)
        assert off(inner(step.gradients, direction), inner(beside, raw)) < 1e-12


MUONS = [
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.1, "nesterov": False},
    {"lr": 0.1, "momentum": 0.0, "adjust_lr_fn": "match_rms_adamw"},
]


def newton_schulz(x, steps=5, a=3.4445, b=-4.775, c=2.0315):
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 and later")
@pytest.mark.parametrize("options", MUONS)
def test_muons_direction_is_the_matrix_it_applied(options):
    """With q in place of G, D pays the whole move: exactly before bfloat16, closely after."""
    momentum = options.get("momentum", 0.95)
    own = (1 - momentum) * (1 + momentum if options.get("nesterov", True) else 1)
    for seen in run(optim.Muon, options, shapes=MATRICES):
        step, rule = seen.step, seen.rule
        assert rule.memory(step) is None
        raw, kept = like(step.before), snapshot(seen)
        direction = rule.own_direction(raw, seen.moved, step)
        assert same(snapshot(seen), kept)
        pushed = rule.pushed(step)
        for w, q, d, v, m in zip(step.before, pushed, direction, raw, seen.moved, strict=True):
            rows, columns = w.shape
            rate = step.group["lr"] * max(1.0, rows / columns) ** 0.5
            if "adjust_lr_fn" in options:
                rate = step.group["lr"] * 0.2 * max(rows, columns) ** 0.5
            whole = rate * newton_schulz(q)
            due = own * whole * v
            assert off((q * d).sum(), due.sum(), due.abs().sum()) < 1e-10
            real = m - step.group["lr"] * options.get("weight_decay", 0.1) * w
            assert (whole - real).norm() < 0.1 * real.norm()  # torch rounds to bfloat16


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="torch 2.9 and later")
def test_muon_without_momentum_pays_its_samples_the_whole_move():
    for seen in run(
        optim.Muon,
        {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        torch.float32,
        shapes=MATRICES,
    ):
        raw = [m.clone() for m in seen.moved]  # agrees with the move, so that nothing cancels
        direction = seen.rule.own_direction(raw, seen.moved, seen.step)
        assert off(inner(seen.step.gradients, direction), inner(seen.moved, raw)) < 0.03


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "relative_step": False, "scale_parameter": False},
        {"warmup_init": True, "weight_decay": 0.1},
        {"lr": 0.1, "relative_step": False, "beta1": 0.9, "clip_threshold": 0.5},
    ],
)
def test_transformers_adafactor_pays_for_its_own_gradient(options):
    transformers = pytest.importorskip("transformers.optimization")
    kept = {}
    for seen in run(transformers.Adafactor, options):
        rule, step, beta1 = seen.rule, seen.step, options.get("beta1", 0.0)
        assert rule.memory(step) is None
        assert rule.is_early(step) == [count <= 3 for count in seen.counts]
        raw = like(step.before)
        a, direction = rule.factor(step), rule.own_direction(raw, seen.moved, step)
        for i, p in enumerate(seen.parameters):
            g, w = step.gradients[i], step.before[i]
            mine = (1 - beta1) * a[i] * g
            moved = mine + beta1 * kept.get(p, torch.zeros_like(mine))
            kept[p] = moved
            decay = options.get("weight_decay", 0.0)
            rate = transformers.Adafactor._get_lr(step.group, step.states[i]) if decay else 0.0
            # Moves of 1e-9 in weights of 1e-2.
            assert off(moved + decay * rate * w, seen.moved[i]) < 1e-8
            due = mine * raw[i]
            assert off((g * direction[i]).sum(), due.sum(), due.abs().sum()) < 1e-12
            if p.dim() == 2:
                assert bool((a[i][0] == 0).all())
                assert bool((a[i][1:] != 0).all())


def test_agreement_keeps_the_sum_and_pays_along_the_push():
    q, d = (
        [torch.randn(4, 3), torch.randn(5), torch.zeros(2), torch.randn(())],
        like([torch.zeros(4, 3), torch.zeros(5), torch.zeros(2), torch.zeros(())]),
    )
    kept = copy.deepcopy((q, d))
    found = agree(q, d)
    assert same((q, d), kept)
    for x, y, z in zip(q, d, found, strict=True):
        want = x * (x * y).sum() / (x * x).sum() if bool(x.any()) else torch.zeros_like(x)
        assert torch.allclose(z, want, atol=1e-6)
    assert off(inner(q, found), inner(q, d)) < 1e-6


@pytest.mark.parametrize("scale", [1e-30, 1e-15, 1e15])
def test_agreement_holds_at_any_scale_of_the_push(scale):
    q, d = torch.randn(50, 40), torch.randn(50, 40)
    assert off(agree([q * scale], [d])[0], agree([q], [d])[0]) < 1e-5


def test_agreement_of_half_precision_and_empty_tensors():
    q, d = [torch.randn(6).bfloat16(), torch.zeros(0, 3)], [torch.randn(6), torch.zeros(0, 3)]
    found = agree(q, d)
    assert found[0].dtype == torch.float32
    assert found[1].shape == (0, 3)


def test_another_direction_does_not_pass():
    q, d = [torch.randn(20)], [torch.randn(20)]
    assert off(inner(q, d), inner(q, agree(q, [2 * d[0]]))) > 0.1


def test_find_rule_is_new_for_every_optimizer():
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = optim.ASGD([p])
    assert find_rule(optimizer) is not find_rule(optimizer)

"""Each rule against torch's own step, the definition of κ, and a second reader of the formulas."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from optimizer_runs import Lion, Push, factors, move_off, off, run, same, snapshot
from torch import optim

from brute_force import (
    adam,
    adam_gain,
    adamax_gain,
    divided,
    lion,
    lion_gain,
    lr_gain,
    nadam,
    nadam_gain,
    none,
    radam_gain,
    sgd,
)
from inrun.optimizers.sgd import ASGDRule

#: name: (optimizer class, options, push and gain of the second reader)
CASES = {
    "sgd": (optim.SGD, {"lr": 0.1}, sgd, lr_gain),
    "sgd decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, sgd, lr_gain),
    "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, sgd, lr_gain),
    "sgd dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3}, sgd, lr_gain),
    "sgd nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        sgd,
        lr_gain,
    ),
    "sgd maximize": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.1},
        sgd,
        lr_gain,
    ),
    "adam": (optim.Adam, {"lr": 0.1}, adam, adam_gain),
    "adam decay": (optim.Adam, {"lr": 0.1, "weight_decay": 0.3}, adam, adam_gain),
    "adam amsgrad decay": (
        optim.Adam,
        {"lr": 0.1, "amsgrad": True, "betas": (0.8, 0.7), "weight_decay": 0.3},
        adam,
        adam_gain,
    ),
    "adam maximize": (
        optim.Adam,
        {"lr": 0.1, "maximize": True, "weight_decay": 0.2},
        adam,
        adam_gain,
    ),
    "adam decoupled": (
        optim.Adam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True},
        adam,
        adam_gain,
    ),
    "adam no memory": (optim.Adam, {"lr": 0.1, "betas": (0.0, 0.9)}, adam, adam_gain),
    "adamw": (optim.AdamW, {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1}, adam, adam_gain),
    "adamw amsgrad": (
        optim.AdamW,
        {"lr": 0.1, "amsgrad": True, "betas": (0.9, 0.6)},
        adam,
        adam_gain,
    ),
    "adamw maximize": (optim.AdamW, {"lr": 0.1, "maximize": True}, adam, adam_gain),
    "nadam": (
        optim.NAdam,
        {"lr": 0.1, "weight_decay": 0.3, "momentum_decay": 0.1},
        nadam,
        nadam_gain,
    ),
    "nadam decoupled": (
        optim.NAdam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True, "betas": (0.8, 0.95)},
        nadam,
        nadam_gain,
    ),
    "nadam maximize": (optim.NAdam, {"lr": 0.1, "maximize": True}, nadam, nadam_gain),
    "radam": (
        optim.RAdam,
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95)},
        adam,
        radam_gain,
    ),
    "radam decoupled": (
        optim.RAdam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True},
        adam,
        radam_gain,
    ),
    "radam never rectified": (
        optim.RAdam,
        {"lr": 0.1, "betas": (0.8, 0.5), "maximize": True},
        adam,
        radam_gain,
    ),
    "adamax": (
        optim.Adamax,
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.7)},
        adam,
        adamax_gain,
    ),
    "adamax maximize": (optim.Adamax, {"lr": 0.1, "maximize": True}, adam, adamax_gain),
    "rmsprop": (optim.RMSprop, {"lr": 0.1, "weight_decay": 0.3, "alpha": 0.8}, none, None),
    "rmsprop centered": (
        optim.RMSprop,
        {"lr": 0.1, "centered": True, "maximize": True},
        none,
        None,
    ),
    "rmsprop momentum": (
        optim.RMSprop,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
        divided,
        lr_gain,
    ),
    "rmsprop centered momentum": (
        optim.RMSprop,
        {"lr": 0.1, "centered": True, "momentum": 0.5, "maximize": True},
        divided,
        lr_gain,
    ),
    "adagrad": (optim.Adagrad, {"lr": 0.1, "maximize": True}, none, None),
    "adagrad options": (
        optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.4, "weight_decay": 0.3},
        none,
        None,
    ),
    "adadelta": (optim.Adadelta, {"lr": 0.7, "rho": 0.8, "weight_decay": 0.3}, none, None),
    "adadelta maximize": (optim.Adadelta, {"lr": 0.7, "maximize": True}, none, None),
    "adafactor": (optim.Adafactor, {"lr": 0.1, "weight_decay": 0.2}, none, None),
    "adafactor options": (
        optim.Adafactor,
        {"lr": 0.5, "d": 1.1, "eps": (1e-4, 1e-2), "maximize": True},
        none,
        None,
    ),
    "asgd": (optim.ASGD, {"lr": 0.1, "lambd": 0.2, "weight_decay": 0.3, "t0": 2}, none, None),
    "asgd maximize": (optim.ASGD, {"lr": 0.1, "maximize": True}, none, None),
    "rprop": (optim.Rprop, {"lr": 0.1}, none, None),
    "rprop maximize": (
        optim.Rprop,
        {"lr": 0.1, "maximize": True, "step_sizes": (0.09, 0.12)},
        none,
        None,
    ),
    "lion": (Lion, {"lr": 0.1, "weight_decay": 0.1}, lion, lion_gain),
    "lion coupled": (
        Lion,
        {"lr": 0.1, "weight_decay": 0.1, "weight_decouple": False, "maximize": True},
        lion,
        lion_gain,
    ),
}
FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)
WAYS = [
    (name, way)
    for name, (cls, *_) in CASES.items()
    for way in ("single", "foreach", "fused", "float32")
    if (way != "foreach" or cls is not Lion) and (way != "fused" or cls in FUSED)
]
#: torch computes ASGD's rate by foreach in float32.
TOLERANCE = {("asgd", "foreach"): 1e-6, ("asgd maximize", "foreach"): 1e-6}


def options_of(name: str, way: str) -> dict:
    cls, options = CASES[name][:2]
    if cls is Lion:
        return options
    return {**options, "foreach": way == "foreach"} | ({"fused": True} if way == "fused" else {})


def case_run(name: str, way: str, **more):
    cls, dtype = CASES[name][0], torch.float32 if way == "float32" else torch.float64
    if cls is optim.ASGD and dtype is torch.float64:
        torch.set_default_dtype(torch.float64)  # its rate is kept in the default dtype
    try:
        yield from run(cls, options_of(name, way), dtype, **more)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_the_move_is_factor_times_push_plus_decay(name, way):
    tight = TOLERANCE.get((name, way), 1e-6 if way == "float32" else 1e-12)
    for seen in case_run(name, way):
        shrink = seen.rule.shrink(seen.step.group)
        q, worst = seen.rule.pushed(seen.step), 0.0
        for a, push, w, moved in zip(factors(seen), q, seen.step.before, seen.moved, strict=True):
            worst = max(worst, move_off(a * push + shrink * w, moved, w))
        assert worst < tight, f"step {seen.number}: {worst:.1e}"


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_q_is_the_recursions_sum_over_all_gradients_so_far(name, way):
    sums, tight = {}, 2e-6 if way == "float32" else 1e-10
    for seen in case_run(name, way):
        rule, step = seen.rule, seen.step
        z, memories, entry = rule.entering(step), rule.memory(step), rule.entry(step)
        pushed = zip(seen.parameters, rule.pushed(step), step.states, strict=True)
        for i, (p, q, state) in enumerate(pushed):
            enters = z[i] if entry is None else z[i] * entry[i]
            so_far = sums.setdefault(p, Push())
            want, kept = so_far.add(memories[i], enters)
            assert off(q, want, so_far.size) < tight
            if rule.remembered(state) is not None:
                assert off(rule.remembered(state), kept, so_far.size) < tight


@pytest.mark.parametrize("name", list(CASES))
def test_a_second_reader_of_the_formulas_agrees(name):
    _, _, push, gain = CASES[name]
    held, clear = {}, 0
    for seen in case_run(name, "single", other_betas=push is not nadam):
        rule, step, group = seen.rule, seen.step, seen.step.group
        found = zip(seen.parameters, seen.counts, factors(seen), rule.pushed(step), strict=True)
        for i, (p, count, a, q) in enumerate(found):
            state = step.states[i]
            sign = -1.0 if group.get("maximize") else 1.0
            z = sign * step.gradients[i] + rule.coupled(group) * step.before[i]
            held[p], want = push(held.get(p, torch.zeros_like(z)), z, group, count, state)
            assert off(q, want) < 1e-10
            if gain is not None:
                # Where nothing ever moved, a factor of 0 stands for one of 1/ε.
                moves = (a != 0) | (want != 0)
                expected = torch.zeros_like(a) + gain(state, group, count, want)
                assert off(a[moves], expected[moves]) < 1e-12
                clear += int(moves.sum())
    assert clear > 0 or gain is None


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_nothing_given_is_modified(name, way):
    for seen in case_run(name, way, steps=4):
        rule, step, kept = seen.rule, seen.step, snapshot(seen)
        raw = [torch.randn_like(w) for w in step.before]
        for part in (rule.memory, rule.factor, rule.pushed, rule.entry, rule.is_early):
            part(step)
        rule.own_direction(raw, seen.moved, step)
        factor = rule.factor(step)
        for a in factor if isinstance(factor, list) else ():
            a.fill_(7.0)  # the caller may overwrite it
        rule.before_step(step.group, step.states)
        assert same(snapshot(seen), kept)


@pytest.mark.parametrize("name", list(CASES))
def test_the_factor_is_zero_where_no_gradient_ever_came(name):
    cls = CASES[name][0]
    left_out = ("weight_decay", "initial_accumulator_value")
    group = {k: v for k, v in CASES[name][1].items() if k not in left_out}
    for dtype in (torch.float64, torch.float32):
        for seen in run(cls, group, dtype):
            a = factors(seen)[0]
            assert bool(torch.isfinite(a).all())
            entry = seen.rule.entry(seen.step)
            constant = not seen.rule.adaptive or (cls is optim.RAdam and bool((a == a[0, 0]).all()))
            still = a[0] if entry is None else entry[0][0]
            if not constant:
                assert bool((still == 0).all())
                assert bool((a[1:] != 0).any())


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n][0] not in (optim.SGD, optim.ASGD)])
def test_the_first_three_steps_are_early_and_lions_first(name):
    most = 1 if CASES[name][0] is Lion else 3
    for seen in case_run(name, "single"):
        assert seen.rule.is_early(seen.step) == [count <= most for count in seen.counts]


@pytest.mark.parametrize("name", ["sgd", "sgd momentum", "asgd"])
def test_a_factor_without_the_gradient_has_no_early_steps(name):
    assert not any(any(seen.rule.is_early(seen.step)) for seen in case_run(name, "single"))


def with_betas(seen, *betas):
    """The step as it would be read with other betas."""
    return dataclasses.replace(seen.step, group={**seen.step.group, "betas": betas})


def worst_of_run(name, **more) -> list[float]:
    """How far factor times push is from the move, step by step."""
    worst = []
    for seen in case_run(name, "single", **more):
        a, q = factors(seen), seen.rule.pushed(seen.step)
        worst.append(max(off(a[i] * q[i], m) for i, m in enumerate(seen.moved)))
    return worst


def test_a_wrong_beta_does_not_pass():
    sums, worst = {}, 0.0
    for seen in run(optim.AdamW, {"lr": 0.1}, schedule=False):
        step = with_betas(seen, 0.89, 0.999)
        z, q, memories = seen.rule.entering(step), seen.rule.pushed(step), seen.rule.memory(step)
        for i, p in enumerate(seen.parameters):
            worst = max(worst, off(q[i], sums.setdefault(p, Push()).add(memories[i], z[i])[0]))
    assert worst > 1e-3


def test_a_wrong_second_beta_does_not_pass():
    worst = 0.0
    for seen in run(optim.AdamW, {"lr": 0.1, "weight_decay": 0.0}, schedule=False):
        step = with_betas(seen, 0.9, 0.99)
        a, q = seen.rule.factor(step), seen.rule.pushed(step)
        worst = max(worst, *(off(a[i] * q[i], m) for i, m in enumerate(seen.moved)))
    assert worst > 1e-3


def test_weight_decay_that_is_left_out_does_not_pass():
    for seen in run(optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}, steps=1):
        a, q = factors(seen)[0], seen.rule.pushed(seen.step)[0]
        assert off(a * q, seen.moved[0]) > 1e-6


def test_asgd_follows_a_changing_learning_rate_only_when_told_before_the_step(monkeypatch):
    monkeypatch.setattr(ASGDRule, "before_step", lambda self, group, states: None)
    missed = worst_of_run("asgd")
    assert missed[0] < 1e-12
    assert max(missed) > 0.1
    assert max(worst_of_run("asgd", schedule=False)) < 1e-12


@pytest.mark.parametrize("foreach", [False, True])
def test_learning_rate_and_betas_may_be_cpu_tensors(foreach):
    options = {
        "lr": torch.tensor(0.125),
        "betas": (torch.tensor(0.875), torch.tensor(0.96875)),
        "foreach": False,
    }
    for seen in run(optim.Adam, options, schedule=False):
        for a, q, moved in zip(factors(seen), seen.rule.pushed(seen.step), seen.moved, strict=True):
            assert off(a * q, moved) < 1e-6
    options = {"lr": torch.tensor(0.125), "momentum": 0.5, "foreach": foreach}
    for seen in run(optim.SGD, options, schedule=False):
        assert seen.rule.factor(seen.step) == 0.125


HALF = ["adamw", "adam decay", "sgd nesterov", "nadam", "lion", "adafactor"]


@pytest.mark.parametrize("name", HALF)
def test_half_precision_gives_float32(name):
    cls, options = CASES[name][:2]
    for seen in run(cls, options, torch.bfloat16, steps=5):
        pushed = seen.rule.pushed(seen.step)
        for a, q, w, moved in zip(factors(seen), pushed, seen.step.before, seen.moved, strict=True):
            assert q.dtype == torch.float32
            shrink = seen.rule.shrink(seen.step.group)
            assert move_off(a * q + shrink * w.float(), moved.float(), w) < 0.05

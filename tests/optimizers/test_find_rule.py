"""Which rule an optimizer gets, what is refused, and that nothing waits for a device."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from optimizer_runs import Lion, off, run
from torch import nn, optim

import inrun.optimizers.rule as rule_module
from inrun.errors import OptimizerError
from inrun.optimizers import (
    NO_MEMORY,
    GroupStep,
    Memory,
    UpdateRule,
    find_rule,
    lists,
    register,
)
from inrun.optimizers.adam import AdamRule, AdamWRule
from inrun.optimizers.signs import LionRule


def parameter():
    return nn.Parameter(torch.randn(3, 2))


def test_every_optimizer_of_torch_has_a_rule_or_is_refused():
    refused = {"LBFGS", "SparseAdam"}
    classes = {name: cls for name, cls in vars(optim).items() if isinstance(cls, type)}
    assert len(classes) > 12
    for name, cls in classes.items():
        if cls is optim.Optimizer:
            continue
        if name in refused:
            with pytest.raises(OptimizerError, match=name):
                find_rule(cls([parameter()]))
        else:
            assert type(find_rule(cls([parameter()], lr=0.1))) is not UpdateRule, name


def test_a_subclass_keeps_the_rule_unless_it_steps_differently():
    class Named(optim.AdamW):
        pass

    class Other(optim.AdamW):
        def step(self, closure=None):
            return None

    assert type(find_rule(Named([parameter()]))) is AdamWRule
    assert type(find_rule(Other([parameter()]))) is UpdateRule


def test_a_subclass_of_lbfgs_is_refused():
    class Mine(optim.LBFGS):
        pass

    with pytest.raises(OptimizerError, match="Mine"):
        find_rule(Mine([parameter()]))


def test_a_rule_of_your_own_by_class_and_by_name():
    class Plain(optim.Optimizer):
        def __init__(self, params, lr) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self):
            for p in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
                p.sub_(self.param_groups[0]["lr"] * p.grad)

    class Named(Plain):
        def step(self):
            return super().step()

    Named.__module__, Named.__qualname__ = "somewhere.else", "Named"

    @register(Plain, "somewhere.else.Named")
    class PlainRule(UpdateRule):
        forgetful = True

        def factor(self, step: GroupStep):
            return step.lr

    for cls in (Plain, Named):
        for seen in run(cls, {"lr": 0.1}):
            assert type(seen.rule) is PlainRule
            assert seen.rule.memory(seen.step) == [NO_MEMORY] * len(seen.counts)
            for q, m in zip(seen.rule.pushed(seen.step), seen.moved, strict=True):
                assert off(seen.step.lr * q, m) < 1e-12


@pytest.mark.parametrize("option", ["cautious", "caution", "use_gc", "adanorm"])
def test_lions_variants_are_refused_by_name(option):
    with pytest.raises(OptimizerError, match=option):
        find_rule(Lion([parameter()], **{option: True}))


def test_lion_that_keeps_nothing_is_refused():
    with pytest.raises(OptimizerError, match="betas"):
        find_rule(Lion([parameter()], betas=(0.9, 0.0)))


def test_nadam_that_keeps_its_schedule_on_the_device_is_refused():
    with pytest.raises(OptimizerError, match="capturable"):
        find_rule(optim.NAdam([parameter()], capturable=True))


def test_betas_on_a_device_are_refused():
    optimizer = optim.AdamW([parameter()])
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9, device="meta"), 0.99)
    with pytest.raises(OptimizerError, match="betas on meta"):
        find_rule(optimizer)


def test_a_group_without_a_learning_rate_is_refused():
    optimizer = optim.SGD([parameter()], lr=0.1)
    group = {**optimizer.param_groups[0], "lr": None}
    step = GroupStep([torch.ones(2)], [torch.ones(2)], group, [{}], [True])
    with pytest.raises(OptimizerError, match="learning rate"):
        find_rule(optimizer).factor(step)


@pytest.mark.parametrize(
    "module",
    [
        "lion_pytorch.lion_pytorch",
        "lion_pytorch.foreach",
        "timm.optim.lion",
        "pytorch_optimizer.optimizer.lion",
    ],
)
def test_the_packages_lions_are_recognized(module):
    cls = pytest.importorskip(module).Lion
    assert type(find_rule(cls([parameter()]))) is LionRule


def test_options_that_lion_keeps_in_the_optimizer_are_read():
    optimizer = Lion([parameter()], lr=0.1, weight_decay=0.5)
    optimizer.maximize, optimizer.decoupled_wd, optimizer._init_lr = True, True, 0.2
    rule = find_rule(optimizer)
    assert rule.sign(optimizer.param_groups[0]) == -1.0
    assert rule.shrink(optimizer.param_groups[0]) == pytest.approx(0.5 * 0.1 / 0.2)
    fixed = Lion([parameter()], lr=0.1, weight_decay=0.5, fixed_decay=True)
    assert find_rule(fixed).shrink(fixed.param_groups[0]) == 0.5
    corrected = Lion([parameter()], lr=0.1, weight_decay=0.5, corrected_weight_decay=True)
    corrected.param_groups[0]["lr"] = 0.05
    shrink = find_rule(corrected).shrink(corrected.param_groups[0])
    assert shrink == pytest.approx(0.5 * 0.05**2 / 0.1)


def on_meta(x):
    return x.detach().to("meta") if isinstance(x, torch.Tensor) else x


ON_DEVICE = [
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.AdamW, {}),
    (optim.RAdam, {}),
    (optim.Adamax, {}),
    (optim.RMSprop, {"centered": True}),
    (optim.RMSprop, {"momentum": 0.5}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adadelta, {}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (Lion, {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("cls", "options"), ON_DEVICE)
@pytest.mark.parametrize("counts", ["host", "device"])
@pytest.mark.parametrize("rate", ["host", "device"])
def test_nothing_is_read_back_from_a_device(cls, options, counts, rate):
    """A meta tensor raises on whatever would wait for a device."""
    for seen in run(cls, {"lr": 0.1, **options}, torch.float32, steps=2):
        step = seen.step
        group = {**step.group, "lr": torch.tensor(0.1, device="meta") if rate == "device" else 0.1}
        # ASGD counts on the device.
        host = ("step",) if counts == "host" and cls is not optim.ASGD else ()
        states = [{k: x if k in host else on_meta(x) for k, x in s.items()} for s in step.states]
        before, gradients = [on_meta(x) for x in step.before], [on_meta(x) for x in step.gradients]
        there, rule = GroupStep(before, gradients, group, states, step.first), seen.rule
        rule.before_step(group, states)
        for made in (
            rule.factor(there),
            rule.pushed(there),
            rule.entry(there),
            rule.own_direction(before, before, there),
        ):
            assert not isinstance(made, list) or all(x.device.type == "meta" for x in made)
        assert rule.memory(there) is not None
        rule.shrink(group), rule.coupled(group), rule.remembered(states[0])
        if counts == "host":
            assert rule.is_early(there) == rule.is_early(step) or not rule.adaptive


@pytest.mark.parametrize(("cls", "options"), ON_DEVICE)
def test_arithmetic_on_the_device_gives_the_same(cls, options, monkeypatch):
    """Counts and learning rate are taken for tensors on a device that must not be read."""
    for seen in run(cls, {"lr": 0.125, **options}, schedule=False):
        step, rule = seen.step, seen.rule
        host = rule.factor(step), rule.pushed(step)
        group = {**step.group, "lr": torch.tensor(0.125, dtype=torch.float64)}
        with monkeypatch.context() as patch:
            for module in (lists, rule_module):
                patch.setattr(module, "on_host", lambda x: not isinstance(x, torch.Tensor))
            there = dataclasses.replace(step, group=group)
            device = rule.factor(there), rule.pushed(there)
        for some, other in zip(host, device, strict=True):
            for i, y in enumerate(other):
                x = torch.full_like(y, some) if isinstance(some, float) else some[i]
                assert torch.allclose(x, y, rtol=1e-13, atol=0.0)


def test_both_ways_to_divide_by_roots_agree():
    squares = [torch.rand(4, 3), torch.zeros(2), torch.rand(())]
    squares[0][1] = 0.0
    sizes = lists.shifted_(list(torch._foreach_sqrt(squares)), [1e-3, 1e-2, 0.1])
    want = lists.quotient(squares, sizes, 2.0)
    for x, y in zip(lists.over_roots(squares, [1e-3, 1e-2, 0.1], 2.0), want, strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=0.0)
        assert torch.equal(x == 0, y == 0)
    nan = torch.tensor([1.0, torch.nan])
    assert lists.over_roots([nan], 0.1, 1.0)[0].isnan().tolist() == [False, True]


def test_unknown_optimizers_and_muon_read_nothing_back_either():
    w = [torch.zeros(3, 4, device="meta")]
    group = {"lr": torch.tensor(0.1, device="meta"), "weight_decay": 0.1}
    step = GroupStep(w, w, group, [{"momentum_buffer": w[0]}], [True])
    assert UpdateRule().own_direction(w, w, step)[0].shape == (3, 4)
    if hasattr(optim, "Muon"):
        optimizer = optim.Muon([parameter()])
        muon = GroupStep(w, w, {**optimizer.param_groups[0], **group}, step.states, [True])
        assert find_rule(optimizer).own_direction(w, w, muon)[0].shape == (3, 4)


def test_a_count_on_a_device_is_read_until_it_is_beyond_three(monkeypatch):
    class Count(torch.Tensor):
        read = 0

        def __float__(self) -> float:
            Count.read += 1
            return self.as_subclass(torch.Tensor).item()

    monkeypatch.setattr(rule_module, "on_host", lambda x: not isinstance(x, Count))
    rule, count = AdamRule(), torch.tensor(0.0).as_subclass(Count)
    step, early = GroupStep([], [], {}, [{"step": count}], [False]), []
    for _ in range(8):
        count += 1
        early += rule.is_early(step)
    assert early == [True] * 3 + [False] * 5
    assert Count.read == 4


def test_memory_has_its_own_and_later_coefficients():
    assert Memory(0.9, 0.1).own == pytest.approx(0.1)
    assert Memory(0.9, 0.1, 0.9, 1.0).own == pytest.approx(1.09)
    assert Memory(0.9, 0.1).later == 0.9
    assert Memory(0.0, 1.0, keep_later=0.9).later == 0.9


def test_all_names_are_public():
    module = importlib.import_module("inrun.optimizers")
    assert all(hasattr(module, name) for name in module.__all__)

"""Credits against the brute force (``tests/brute_force.py``), for every optimizer; what they add up to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from brute_force import (
    Brute,
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
from conditions import loss_of, net, rows
from inrun.engine import Accountant, quadrature
from loops import distance, held_out, losses, open_credits, perceptron, points, run_step
from reference import gradients, relative_error, sample_gradients


class Lion(torch.optim.Optimizer):
    """Stands in for lion-pytorch's under its name, by which it is recognized."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in [p for p in group["params"] if p.grad is not None]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(b1 * m + (1 - b1) * p.grad))
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


Lion.__module__ = "lion_pytorch.lion_pytorch"

optim = torch.optim
#: By name: the optimizer, its options, what it remembers, its factor, and steps of a tensor that have one factor for all of it.
CASES: dict[str, tuple[Any, dict[str, Any], Any, Any, int]] = {
    "sgd": (optim.SGD, {"lr": 0.1}, sgd, lr_gain, 0),
    "sgd, coupled decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, sgd, lr_gain, 0),
    "momentum": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}, sgd, lr_gain, 0),
    "dampening": (optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "foreach": True}, sgd, lr_gain, 0),
    "nesterov": (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, sgd, lr_gain, 0),
    "momentum, maximize, fused": (optim.SGD, {"lr": 0.01, "momentum": 0.9, "maximize": True, "fused": True}, sgd, lr_gain, 0),
    "adam": (optim.Adam, {"lr": 1e-2}, adam, adam_gain, 3),
    "adam, coupled decay, foreach": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}, adam, adam_gain, 3),
    "adamw": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}, adam, adam_gain, 3),
    "adamw, fused": (optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}, adam, adam_gain, 3),
    "adamw, maximize": (optim.AdamW, {"lr": 1e-3, "maximize": True}, adam, adam_gain, 3),
    "adamw, amsgrad": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}, adam, adam_gain, 3),
    "nadam": (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}, nadam, nadam_gain, 3),
    "nadam, decoupled": (
        optim.NAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": True},
        nadam,
        nadam_gain,
        3,
    ),
    "radam": (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}, adam, radam_gain, 3),
    "adamax": (optim.Adamax, {"lr": 1e-2}, adam, adamax_gain, 3),
    "rmsprop": (optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}, none, None, 3),
    "rmsprop, centered": (optim.RMSprop, {"lr": 1e-3, "centered": True}, none, None, 3),
    "rmsprop, momentum": (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}, divided, lr_gain, 3),
    "rmsprop, momentum, centered": (
        optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.8, "centered": True, "maximize": True},
        divided,
        lr_gain,
        3,
    ),
    "adagrad": (optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}, none, None, 3),
    "adadelta": (optim.Adadelta, {"lr": 1.0}, none, None, 3),
    "adafactor": (optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}, none, None, 3),
    "asgd": (optim.ASGD, {"lr": 0.05, "weight_decay": 0.1}, none, None, 0),
    "lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}, lion, lion_gain, 1),
    "rprop": (optim.Rprop, {"lr": 1e-3}, none, None, 3),
}
STEPS = 9


def decay_of(group: dict[str, Any], optimizer: optim.Optimizer) -> tuple[float, float]:
    """Return the factor of −w beside the update, and λ where it enters the gradient."""
    decay, lr = group.get("weight_decay", 0.0), float(group["lr"])
    if isinstance(optimizer, optim.ASGD):
        return 0.0, decay + group["lambd"]
    if isinstance(optimizer, (optim.NAdam, optim.RAdam)):
        return (lr * decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)
    if isinstance(optimizer, (optim.AdamW, optim.Adafactor, Lion)):
        return lr * decay, 0.0
    return 0.0, decay


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation gradient of every step is taken in the middle of its move, as the brute force does."""
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))


def validation(model: nn.Module) -> Tensor:
    return loss_of(model, rows(3, 99))


def run(
    case: str, groups: bool = False, set_to_none: bool = True, begin: int = 0, clip: float = 0.5, **more: Any
) -> tuple[Accountant, Brute, Tensor]:
    """Train with an accountant from step ``begin`` on, and a brute force beside it; return them, and the credits of all uses.

    Every run has a schedule of the learning rate, clipping, and two microbatches at odd steps. With ``groups`` there are two, with
    options of their own and betas that change, and the last tensor is frozen for two steps.
    """
    kind, options, push, gain, early = CASES[case]
    early = early if more.get("method", "whole") == "whole" else 0
    model = net()
    parameters = list(model.parameters())
    if groups:
        other = {**options, "lr": options["lr"] / 2} | ({"betas": (0.7, 0.9)} if "betas" in options else {})
        optimizer = kind([{"params": parameters[:3]}, {"params": parameters[3:], **other}], **options)
    else:
        optimizer = kind(parameters, **options)
    accountant: Any = None
    brute = Brute(parameters, push, gain, early, points=1)
    base = [g["lr"] for g in optimizer.param_groups]
    own = []
    for t in range(STEPS):
        for g, lr in zip(optimizer.param_groups, base, strict=True):
            g["lr"] = lr * (1.0, 0.5, 1.5)[t % 3]
            if "betas" in g and t > 3 and groups:
                g["betas"] = ((0.85, 0.95)[t % 2], g["betas"][1])
        data = rows(4, t)
        frozen = groups and t in (4, 5)
        before = [p.detach().clone() for p in parameters]
        shares = sample_gradients(lambda j, d=data: loss_of(model, d[j : j + 1]), 4, parameters)
        if frozen:
            parameters[-1].requires_grad_(False)
            shares = [[*g[:-1], torch.zeros_like(g[-1])] for g in shares]
        if t == begin:
            accountant = Accountant(model, optimizer, validation, **({"sketch": "exact", "audit_every": 1} | more))
        with accountant.step() if accountant else contextlib.nullcontext() as step:
            for first in (0, 2) if t % 2 else (0,):
                part = data[first : first + 2] if t % 2 else data
                with step.microbatch(range(first, first + len(part))) if step else contextlib.nullcontext():
                    loss_of(model, part).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            factor = min(1.0, clip / (float(norm) + 1e-6))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        own += [accountant.last.contributions["validation"]] if accountant else []
        parameters[-1].requires_grad_(True)
        stepped = [not (frozen and set_to_none and i == len(parameters) - 1) for i in range(len(parameters))]
        owner = {p: g for g in optimizer.param_groups for p in g["params"]}
        brute.step(
            [[x * factor for x in g] for g in shares],
            before,
            lambda: validation(model),
            [(optimizer.state[p], owner[p]) for p in parameters],
            [decay_of(owner[p], optimizer) for p in parameters],
            stepped,
        )
    credits = open_credits(accountant)[:, 0] if more.get("method", "whole") == "whole" else torch.zeros(0)
    return accountant, brute, credits if len(credits) else torch.cat(own)


@pytest.mark.parametrize("case", CASES)
def test_whole_credit_is_that_of_the_brute_force(case: str, middle: None) -> None:
    accountant, brute, credits = run(case)
    assert brute.off < 1e-9  # the memories of the brute force are the real move
    truth = torch.cat(brute.credit)
    assert relative_error(credits, truth) < 1e-9
    assert relative_error(accountant.last.contributions["validation"], brute.own[-1]) < 1e-9
    account, books = accountant.last.accounts["validation"], brute.books[-1]
    assert account is not None
    assert account.data == pytest.approx(books["data"], rel=1e-8, abs=1e-10)
    assert account.decay == pytest.approx(books["decay"], rel=1e-8, abs=1e-10)
    assert account.residual == pytest.approx(books["residual"], rel=1e-8, abs=1e-10)
    assert account.spread == pytest.approx(books["spread"], rel=1e-6)
    assert not account.inherited
    if brute.push is not none:  # the control: a use earns after its own step, too
        assert case in ("sgd", "sgd, coupled decay") or relative_error(torch.cat(brute.own), truth) > 1e-3


#: Kernels of one optimizer remember alike, which the whole credit above compares.
STEP = [c for c in CASES if c not in ("rmsprop, momentum", "rmsprop, momentum, centered")]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] if c.endswith(("fused", "foreach")) else []) for c in STEP]
)
def test_the_step_method_gives_the_steps_own_share(case: str, middle: None) -> None:
    accountant, brute, own = run(case, method="step", sketch=None)
    assert relative_error(own, torch.cat(brute.own)) < 1e-9
    assert (accountant.last.accounts["validation"] is not None) and accountant.method == "step"


@pytest.mark.parametrize("sketch", ["exact", 10**6])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_groups_changing_betas_and_a_tensor_that_is_frozen_for_a_while(set_to_none: bool, sketch: Any, middle: None) -> None:
    """With zeros in its gradient the frozen tensor moves on by momentum and decay, and that is paid."""
    _, brute, credits = run("adamw", groups=True, set_to_none=set_to_none, sketch=sketch)
    assert brute.off < 1e-9
    assert relative_error(credits, torch.cat(brute.credit)) < 1e-9


def test_what_the_optimizer_remembers_from_before_is_nobodys(middle: None) -> None:
    accountant, brute, credits = run("adam, coupled decay, foreach", begin=3)
    assert relative_error(credits, torch.cat(brute.credit[3:])) < 1e-9
    account, books = accountant.last.accounts["validation"], brute.books[-1]
    assert account is not None and account.inherited is not None and account.decay is not None
    assert account.data + account.decay + account.inherited == pytest.approx(books["data"] + books["decay"], rel=1e-8)
    assert abs(account.inherited) > 1e-3 * account.spread
    assert account.residual == pytest.approx(books["residual"], rel=1e-8, abs=1e-10)


@pytest.mark.parametrize("sketch", ["exact", 10**6])
def test_networks_that_train_in_turn_remember_while_they_rest(sketch: Any, middle: None) -> None:
    """At a step of the other network nothing of a use moves; its momentum pays it when its own network steps again."""
    model = perceptron()
    parts = [list(model.a.parameters()), list(model.b.parameters())]
    optimizers = [optim.SGD(part, lr=0.05, momentum=0.9) for part in parts]
    brute = Brute(parts[0] + parts[1], sgd, lr_gain, 0, points=1)
    accountant = Accountant(model, optimizers, held_out, sketch=sketch)
    for t in range(6):
        for i, part in enumerate(parts):
            for p in part:
                p.requires_grad_(i == t % 2)
        before, x = [p.detach().clone() for p in brute.parameters], points(4, t)
        run_step(accountant, lambda x=x: losses(model, x).mean(), range(4))
        after = [p.detach().clone() for p in brute.parameters]
        model.requires_grad_(True)
        brute._put(before)
        g = sample_gradients(lambda j, x=x: losses(model, x[j : j + 1]).sum() / 4, 4, brute.parameters)
        brute._put(after)
        stepped = [i == t % 2 for i, part in enumerate(parts) for _ in part]
        groups = [(o.state[p], o.param_groups[0]) for o, part in zip(optimizers, parts, strict=True) for p in part]
        brute.step(g, before, lambda: held_out(model), groups, [(0.0, 0.0)] * 4, stepped)
    assert brute.off < 1e-9
    assert relative_error(open_credits(accountant)[:, 0], torch.cat(brute.credit)) < 1e-9


class Plain(optim.Optimizer):
    """An optimizer that nobody knows: the sign of the gradient, half of it remembered, with noise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            kept = self.state[p].setdefault("kept", torch.zeros_like(p))
            kept.mul_(0.5).add_(p.grad)
            p.data.sub_(0.01 * kept.sign() * kept.abs().sqrt())


@pytest.mark.parametrize("kind", [Plain, lambda p: optim.Muon([x for x in p if x.dim() == 2], lr=0.02)], ids=["unknown", "muon"])
def test_an_optimizer_without_known_memory_shares_out_its_real_move(kind: Callable[[Any], Any], middle: None) -> None:
    """The score of a sample is the part of the move that lies along its gradient; sums are what the move was worth."""
    model = perceptron()
    optimizer = kind(model.parameters())
    moving = [p for group in optimizer.param_groups for p in group["params"]]
    accountant = Accountant(model, optimizer, held_out, method="step")
    for t in range(4):
        before, x = [p.detach().clone() for p in moving], points(4, t)
        shares = sample_gradients(lambda j, x=x: losses(model, x[j : j + 1]).sum() / 4, 4, moving)
        got = run_step(accountant, lambda x=x: losses(model, x).mean(), range(4))
        after = [p.detach().clone() for p in moving]
        with torch.no_grad():
            for p, a, b in zip(moving, after, before, strict=True):
                p.copy_((a + b) / 2)
        slope = gradients(held_out(model), moving)
        with torch.no_grad():
            for p, a in zip(moving, after, strict=True):
                p.copy_(a)
        moved = [b - a for a, b in zip(after, before, strict=True)]
        if isinstance(optimizer, Plain):
            whole = [torch.stack([g[i] for g in shares]).sum(0) for i in range(len(moving))]
            worth = [(m * v).sum() / (w * w).sum() for m, v, w in zip(moved, slope, whole, strict=True)]
            truth = torch.stack(
                [sum(((g * w).sum() * k for g, w, k in zip(gs, whole, worth, strict=True)), torch.zeros(())) for gs in shares]
            )
            assert relative_error(got, truth) < 1e-9
        elif t == 0:  # all of Muon's first move is its own; it computes in bfloat16
            decay = [0.1 * 0.02 * b for b in before]
            worth = sum(float(((m - d) * v).sum()) for m, d, v in zip(moved, decay, slope, strict=True))
            assert float(got.sum()) == pytest.approx(worth, rel=0.1)


@pytest.mark.parametrize("kind", ["calm", "rough"])
@pytest.mark.parametrize("sketch", ["exact", None])
def test_credits_add_up_to_the_measured_fall(kind: str, sketch: Any) -> None:
    """Within 1 % of it, where steps overshoot, too; the control is that the middle alone would not do there."""
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    start = float(validation(model).detach())
    accountant = Accountant(model, optimizer, validation, sketch=sketch)
    for t in range(30):
        optimizer.param_groups[0]["lr"] = 5e-3 * (20.0 if kind == "rough" and t in (9, 20) else 1.0)
        run_step(accountant, lambda t=t: loss_of(model, rows(4, t)) / 4, range(4 * t, 4 * t + 4))
    accountant.close()
    fall = start - float(validation(model).detach())
    table = accountant.ledger.accounts()
    measured = [row for row in table.to_pylist() if row["residual"] is not None]
    assert all(abs(row["residual"]) <= 0.0101 * row["spread"] for row in measured)
    rest = sum(x or 0.0 for name in ("decay", "inherited") for x in table[name].to_pylist())
    told = sum(accountant.scores()["score"].to_pylist()) + rest
    assert told == pytest.approx(fall, rel=0.01)
    assert fall > 0.5
    assert any(row["points"] > 1 for row in measured[6:]) == (kind == "rough")


def test_several_validation_sets_and_points_are_scored_as_each_alone(middle: None) -> None:
    def scores(validation: Any) -> list[Tensor]:
        model = perceptron()
        accountant = Accountant(model, optim.AdamW(model.parameters(), lr=0.01), validation, sketch="exact")
        for t in range(4):
            run_step(accountant, lambda t=t: losses(model, points(4, t)).mean(), range(4))
        return list(open_credits(accountant).T)

    def each(model: Any) -> Tensor:
        return losses(model, points(3, 5))

    together = scores({"a": held_out, "points": each})
    alone = [scores(held_out)[0], *(scores(lambda m, j=j: each(m)[j])[0] for j in range(3))]
    assert distance(together, alone) < 1e-9
    assert distance(together[:1], alone[1:2]) > 0.1

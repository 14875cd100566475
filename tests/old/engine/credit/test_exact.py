"""Whole credit with kept gradients against brute force, for every optimizer that has a memory; completeness."""

from __future__ import annotations

import copy

import pytest
import torch

import inrun
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
from inrun.errors import OptimizerError
from inrun.old.engine.credit import keeper
from inrun.old.engine.refinement import Usual
from inrun.training.gpt import next_token_loss
from reference import gradients, relative_error, sample_gradients
from tiny import batch, tiny, validation


class Lion(torch.optim.Optimizer):
    """Stands in for lion-pytorch's, which need not be installed, under its name: by that it is recognised."""

    def __init__(self, params, lr, betas, weight_decay) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

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
#: name: (optimizer class, options, push, gain, steps of a tensor that have one factor for all of it)
CASES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, sgd, lr_gain, 0),
    "sgd with coupled decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, sgd, lr_gain, 0),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.05}, sgd, lr_gain, 0),
    "dampened": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}, sgd, lr_gain, 0),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}, sgd, lr_gain, 0),
    "maximising": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "maximize": True}, sgd, lr_gain, 0),
    "adam": (torch.optim.Adam, {"lr": 1e-2}, adam, adam_gain, 3),
    "adam with coupled decay": (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, adam, adam_gain, 3),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}, adam, adam_gain, 3),
    "adamw maximising": (torch.optim.AdamW, {"lr": 1e-3, "maximize": True}, adam, adam_gain, 3),
    "amsgrad": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}, adam, adam_gain, 3),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}, nadam, nadam_gain, 3),
    "nadam decoupled": (
        torch.optim.NAdam,
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
        nadam,
        nadam_gain,
        3,
    ),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.99)}, adam, radam_gain, 3),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}, adam, adamax_gain, 3),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "weight_decay": 0.1}, none, None, 3),
    "rmsprop centred": (torch.optim.RMSprop, {"lr": 1e-3, "centered": True}, none, None, 3),
    "rmsprop with momentum": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}, divided, lr_gain, 3),
    "rmsprop centred with momentum": (
        torch.optim.RMSprop,
        {"lr": 1e-3, "momentum": 0.8, "centered": True, "maximize": True},
        divided,
        lr_gain,
        3,
    ),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}, none, None, 3),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}, none, None, 3),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "weight_decay": 0.1}, none, None, 3),
    "asgd": (torch.optim.ASGD, {"lr": 0.05, "weight_decay": 0.1}, none, None, 0),
    "lion": (Lion, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}, lion, lion_gain, 1),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}, none, None, 3),
}
SEQUENCE = 9


def so_far(accountant) -> torch.Tensor:
    """The credits of all uses in double precision; an optimizer that remembers nothing settles at once."""
    return torch.cat([*accountant.settled_at_once, *(o.credit[:, 0] for o in accountant._run.credit.open)])


def decay_of(group, optimizer) -> tuple[float, float]:
    """The factor of −w beside the update, and λ where it enters the gradient."""
    decay, lr = group.get("weight_decay", 0.0), float(group["lr"])
    if isinstance(optimizer, torch.optim.ASGD):
        return 0.0, decay + group["lambd"]
    if isinstance(optimizer, (torch.optim.NAdam, torch.optim.RAdam)):
        return (lr * decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)
    if isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adafactor, Lion)):
        return lr * decay, 0.0
    return 0.0, decay


def run(optimizer_class, options, push, gain, early, steps=SEQUENCE, clip=0.5, points=3, groups=False, to_none=True, **more):
    """Train with an exact accountant and a brute force beside it; schedule of lr (and betas), two microbatches at odd steps.

    Gradients that are not set ``to_none`` but to zeros let the optimizer move a tensor that is frozen, by its momentum.
    """
    torch.manual_seed(0)
    model = tiny()
    parameters = list(model.parameters())
    if groups:
        other = {**options, "lr": options["lr"] / 2} | ({"betas": (0.7, 0.9)} if "betas" in options else {})
        optimizer = optimizer_class([{"params": parameters[:3]}, {"params": parameters[3:], **other}], **options)
    else:
        optimizer = optimizer_class(parameters, **options)
    rows = batch(3, 99)

    def validation(model):
        return next_token_loss(model, rows)

    more = {"credit": "whole", "credit_memory": "exact", "quadrature": f"gauss{points}", "audit_every": 1, **more}
    accountant = inrun.Accountant(model, optimizer, validation, **more)
    accountant.settled_at_once = []
    brute = Brute(parameters, push, gain, early, points)
    base = [g["lr"] for g in optimizer.param_groups]
    for t in range(steps):
        for g, lr in zip(optimizer.param_groups, base, strict=True):
            g["lr"] = lr * (1.0, 0.5, 1.5)[t % 3]
            if "betas" in g and t > 3 and groups:
                g["betas"] = ((0.85, 0.95)[t % 2], g["betas"][1])
        data = batch(4, t)
        frozen = groups and t in (4, 5)
        parameters[-1].requires_grad_(not frozen)
        before = [p.detach().clone() for p in parameters]
        with accountant.paused():
            parameters[-1].requires_grad_(True)
            shares = sample_gradients(lambda j, d=data: next_token_loss(model, d[j : j + 1]) / 4, 4, parameters)
            if frozen:
                parameters[-1].requires_grad_(False)
                shares = [[*g[:-1], torch.zeros_like(g[-1])] for g in shares]
        with accountant.step() as step:
            for first in (0, 2) if t % 2 else (0,):
                part = data[first : first + 2] if t % 2 else data
                with step.microbatch(range(first, first + len(part))):
                    (next_token_loss(model, part) * (len(part) / 4)).backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
            factor = min(1.0, clip / (float(norm) + 1e-6))
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        if not accountant._run.credit.open:
            accountant.settled_at_once.append(accountant.last.contributions["validation"])
        stepped = [not (frozen and to_none and i == len(parameters) - 1) for i in range(len(parameters))]
        owner = {p: g for g in optimizer.param_groups for p in g["params"]}
        parameters[-1].requires_grad_(True)
        with accountant.paused():
            brute.step(
                [[x * factor for x in g] for g in shares],
                before,
                lambda: validation(model),
                [(optimizer.state[p], owner[p]) for p in parameters],
                [decay_of(owner[p], optimizer) for p in parameters],
                stepped,
            )
    return accountant, brute


@pytest.mark.parametrize("name", CASES)
def test_exact_credit_is_brute_force(name: str) -> None:
    accountant, brute = run(*CASES[name])
    assert brute.off < 1e-9  # the memories are the real move
    assert relative_error(so_far(accountant), torch.cat(brute.credit)) < 1e-9
    account, books = accountant.last.accounts["validation"], brute.books[-1]
    for name in ("data", "decay", "residual", "spread"):
        assert getattr(account, name) == pytest.approx(books[name], rel=1e-8, abs=1e-10)
    assert account.inherited == 0.0
    assert account.momentum is None
    assert relative_error(accountant.last.contributions["validation"], brute.own[-1]) < 1e-9


#: Cases whose optimizer remembers gradients.
LATER = [name for name, (_, options, push, *_) in CASES.items() if push is not none and (push is not sgd or "momentum" in options)]


@pytest.mark.parametrize("name", LATER)
def test_blocks_pay_what_single_steps_would(name: str, monkeypatch) -> None:
    """Older uses are owed what steps pay, and get it once in a block; the control: before the last block is paid, some is due."""
    monkeypatch.setattr(keeper, "AT_ONCE", 2)
    monkeypatch.setattr(keeper, "BLOCK", 4)
    monkeypatch.setattr(Usual, "is_rough", lambda *_: False)  # such steps pay all at once
    accountant, brute = run(*CASES[name], audit_every=0)
    credit, truth = accountant._run.credit, torch.cat(brute.credit)
    assert credit.owed.steps > 0
    assert relative_error(so_far(accountant), truth) > 1e-5
    told = torch.cat([torch.from_numpy(s.credits["validation"]) for s in credit.so_far()])
    assert relative_error(told.double(), truth) < 1e-6  # single precision
    credit.pay_owed()
    assert relative_error(so_far(accountant), truth) < 1e-9


#: Whole credit only where it is asked for, and then with a word: (case, memory, what is said).
ON_REQUEST = [
    ("lion", "sketch", "signs"),
    ("lion", "exact", "signs"),
    ("rprop", "sketch", "sign"),
    ("rmsprop with momentum", "sketch", 'credit_memory="exact" can'),
]


@pytest.mark.parametrize(("name", "memory", "why"), ON_REQUEST)
def test_some_are_scored_step_by_step_unless_asked(name: str, memory: str, why: str, caplog) -> None:
    optimizer_class, options, *_ = CASES[name]

    def credit(asked: str) -> str:
        model = tiny()
        caplog.clear()
        optimizer = optimizer_class(model.parameters(), **options)
        with inrun.Accountant(model, optimizer, validation(), credit=asked, credit_memory=memory) as accountant:
            return accountant.credit

    assert credit("auto") == "step"
    assert "scored step by step" in caplog.text and why in caplog.text
    if memory == "sketch" and name.startswith("rmsprop"):
        with pytest.raises(OptimizerError, match=why):
            credit("whole")
    else:
        assert credit("whole") == "whole" and why in caplog.text


def test_rmsprop_with_momentum_has_whole_credit_with_exact_memory(caplog) -> None:
    model = tiny()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
    with inrun.Accountant(model, optimizer, validation(), credit_memory="exact") as accountant:
        assert accountant.credit == "whole"
    assert "step by step" not in caplog.text


@pytest.mark.parametrize("memory", ["exact", "sketch"])
@pytest.mark.parametrize("to_none", [True, False])
def test_two_groups_cycled_betas_and_a_tensor_frozen_in_between(to_none: bool, memory: str) -> None:
    """With zeros in its gradient the tensor moves on by momentum and decay while it is frozen, and that is paid."""
    more = {"credit_memory": memory} | ({"sketch": 10**6} if memory == "sketch" else {})
    accountant, brute = run(*CASES["adamw"], groups=True, to_none=to_none, **more)
    assert brute.off < 1e-9
    assert relative_error(so_far(accountant), torch.cat(brute.credit)) < 1e-9


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_networks_that_train_in_turn_remember_while_they_rest(memory: str) -> None:
    """At a step of the other network nothing of a use moves; its window must stay open, or its momentum is paid to others."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.05, momentum=0.9) for i in (0, 2)]
    x, held = torch.randn(8, 5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    parameters = list(model.parameters())
    value = lambda m: m(held).square().mean()  # noqa: E731
    options = {"credit": "whole", "credit_memory": memory, "quadrature": "gauss1", "sketch": 10**6, "audit_every": 1}
    with inrun.Accountant(model, optimizers, value, **options) as accountant:
        for t, rows in enumerate(x):
            turn, other = (0, 2) if t % 2 == 0 else (2, 0)
            model[turn].requires_grad_(True)
            model[other].requires_grad_(False)
            moving = list(model[turn].parameters())
            before = [p.detach().clone() for p in parameters]
            with accountant.paused():
                shares = sample_gradients(lambda j, rows=rows: model(rows[j : j + 1]).square().sum() / 10, 5, moving)
            with accountant.step(range(5)):
                model(rows).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            middle = copy.deepcopy(model).requires_grad_(True)
            with torch.no_grad():
                for p, old in zip(middle.parameters(), before, strict=True):
                    p.copy_((p + old) / 2)
            towards = gradients(value(middle), list(middle[turn].parameters()))
            truth = torch.stack([sum((0.05 * g * v).sum() for g, v in zip(share, towards, strict=True)) for share in shares])
            assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9
        assert len(accountant._run.credit.open) == len(x)

"""Conditions of training: loops that must score like the plain one, and models against one sample at a time."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from brute_force import Brute, lr_gain, sgd
from conditions import Net, loss_of, net, rows
from inrun import folds
from inrun.engine import Accountant, quadrature
from loops import (
    METHODS,
    Perceptron,
    attach,
    distance,
    losses,
    open_credits,
    perceptron,
    points,
    run_step,
    scores_by_id,
    train,
)
from packing import ONE_ROW, TWO_ROWS, both, gpt_logits, packed_gpt
from packing import loss_of as packed_loss
from reference import relative_error

EVERY = pytest.mark.parametrize("method", METHODS)
SOME = pytest.mark.parametrize("method", ["whole", "first"])

# Loops


@dataclass
class Loop:
    """One way to train the same model on the same batches."""

    #: What is done to the model before the accountant gets it.
    before: Callable[[Net], Any] = lambda model: None
    around: Callable[[], Any] = contextlib.nullcontext
    #: Sizes of the microbatches; None is one batch whose ids are given to the step.
    parts: Sequence[int] | None = None
    #: Forwards over the same rows before one backward, each with its part of the loss.
    forwards: int = 1
    scale: float | None = None
    dtype: torch.dtype = torch.float64
    optimizers: Callable[[Net], list[torch.optim.Optimizer]] = lambda model: [sgd_of(model.parameters())]
    #: How near the plain run the scores must be; in less precision weights part, and the first step tells.
    near: float = 1e-9
    batches: Sequence[tuple[int, int]] = ((4, 5),) * 3
    validation: Callable[[Any], Tensor] = lambda model: loss_of(model, rows(2, 99))
    options: dict[str, Any] = field(default_factory=dict)


def sgd_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def checkpointed(reentrant: bool, always: bool = True, **options: Any) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        model.reentrant, model.always, model.options = reentrant, always, options

    return change


def selective(*kept: str) -> Callable[[Net], None]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation.name() in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpointed(False, context_fn=lambda: create_selective_checkpoint_contexts(policy))


def halves(model: Net) -> list[torch.optim.Optimizer]:
    return [sgd_of(model.blocks.parameters()), sgd_of([model.words.weight, model.places.weight])]


def autocast(dtype: torch.dtype) -> dict[str, Any]:
    def validation(model: Any) -> Tensor:
        with torch.autocast("cpu", dtype):
            return loss_of(model, rows(2, 99))

    return {"around": lambda: torch.autocast("cpu", dtype), "validation": validation, "dtype": torch.float32, "near": 2e-2}


LOOPS = {
    "microbatches": Loop(parts=(2, 2)),
    "unequal microbatches": Loop(parts=(3, 1)),
    "an empty microbatch": Loop(parts=(2, 0, 2)),
    "two forwards, one backward": Loop(forwards=2),
    "checkpoints": Loop(before=checkpointed(False)),
    "reentrant checkpoints": Loop(before=checkpointed(True)),
    "reentrant checkpoints in training": Loop(before=checkpointed(True, always=False)),
    "reentrant checkpoints, microbatches": Loop(before=checkpointed(True), parts=(2, 2)),
    "selective checkpoints": Loop(before=selective("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")),
    "scaled loss": Loop(scale=2.0**10),
    "scaled loss, microbatches": Loop(scale=2.0**10, parts=(2, 2)),
    "two optimizers": Loop(optimizers=halves, near=1e-7),
    "autocast bfloat16": Loop(**autocast(torch.bfloat16)),
    "autocast bfloat16, checkpoints": Loop(**autocast(torch.bfloat16), before=checkpointed(False)),
    "autocast bfloat16, reentrant checkpoints": Loop(**autocast(torch.bfloat16), before=checkpointed(True)),
    "autocast float16, scaled": Loop(**autocast(torch.float16), scale=2.0**10),
    "bfloat16 weights": Loop(dtype=torch.bfloat16, near=3e-2),
}


@dataclass
class Played:
    contributions: list[Tensor]
    credits: Tensor
    weights: list[Tensor]


def play(loop: Loop, method: str | None) -> Played:
    """Train, with an accountant if there is a method."""
    model = net(loop.dtype)
    loop.before(model)
    optimizers = loop.optimizers(model)
    options = {"audit_every": 0, **METHODS.get(method or "", {}), **loop.options}
    accountant = Accountant(model, optimizers, loop.validation, **options) if method else None
    scaler = torch.amp.GradScaler("cpu", init_scale=loop.scale or 1.0, enabled=loop.scale is not None)
    found = []
    for number, (n, t) in enumerate(loop.batches):
        tokens, ids = rows(n, number, t), torch.arange(n)
        parts = [n] if loop.parts is None else list(loop.parts)
        with accountant.step(ids if loop.parts is None else None) if accountant else contextlib.nullcontext() as step:
            for part, own in zip(tokens.split(parts), ids.split(parts), strict=True):
                with step.microbatch(own) if step and loop.parts else contextlib.nullcontext():
                    with loop.around():
                        loss = sum(loss_of(model, part) / loop.forwards for _ in range(loop.forwards))
                    scaler.scale(loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
        if accountant:
            found.append(accountant.last.contributions["validation"].clone())
    credits = open_credits(accountant) if method in ("whole", "exact") else torch.zeros(0)
    return Played(found, credits, [p.detach().clone() for p in model.parameters()])


@functools.cache
def plain(method: str, batches: Any = Loop.batches) -> Played:
    return play(Loop(batches=batches), method)


@EVERY
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_scores_like_the_plain_one(name: str, method: str) -> None:
    if (name, method) == ("two optimizers", "whole"):
        pytest.skip("the signs of sketches follow the order of the optimizers' groups")
    loop, expected = LOOPS[name], plain(method)
    got = play(loop, method)
    compared = slice(None) if loop.near < 1e-3 else slice(1)
    assert distance(got.contributions[compared], expected.contributions[compared]) <= loop.near
    if loop.near < 1e-3:
        assert distance(got.credits, expected.credits) <= loop.near
    assert distance(got.contributions, [x.roll(1) for x in expected.contributions]) > 0.1  # the control
    assert distance(got.weights, play(loop, None).weights) < max(1e-9, 2 * loop.near)


@EVERY
def test_batches_of_other_sizes_and_lengths_may_come_at_any_time(method: str) -> None:
    """One row, no row, longer and shorter ones: each step is scored as in a run whose sizes never change before it."""
    batches = ((4, 5), (1, 3), (0, 4), (3, 8), (2, 2), (4, 5))
    got = play(Loop(batches=batches, options={"audit_every": None}), method)
    assert [len(x) for x in got.contributions] == [n for n, _ in batches]
    again = play(Loop(batches=batches, options={"audit_every": 1}), method)
    assert distance(got.contributions, again.contributions) == 0.0
    assert distance(got.weights, play(Loop(batches=batches), None).weights) < 1e-9


@EVERY
@pytest.mark.parametrize("after_backward", [False, True])
def test_a_batch_that_the_loop_drops_leaves_no_trace(method: str, after_backward: bool) -> None:
    found = []
    for dropping in (False, True):
        model = perceptron()
        accountant = attach(model, **METHODS[method])
        train(accountant, range(1))
        if dropping:
            with accountant.step(range(50, 54)) as step:
                loss = losses(model, points(4, 77)).mean()
                if after_backward:
                    loss.backward()
                    model.zero_grad()
                step.skip()
            assert accountant.last.skipped == "the loop dropped the batch"
        train(accountant, range(1, 3))
        assert accountant.steps_done == 3 + dropping
        found.append(scores_by_id(accountant))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert not any(50 <= i < 54 for i in found[1])


@EVERY
def test_a_step_that_the_scaler_skips_scores_nobody(method: str) -> None:
    """The weights stay, and the steps around it score as without it."""
    found = []
    for overflow in (False, True):
        model = perceptron(torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        accountant = attach(model, optimizer, **METHODS[method])
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
        for t in range(4):
            with accountant.step(range(4 * t, 4 * t + 4)) as step:
                bad = float("inf") if overflow and t == 1 else 1.0
                if t == 1 and not overflow:
                    step.skip()
                    continue
                scaler.scale(losses(model, points(4, t, dtype=torch.float32)).mean() * bad).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            if t == 1:
                assert "did not step" in accountant.last.skipped
        found.append(scores_by_id(accountant))
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    assert set(found[0]) == {*range(4), *range(8, 16)}


# Models


class LoRA(nn.Module):
    """A frozen linear layer beside a product of two small ones; the second begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Shared(nn.Module):
    """One layer three times, once on what a no_grad part made, and a head tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.inner(x).relu()
        x = self.norm(torch.tanh(self.inner(self.inner(x))) + self.inner(features).detach() + self.inner(features))
        return F.linear(x, self.inner.weight)


class InPlace(nn.Module):
    """Writes to activations, parameters into data, and data by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.shift = nn.Linear(4, 4), nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x) + 0.5, inplace=True)
        x = x * 1.0
        x *= self.scale
        x[:, 1] = self.shift[1]
        return x.add_(self.shift).tanh_() * 2.0


class Island(nn.Module):
    """A norm and a sum in single precision inside a model of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.gain = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3), nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        inside = F.layer_norm(x.float(), (6,), self.norm.weight.float(), self.norm.bias.float())
        return self.b((inside * self.gain.float()).to(x.dtype))


class Tokens(nn.Module):
    """A class token, a table of positions, attention with samples in the second dimension, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.token, self.places = nn.Linear(2, 4), nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(3, 4))
        self.attention, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.enter(x.view(len(x), 2, 2))
        x = (torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places).transpose(0, 1)
        return {"logits": self.head(self.attention(x, x, x)[0][0])}


class Unused(Perceptron):
    """A part that only training uses, one that only validation uses, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.train_only, self.valid_only, self.nobody = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (self.train_only if self.training else self.valid_only)(x)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.Tanh(), nn.Linear(8, 3))


def parametrized() -> nn.Module:
    first = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    return nn.Sequential(first, nn.Tanh(), torch.nn.utils.parametrizations.orthogonal(nn.Linear(6, 3)))


def peft_lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: nn.Module = get_peft_model(
        perceptron(), LoraConfig(r=2, target_modules=["a", "b"], use_dora=False, init_lora_weights=False)
    )
    return model


def frozen() -> nn.Module:
    model = perceptron()
    model.a.requires_grad_(False)
    return model


def recurrent() -> nn.Module:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(2, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x.view(len(x), 2, 2))[0][:, -1])

    return Recurrent()


#: By name: how the model is made, and how near the truth its scores must be.
MODELS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "perceptron": (perceptron, 1e-9),
    "LoRA": (LoRA, 1e-9),
    "peft": (peft_lora, 1e-9),
    "frozen": (frozen, 1e-9),
    "shared, tied, no_grad": (Shared, 1e-9),
    "in place": (InPlace, 1e-9),
    "float32 island in float64": (Island, 1e-6),
    "tokens, attention, samples second": (Tokens, 1e-9),
    "unused parts": (Unused, 1e-9),
    "dropout": (dropping, 1e-9),
    "parametrized": (parametrized, 1e-9),
    "recurrent": (recurrent, 1e-9),
}


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out["logits"] if isinstance(out, dict) else out


@pytest.mark.parametrize("n", [4, 1])
@pytest.mark.parametrize("method", ["exact", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_scored_as_one_sample_at_a_time(name: str, method: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))
    build, near = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    each = lambda x: losses(lambda z: logits_of(model, z), x)  # noqa: E731

    def validation(model: nn.Module) -> Tensor:
        return each(points(3, 99)).mean()

    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    accountant = Accountant(model, optimizer, validation, audit_every=1, **METHODS[method])
    brute = Brute(parameters, sgd, lr_gain, 0, points=1)
    own, first = [], []
    for t in range(3):
        x, state = points(n, t), torch.get_rng_state()
        graph = each(x) / n
        shares = [torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True) for loss in graph]
        g = [[torch.zeros_like(p) if s is None else s for p, s in zip(parameters, some, strict=True)] for some in shares]
        model.eval()
        slope = torch.autograd.grad(validation(model), parameters, allow_unused=True)
        model.train()
        first.append(
            torch.stack([sum(0.05 * (a * b).sum() for a, b in zip(some, slope, strict=True) if b is not None) for some in g])
        )
        before = [p.detach().clone() for p in parameters]
        torch.set_rng_state(state)
        own.append(run_step(accountant, lambda x=x: each(x).mean(), range(n)))
        model.eval()
        stepped = [p in optimizer.state for p in parameters]
        brute.step(g, before, lambda: validation(model), [(optimizer.state[p], optimizer.param_groups[0]) for p in parameters],
                   [(0.0, 0.0)] * len(parameters), stepped)  # fmt: skip
        model.train()
    if method == "exact":
        assert brute.off < near
        assert relative_error(open_credits(accountant)[:, 0], torch.cat(brute.credit)) < near
    else:
        assert distance(own, first) < near
        if n > 1:
            assert distance(own, [x.flip(0) for x in first]) > 1e-3  # the control


def batch_norm_truth(model: nn.Sequential, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the first layer by row, each row with a weight of its own, all in one batch norm."""
    rows_of = weight.expand(len(x), *weight.shape).clone().requires_grad_()
    hidden = torch.einsum("ni,noi->no", x, rows_of) + model[0].bias
    return torch.autograd.grad(model[1:](hidden).square().mean(), rows_of)[0].detach()


def test_batch_norm_in_training_scores_the_share_through_each_row() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = points(4, 0)
    validation = lambda m: m(points(3, 99)).square().mean()  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = Accountant(model, optimizer, validation, method="first", parameters=["0.weight"])
    twin = copy.deepcopy(model)
    (slope,) = torch.autograd.grad(validation(twin.eval()), [twin[0].weight])
    g = batch_norm_truth(twin.train(), x, twin[0].weight)
    got = run_step(accountant, lambda: model(x).square().mean(), range(4))
    truth = 0.1 * (g * slope).sum((1, 2))
    assert distance(got, truth) < 1e-9
    assert distance(got, truth.roll(1)) > 0.1  # the control


# Packed documents


@pytest.mark.parametrize("layout", [TWO_ROWS, ONE_ROW])
@SOME
def test_packed_documents_score_like_documents_in_rows(layout: Any, method: str) -> None:
    def scores(number: int) -> tuple[list[Tensor], dict[int, float]]:
        model = packed_gpt()
        packed = [both(layout, seed) for seed in range(3)]
        held = both(TWO_ROWS, 9)[1]
        validation = lambda m: packed_loss(gpt_logits(m, held), held.labels)  # noqa: E731
        accountant = attach(model, torch.optim.AdamW(model.parameters(), lr=0.01), validation, **METHODS[method])
        found = []
        for each in packed:
            batch, ids = each[number], each[0].ids if number == 0 else each[2]
            found.append(run_step(accountant, lambda b=batch: packed_loss(gpt_logits(model, b), b.labels), ids))
        return found, scores_by_id(accountant)

    (packed, by_id), (alone, by_id_alone) = scores(0), scores(1)
    assert distance(packed, alone) < 1e-9
    assert by_id == pytest.approx(by_id_alone, rel=1e-5)
    assert distance(packed, [x.flip(0) for x in alone]) > 0.1


def test_a_document_in_several_parts_is_used_once_per_part() -> None:
    model = packed_gpt()
    batch = both(((3, 5, 2),), 0)[0]
    validation = lambda m: packed_loss(gpt_logits(m, batch), batch.labels)  # noqa: E731
    accountant = attach(model, validation=validation, method="first")
    ids = torch.where(batch.ids == batch.ids[0, -1], batch.ids[0, 0], batch.ids)  # the last document has the first one's id
    got = run_step(accountant, lambda: packed_loss(gpt_logits(model, batch), batch.labels), ids)
    assert accountant.last.sample_ids.tolist() == [0, 3, 0]
    assert scores_by_id(accountant)[0] == pytest.approx(float(got[0] + got[2]), rel=1e-6)


# Ids


@pytest.mark.parametrize(
    "ids",
    [
        range(2),
        [5, 5],
        (1, -9),
        torch.tensor([2**62, -(2**63)]),
        np.array([3, 4], np.int32),
        torch.tensor([1, 2], dtype=torch.uint8),
    ],
    ids=str,
)
def test_ids_may_be_any_integers(ids: Any) -> None:
    accountant = attach(perceptron(), method="first")
    got = run_step(accountant, lambda: losses(accountant.model, points(2, 0)).mean(), ids)
    assert accountant.last.sample_ids.tolist() == [int(i) for i in ids]
    found = scores_by_id(accountant)
    assert found.keys() == {int(i) for i in ids}
    assert sum(found.values()) == pytest.approx(float(got.sum()), rel=1e-6)  # repeated ids add up


def test_permuting_the_rows_permutes_the_scores() -> None:
    order = torch.tensor([2, 0, 3, 1])
    found = []
    for rows_ in (torch.arange(4), order):
        accountant = attach(perceptron(), sketch="exact")
        for t in range(3):
            run_step(accountant, lambda t=t, r=rows_, m=accountant.model: losses(m, points(4, t)[r]).mean(), rows_)
        found.append(scores_by_id(accountant))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


# Validation


def test_a_vector_of_losses_gives_a_column_per_point() -> None:
    model = perceptron()
    vector = lambda m: losses(m, points(3, 5))  # noqa: E731
    accountant = attach(model, validation={"points": vector, "mean": lambda m: vector(m).mean()}, method="first")
    train(accountant, range(2))
    found = accountant.last.contributions
    assert found["points"].shape == (4, 3)
    assert relative_error(found["points"].mean(1), found["mean"]) < 1e-9
    assert distance(found["points"][:, 0], found["points"][:, 1]) > 1e-3


@pytest.mark.parametrize("method", ["whole", "exact", "first"])
def test_folds_give_the_score_of_the_whole_set_and_its_standard_error(method: str) -> None:
    model = perceptron()
    vector = lambda m: losses(m, points(8, 5))  # noqa: E731
    options = {"folds": folds(vector, 4), "whole": lambda m: vector(m).mean(), "points": vector}
    accountant = attach(model, validation=options, **METHODS[method])
    train(accountant, range(2))
    found = accountant.last
    near = 1e-9 if method != "whole" else 0.2
    assert relative_error(found.contributions["folds"], found.contributions["whole"]) < near
    parts = found.contributions["points"].view(4, 2, 4).mean(1)  # point j belongs to fold j mod k
    assert relative_error(found.standard_errors["folds"], parts.std(1) / 2) < near


def test_a_validation_callable_may_take_the_step_and_draw_new_points() -> None:
    seen = []

    def drawn(model: nn.Module, step: int) -> Tensor:
        seen.append(step)
        return losses(model, points(2, 1000 + step)).mean()

    accountant = attach(perceptron(), validation=drawn, method="first")
    got = train(accountant, range(3))
    assert sorted(set(seen)) == [0, 1, 2]
    other = attach(perceptron(), validation=lambda m: losses(m, points(2, 1000)).mean(), method="first")
    expected = train(other, range(3))
    assert distance(got[:1], expected[:1]) == 0.0
    assert distance(got[1:], expected[1:]) > 1e-2

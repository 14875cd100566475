"""Ways to train one step, with and without scores. Each is a function that trains one step when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor, nn

from inrun.bench.conditions import NONE, Condition, conditions
from inrun.bench.shape import Shape
from inrun.engine import Accountant
from inrun.old.layers.layout import scratch_bytes
from inrun.old.methods import CREDITS, METHODS
from inrun.training.loss import next_token_loss


@dataclass(frozen=True)
class Entry:
    """A contestant of the table."""

    name: str
    #: Makes a fresh model and returns the step function and a function that tells the bytes held between steps.
    make: Callable[[Shape], tuple[Callable[[int], None], Callable[[], int]]]
    slow: bool = False
    #: The contestant whose throughput its own is relative to.
    against: str = "plain"
    #: Steps before the first that is timed.
    warm_up: int = 2


#: Steps until training with an accountant is in a steady state: checks of rows come at steps 0, 1, 2, 4, 8 and 16 (later ones are
#: rare), and whole credit's window is 44 steps at β₁ = 0.9.
SCORED, WHOLE = 17, 48


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights and optimizer state; all else, directions too, is made anew in every step."""
    tensors: list[Tensor] = [*model.parameters()]
    tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def _update(shape: Shape, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if shape.clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), shape.clip)
    optimizer.step()
    optimizer.zero_grad()


def plain(
    rows: Callable[[Shape], int], under: Condition = NONE
) -> Callable[[Shape], tuple[Callable[[int], None], Callable[[], int]]]:
    """Train without scores on ``rows(shape)`` rows, under a condition."""

    def make(shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
        model = shape.build()
        called = under.prepare(model)
        optimizer = shape.make_optimizer(model)

        def step(number: int) -> None:
            with under.around(shape):
                loss = next_token_loss(called, shape.rows(rows(shape), number))
            loss.backward()
            _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer)

    return make


def scored(
    method: str | None, update: str | None, form: str, credit: str = "step", under: Condition = NONE
) -> Callable[[Shape], tuple[Callable[[int], None], Callable[[], int]]]:
    """Train with an accountant, under a condition."""

    def make(shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
        model = shape.build()
        called = under.prepare(model)
        optimizer = shape.make_optimizer(model)
        validation = shape.rows(shape.validation_rows, -1)

        def held_out(m: nn.Module) -> Tensor:
            with under.around(shape):
                return next_token_loss(m, validation)

        accountant = Accountant(called, optimizer, held_out, method=method, update=update, form=form, credit=credit)

        def step(number: int) -> None:
            rows = shape.rows(shape.batch, number)
            with accountant.step(range(number * shape.batch, (number + 1) * shape.batch)):
                with under.around(shape):
                    loss = next_token_loss(called, rows)
                loss.backward()
                _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer) + scratch_bytes() + accountant.held_bytes()

    return make


def merged(update: str, form: str = "auto") -> Callable[[Shape], tuple[Callable[[int], None], Callable[[], int]]]:
    """Train with an accountant whose steps have the validation rows in their batch."""

    def make(shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
        model = shape.build()
        optimizer = shape.make_optimizer(model)
        validation = shape.rows(shape.validation_rows, -1)
        accountant = Accountant(model, optimizer, update=update, form=form)

        def step(number: int) -> None:
            rows, n = torch.cat([shape.rows(shape.batch, number), validation]), shape.batch
            with accountant.step(range(number * n, (number + 1) * n), merged=shape.validation_rows) as step:
                # One loss per position, then two means: logits that are taken apart are put together again in the backward. And
                # no name for them, which would hold them until then.
                losses = _losses_of(model(rows[:, :-1]), rows)
                step.merge(losses[:n].mean(), losses[n:].mean()).backward()
                _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer) + scratch_bytes() + accountant.held_bytes()

    return make


def _losses_of(out: Any, rows: Tensor) -> Tensor:
    """Return the losses of all positions, ``[n, t]``."""
    logits = getattr(out, "logits", out)
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return each.view(len(rows), -1)


def one_at_a_time(shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
    """One backward per sample, SGD scores by dot products with the validation gradient."""
    model = shape.build()
    optimizer = shape.make_optimizer(model)
    validation = shape.rows(shape.validation_rows, -1)
    parameters = list(model.parameters())

    def step(number: int) -> None:
        rows = shape.rows(shape.batch, number)
        directions = torch.autograd.grad(next_token_loss(model, validation), parameters)
        scores = []
        for row in rows.split(1):
            grads = torch.autograd.grad(next_token_loss(model, row) / len(rows), parameters)
            scores.append(torch.stack([(g * v).sum() for g, v in zip(grads, directions, strict=True)]).sum())
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
        torch.stack(scores)
        _update(shape, model, optimizer)

    return step, lambda: held_bytes(model, optimizer)


def vmapped(shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
    """Per-sample gradients by torch.func, SGD scores by dot products with the validation gradient."""
    model = shape.build()
    optimizer = shape.make_optimizer(model)
    validation = shape.rows(shape.validation_rows, -1)
    names = dict(model.named_parameters())
    parameters = list(names.values())

    def sample_loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return next_token_loss(_Functional(model, values), row.unsqueeze(0))  # type: ignore[arg-type]

    per_sample = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0))

    def step(number: int) -> None:
        rows = shape.rows(shape.batch, number)
        directions = torch.autograd.grad(next_token_loss(model, validation), parameters)
        # The fused attention kernels have no batching rule; without this vmap would loop over samples.
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            grads = per_sample({n: p.detach() for n, p in names.items()}, rows)
        scores = torch.zeros(len(rows), device=rows.device)
        for (name, p), v in zip(names.items(), directions, strict=True):
            g = grads[name]
            scores += g.flatten(1) @ v.flatten()
            p.grad = g.mean(0)
        _update(shape, model, optimizer)

    return step, lambda: held_bytes(model, optimizer)


class _Functional:
    """A model with other parameter values, callable like the model."""

    def __init__(self, model: nn.Module, values: dict[str, Tensor]) -> None:
        self.model, self.values = model, values

    def __call__(self, rows: Tensor) -> object:
        return torch.func.functional_call(self.model, self.values, (rows,))


def entries(shape: Shape) -> list[Entry]:
    """Return the contestants for a shape, the two yardsticks first."""
    return [
        Entry("plain", plain(lambda s: s.batch)),
        Entry("limit", plain(lambda s: s.batch + s.validation_rows)),
        *_ours(shape),
        *_merged(shape),
        *(
            Entry(f"{credit} credit", scored(None, None, "auto", credit), warm_up=WHOLE)
            for credit in CREDITS
            if credit not in ("auto", "step")
        ),
        Entry("one at a time", one_at_a_time, slow=True),
        Entry("torch.func vmap", vmapped, slow=True),
    ]


def under_conditions(shape: Shape, backend: str = "inductor") -> list[Entry]:
    """Return the two yardsticks, first order, and both plain and scored training under every condition, one against the other."""
    update = "sgd" if shape.optimizer == "sgd" else "frozen"
    lines = [*entries(shape)[:2], Entry(f"first+{update}", scored("first", update, "auto"), warm_up=SCORED)]
    for under in conditions(backend):
        yardstick = f"{under.name}: plain"
        first, whole = scored("first", update, "auto", under=under), scored(None, None, "auto", "whole", under)
        lines += [
            Entry(yardstick, plain(lambda s: s.batch, under)),
            Entry(f"{under.name}: first+{update}", first, against=yardstick, warm_up=SCORED),
            Entry(f"{under.name}: whole credit", whole, against=yardstick, warm_up=WHOLE),
        ]
    return lines


def _merged(shape: Shape) -> list[Entry]:
    """Return the lines of the merged pass; gram is for one gain per tensor."""
    chosen = {"first+sgd merged": merged("sgd"), "first+sgd merged gram": merged("sgd", "gram")}
    if shape.optimizer != "sgd":
        chosen["first+frozen merged"] = merged("frozen")
    return [Entry(name, make, warm_up=SCORED) for name, make in chosen.items()]


def _ours(shape: Shape) -> list[Entry]:
    """Return one line per registered method, update and form; with plain SGD the update is "sgd" and no other."""
    sgd = shape.optimizer == "sgd"
    real = "sgd" if sgd else "secant"
    return [
        Entry(f"{method.name}+{update}{'' if form == 'auto' else f' {form}'}", scored(method.name, update, form), warm_up=SCORED)
        for method in METHODS.values()
        for update in (real if update == "real" else update for update in method.benchmarked_with)
        if update == "sgd" or not sgd
        for form in method.benchmarked_forms
    ]

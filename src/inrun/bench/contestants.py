"""Ways to train one step, with and without scores. Each is a function that trains one step when called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.attention
from torch import Tensor, nn

from inrun.bench.conditions import NONE, Condition, conditions
from inrun.bench.shape import Shape
from inrun.engine import Accountant
from inrun.methods import METHODS
from inrun.paper import GhostScorer
from inrun.training.gpt import GPT
from inrun.training.loss import next_token_loss, row_losses

#: Trains one step, given its number; tells the bytes held between steps.
Running = tuple[Callable[[int], None], Callable[[], int]]
#: Makes a fresh model and returns its :data:`Running`.
Make = Callable[[Shape], Running]


@dataclass(frozen=True)
class Entry:
    """A contestant of the table."""

    name: str
    make: Make
    slow: bool = False
    #: The contestant whose throughput its own is relative to.
    against: str = "plain"
    #: Steps before the first that is timed.
    warm_up: int = 2


#: Steps until training with an accountant is in a steady state: most audits are early, and whole credit's window is 44 steps at
#: β₁ = 0.9.
WARM_UP = 48


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


def plain(under: Condition = NONE, validation_gradient: bool = False) -> Make:
    """Train without scores, under a condition.

    Args:
        under: The condition.
        validation_gradient: Take the gradient of the validation loss at every step, too, and do nothing with it.
    """

    def make(shape: Shape) -> Running:
        model = shape.build()
        called = under.prepare(model)
        optimizer = shape.make_optimizer(model)
        parameters, validation = list(model.parameters()), shape.rows(shape.validation_rows, -1)

        def step(number: int) -> None:
            if validation_gradient:
                with under.around(shape):
                    held_out = next_token_loss(called, validation)
                torch.autograd.grad(held_out, parameters)
            with under.around(shape):
                loss = next_token_loss(called, shape.rows(shape.batch, number))
            loss.backward()
            _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer)

    return make


def scored(method: str, under: Condition = NONE) -> Make:
    """Train with an accountant, under a condition."""

    def make(shape: Shape) -> Running:
        model = shape.build()
        called = under.prepare(model)
        optimizer = shape.make_optimizer(model)
        validation = shape.rows(shape.validation_rows, -1)

        def held_out(m: nn.Module) -> Tensor:
            with under.around(shape):
                return next_token_loss(m, validation)

        accountant = Accountant(called, optimizer, held_out, method=method)

        def step(number: int) -> None:
            rows = shape.rows(shape.batch, number)
            with accountant.step(range(number * shape.batch, (number + 1) * shape.batch)):
                with under.around(shape):
                    loss = next_token_loss(called, rows)
                loss.backward()
                _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer) + accountant.held_bytes()

    return make


class RowGPT(GPT):
    """Our GPT with positions looked up for every row, as the paper's algorithms need: batches come first everywhere."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def paper(order: int) -> Make:
    """Train our GPT with the paper's own algorithms: training and validation rows in one batch."""

    def make(shape: Shape) -> Running:
        model = shape.build()
        model.__class__ = RowGPT
        optimizer = shape.make_optimizer(model)
        validation = shape.rows(shape.validation_rows, -1)
        scorer = GhostScorer(model, optimizer, order=order)

        def step(number: int) -> None:
            n = shape.batch
            rows = torch.cat([shape.rows(n, number), validation])
            with scorer.step(range(number * n, (number + 1) * n), validation_rows=shape.validation_rows):
                losses = row_losses(model, rows)
                scorer.loss(losses[:n].mean(), losses[n:].mean()).backward()
                _update(shape, model, optimizer)

        return step, lambda: held_bytes(model, optimizer)

    return make


def one_at_a_time(shape: Shape) -> Running:
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


def vmapped(shape: Shape) -> Running:
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


def yardsticks() -> list[Entry]:
    """Return plain training and the floor: plain training that also takes the gradient of the validation rows at every step."""
    return [Entry("plain", plain()), Entry("floor", plain(validation_gradient=True))]


def entries(shape: Shape) -> list[Entry]:
    """Return the contestants for a shape, the two yardsticks first."""
    papers = [Entry("paper first", paper(1)), Entry("paper second", paper(2))] if shape.model == "gpt" else []
    return [
        *yardsticks(),
        *(Entry(method, scored(method), warm_up=WARM_UP) for method in METHODS),
        *papers,
        Entry("one at a time", one_at_a_time, slow=True),
        Entry("torch.func vmap", vmapped, slow=True),
    ]


def under_conditions(shape: Shape, backend: str = "inductor") -> list[Entry]:
    """Return the two yardsticks, "first", and both plain and scored training under every condition, one against the other."""
    lines = [*yardsticks(), Entry("first", scored("first"), warm_up=WARM_UP)]
    for under in conditions(backend):
        yardstick = f"{under.name}: plain"
        lines.append(Entry(yardstick, plain(under)))
        lines += [
            Entry(f"{under.name}: {method}", scored(method, under), against=yardstick, warm_up=WARM_UP)
            for method in ("first", "whole")
        ]
    return lines

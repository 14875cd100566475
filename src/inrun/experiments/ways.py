"""Ways to score one training step, each around the same model, batch and update: what the efficiency experiment times.

Scores are in the unit of the loss and positive where a sample lowered it. With η the learning rate, c the clip factor, g_n a
sample's part of the batch gradient G, and ∇ℓ and H of the validation loss, the paper's two are

    first   c_n = ηc ⟨g_n, ∇ℓ⟩              second   c_n = ηc ⟨g_n, ∇ℓ⟩ − ½(ηc)² g_nᵀ H G
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from inrun.bench.contestants import held_bytes
from inrun.experiments.ghost_hessian import (
    ACTIVATIONS,
    Passes,
    ghost_dot_products,
    ghost_hessian_products,
    run_passes,
    weight_gradients,
)
from inrun.engine import Accountant

Batch = tuple[Tensor, Tensor]
#: What scores are by definition in the game of plain SGD.
ORDER_1, ORDER_2, MIDDLE = "first order", "second order", "gradient in the middle of the move"


@dataclass(frozen=True)
class Task:
    """What is trained, as functions that give the same to every way."""

    build: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    #: (rows, number) -> inputs and targets of a step; number −1 is for validation.
    draw: Callable[[int, int], Batch]
    batch: int
    validation_rows: int
    clip: float | None = None
    #: φ of a multilayer perceptron without biases, for the ways that are only known for one.
    activation: str | None = None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy over all targets."""
        return loss_of(model(batch[0]), batch[1])

    def validation(self) -> Batch:
        """Return the validation rows."""
        return self.draw(self.validation_rows, -1)


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of ``[..., classes]``."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass
class Running:
    """A way at work on a model of its own."""

    task: Task
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)
    #: Of the last step, ``[n]``.
    scores: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Make the model and its optimizer."""
        self.model = self.task.build()
        self.optimizer = self.task.make_optimizer(self.model)
        self.parameters = list(self.model.parameters())

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        raise NotImplementedError

    def held(self) -> int:
        """Return the bytes held between steps."""
        return held_bytes(self.model, self.optimizer)

    def update(self) -> float:
        """Clip, step and clear the gradients; return ηc."""
        factor, clip = float(self.optimizer.param_groups[0]["lr"]), self.task.clip
        if clip is not None:
            factor *= min(1.0, clip / (float(torch.nn.utils.clip_grad_norm_(self.parameters, clip)) + 1e-6))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return factor


@dataclass
class Plain(Running):
    """Training without scores, on the batch and so many rows more."""

    more: int = 0

    def step(self, number: int) -> None:
        """Train one step."""
        self.task.loss(self.model, self.task.draw(self.task.batch + self.more, number)).backward()
        self.update()


@dataclass
class Scored(Running):
    """Training with an accountant that takes the validation gradient apart."""

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Attach the accountant."""
        super().__post_init__()
        rows = self.task.validation()
        self.accountant = Accountant(self.model, self.optimizer, lambda m: self.task.loss(m, rows), **self.options)
        self.accountant.hush()

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        n = self.task.batch
        with self.accountant.step(range(number * n, (number + 1) * n)):
            self.task.loss(self.model, self.task.draw(n, number)).backward()
            self.update()
        self.scores = self.accountant.last.contributions["validation"]

    def held(self) -> int:
        """Return the bytes held between steps, the accountant's among them."""
        return super().held() + self.accountant.held_bytes()


@dataclass
class Merged(Running):
    """The paper's one backpropagation: validation rows ride in the batch; in gram form its ghost dot product."""

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Attach the accountant."""
        super().__post_init__()
        self.rows = self.task.validation()
        self.accountant = Accountant(self.model, self.optimizer, update="sgd", **self.options)
        self.accountant.hush()

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        n, m = self.task.batch, self.task.validation_rows
        inputs, targets = (torch.cat(pair) for pair in zip(self.task.draw(n, number), self.rows, strict=True))
        with self.accountant.step(range(number * n, (number + 1) * n), merged=m) as step:
            ours, theirs = self.model(inputs).split([n, m])
            step.merge(loss_of(ours, targets[:n]), loss_of(theirs, targets[n:])).backward()
            self.update()
        self.scores = next(iter(self.accountant.last.contributions.values()))

    def held(self) -> int:
        """Return the bytes held between steps, the accountant's among them."""
        return super().held() + self.accountant.held_bytes()


@dataclass
class DirectFirst(Running):
    """One backward per sample, and one dot product with the validation gradient."""

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        batch, rows = self.task.draw(self.task.batch, number), self.task.validation()
        direction = torch.autograd.grad(self.task.loss(self.model, rows), self.parameters)
        found = []
        for k in range(self.task.batch):
            gradient = self.gradient_of(batch, k)
            found.append(inner(gradient, direction))
            for p, g in zip(self.parameters, gradient, strict=True):
                p.grad = g if p.grad is None else p.grad.add_(g)
        self.scores = torch.stack(found)
        self.scores *= self.update()

    def gradient_of(self, batch: Batch, k: int) -> tuple[Tensor, ...]:
        """Return sample k's part of the batch gradient, alone."""
        row = batch[0][k : k + 1], batch[1][k : k + 1]
        return torch.autograd.grad(self.task.loss(self.model, row) / self.task.batch, self.parameters)


@dataclass
class DirectSecond(DirectFirst):
    """The paper's naive way: for every sample its gradient, and the Hessian of the validation loss times it."""

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        batch, rows = self.task.draw(self.task.batch, number), self.task.validation()
        self.task.loss(self.model, batch).backward()
        total = [p.grad.clone() for p in self.parameters if p.grad is not None]
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no double backward
            direction = torch.autograd.grad(self.task.loss(self.model, rows), self.parameters, create_graph=True)
        ones, twos = [], []
        for k in range(self.task.batch):
            gradient = self.gradient_of(batch, k)
            along = inner(gradient, direction)
            product = torch.autograd.grad(along, self.parameters, retain_graph=True)
            ones.append(along.detach())
            twos.append(inner(product, total))
        del direction, along  # the graph must not hold on to weights that are about to change
        factor = self.update()
        self.scores = factor * torch.stack(ones) - 0.5 * factor**2 * torch.stack(twos)


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return ⟨a, b⟩ over all parameters."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


@dataclass
class ByHand(Running):
    """A perceptron whose passes are written out, without autograd: order 0 trains, 1 and 2 score by the paper's ghost products."""

    order: int = 0

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        task, act = self.task, ACTIVATIONS[self.task.activation or ""]
        n, m = task.batch, task.validation_rows if self.order else 0
        matrices = [p.detach() for p in self.parameters]
        inputs, targets = task.draw(n, number)
        weights = inputs.new_full((n + m,), 1 / n)
        if m:
            rows = task.validation()
            inputs, targets = torch.cat([inputs, rows[0]]), torch.cat([targets, rows[1]])
            weights[n:] = 1 / m
        passes = run_passes(matrices, act, inputs, targets, weights)
        samples, held_out = passes.rows(slice(0, n)), passes.rows(slice(n, None))
        for p, g in zip(self.parameters, weight_gradients(samples), strict=True):
            p.grad = g
        one, two = self._products(matrices, samples, held_out)
        factor = self.update()
        self.scores = factor * one - 0.5 * factor**2 * two

    def _products(self, matrices: list[Tensor], samples: Passes, held_out: Passes) -> tuple[Tensor, Tensor]:
        """Return ⟨g_n, ∇ℓ⟩ and g_nᵀHG, ``[n]`` each, before the weights move; zeros beyond the order."""
        nothing = samples.weights.new_zeros(len(samples.weights))
        one = ghost_dot_products(samples, held_out) if self.order else nothing
        act = ACTIVATIONS[self.task.activation or ""]
        return one, ghost_hessian_products(matrices, act, samples, held_out) if self.order == 2 else nothing


def by_autograd(task: Task, number: int) -> dict[str, Tensor]:
    """Return the scores of the first step of plain SGD by their definitions: both orders, and η⟨g_n, ∇ℓ(w − ½ηG)⟩ in the middle."""
    at = DirectFirst(task)
    batch, rows, lr = task.draw(task.batch, number), task.validation(), float(at.optimizer.param_groups[0]["lr"])
    gradients = [at.gradient_of(batch, k) for k in range(task.batch)]
    total = [torch.stack(parts).sum(0) for parts in zip(*gradients, strict=True)]
    with sdpa_kernel(SDPBackend.MATH):
        direction = torch.autograd.grad(task.loss(at.model, rows), at.parameters, create_graph=True)
    product = torch.autograd.grad(inner(direction, total), at.parameters)
    with torch.no_grad():
        for p, g in zip(at.parameters, total, strict=True):
            p.sub_(0.5 * lr * g)
    middle = torch.autograd.grad(task.loss(at.model, rows), at.parameters)
    one, two, half = (torch.stack([inner(g, v).detach() for g in gradients]) for v in (direction, product, middle))
    return {ORDER_1: lr * one, ORDER_2: lr * one - 0.5 * lr**2 * two, MIDDLE: lr * half}

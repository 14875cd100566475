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

from inrun.bench.contestants import RowGPT, held_bytes
from inrun.engine import Accountant
from inrun.paper import GhostScorer
from inrun.training.gpt import GPT

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

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy over all targets."""
        return self.losses(model, batch).mean()

    def losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy over the targets of every row, ``[n]``."""
        outputs, targets = model(batch[0]), batch[1]
        found = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
        return found.view(len(targets), -1).mean(1)

    def validation(self) -> Batch:
        """Return the validation rows."""
        return self.draw(self.validation_rows, -1)


@dataclass
class Running:
    """A way at work on a model of its own."""

    task: Task
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        """Make the model and its optimizer."""
        self.model = self.task.build()
        self.optimizer = self.task.make_optimizer(self.model)
        self.parameters = list(self.model.parameters())

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        raise NotImplementedError

    @property
    def scores(self) -> Tensor:
        """Return the scores of the last step, ``[n]``."""
        raise NotImplementedError(f"{type(self).__name__} does not score")

    def held(self) -> int:
        """Return the bytes held between steps."""
        return held_bytes(self.model, self.optimizer)

    def update(self) -> None:
        """Clip, step and clear the gradients."""
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.task.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Plain(Running):
    """Training without scores; with ``validation_gradient`` it is the floor."""

    validation_gradient: bool = False

    def step(self, number: int) -> None:
        """Train one step."""
        if self.validation_gradient:
            torch.autograd.grad(self.task.loss(self.model, self.task.validation()), self.parameters)
        self.task.loss(self.model, self.task.draw(self.task.batch, number)).backward()
        self.update()


@dataclass
class Scored(Running):
    """Training with an accountant."""

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Attach the accountant."""
        super().__post_init__()
        rows = self.task.validation()
        self.accountant = Accountant(self.model, self.optimizer, lambda m: self.task.loss(m, rows), **self.options)

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        n = self.task.batch
        with self.accountant.step(range(number * n, (number + 1) * n)):
            self.task.loss(self.model, self.task.draw(n, number)).backward()
            self.update()

    @property
    def scores(self) -> Tensor:
        """Return the scores of the last step, ``[n]``."""
        return self.accountant.last.contributions["validation"]

    def held(self) -> int:
        """Return the bytes held between steps, the accountant's among them."""
        return super().held() + self.accountant.held_bytes()


@dataclass
class Paper(Running):
    """The paper's own algorithms: validation rows ride in the batch."""

    order: int = 1
    form: str = "auto"

    def __post_init__(self) -> None:
        """Attach the scorer."""
        super().__post_init__()
        if isinstance(self.model, GPT):
            self.model.__class__ = RowGPT
        self.rows = self.task.validation()
        self.scorer = GhostScorer(self.model, self.optimizer, order=self.order, form=self.form)

    def step(self, number: int) -> None:
        """Train one step, and score it."""
        n, m = self.task.batch, self.task.validation_rows
        inputs, targets = (torch.cat(pair) for pair in zip(self.task.draw(n, number), self.rows, strict=True))
        with self.scorer.step(range(number * n, (number + 1) * n), validation_rows=m):
            losses = self.task.losses(self.model, (inputs, targets))
            self.scorer.loss(losses[:n] / n, losses[n:].mean()).backward()
            self.update()

    @property
    def scores(self) -> Tensor:
        """Return the scores of the last step, ``[n]``."""
        return self.scorer.last.contributions


def inner(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """Return ⟨a, b⟩ over all parameters."""
    return torch.stack([(x * y).sum() for x, y in zip(a, b, strict=True)]).sum()


def by_autograd(task: Task, number: int) -> dict[str, Tensor]:
    """Return the scores of the first step of plain SGD by their definitions: both orders, and η⟨g_n, ∇ℓ(w − ½ηG)⟩ in the middle."""
    at = Plain(task)
    batch, rows, lr = task.draw(task.batch, number), task.validation(), float(at.optimizer.param_groups[0]["lr"])
    shares = task.losses(at.model, batch) / task.batch
    gradients = [torch.autograd.grad(share, at.parameters, retain_graph=True) for share in shares.unbind()]
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

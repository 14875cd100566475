"""One small model and one training loop, run under one condition after another: each must agree with the plain run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import inrun

WORDS, WIDTH = 13, 6

#: Every method of the step game, and both memories of whole credit.
GAMES: dict[str, dict[str, Any]] = {
    "whole, sketch": {"credit": "whole"},
    "whole, exact": {"credit": "whole", "credit_memory": "exact"},
    **{method: {"credit": "step", "method": method} for method in ("first", "lookahead", "midpoint", "second")},
}


class Block(nn.Module):
    """A norm, two linear layers and an in-place activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x)) + 0.1))


class Net(nn.Module):
    """A table that is also the head, positions without a batch, blocks; checkpointed as told."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        #: None, or ``use_reentrant`` of every block's checkpoint; whether in eval mode too.
        self.reentrant: bool | None = None
        self.always = True
        #: More options of every block's checkpoint.
        self.options: dict[str, Any] = {}

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            if self.reentrant is None or not (self.training or self.always):
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant, **self.options)
        return self.head(x)


def net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def rows(n: int, seed: int, t: int = 5) -> Tensor:
    return torch.randint(0, WORDS, (n, t + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float() if tokens.numel() and next(model.parameters()).dtype == torch.bfloat16 else None
    logits = model(tokens[:, :-1]) if logits is None else logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 4


def validation(model: Any) -> Tensor:
    return loss_of(model, rows(2, 99))


@dataclass
class Loop:
    """How one training run is made; the defaults are the plain one."""

    game: dict[str, Any]
    dtype: torch.dtype = torch.float64
    #: Rows and positions of the batches.
    batches: tuple[tuple[int, int], ...] = ((4, 5),) * 3
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=0.01)
    #: What is done to the model before the accountant gets it, and after; each returns what is given, or called.
    before: Callable[[Any], Any] = lambda model: model
    after: Callable[[Any], Any] = lambda model: model
    around: Callable[[], Any] = contextlib.nullcontext
    validation: Callable[[Any], Tensor] = validation
    #: Microbatches per step.
    accumulate: int = 1
    #: A scaler of the loss, made for every run.
    scaler: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    contributions: list[Tensor]
    ids: list[list[int]]
    weights: list[Tensor]
    #: What ``watch`` said after every step.
    watched: list[int]


def train(loop: Loop, scored: bool = True, watch: Callable[[], int] = lambda: 0) -> Outcome:
    """Run the loop, scored or not."""
    model = net(loop.dtype)
    given = loop.before(model)
    optimizer = loop.optimizer(model.parameters())
    options = {"audit_every": 0, **loop.game, **loop.options}
    accountant = inrun.Accountant(given, optimizer, loop.validation, **options) if scored else None
    called = loop.after(given)
    found = Outcome([], [], [], [])
    scaler = loop.scaler() if loop.scaler else None
    for number, (n, t) in enumerate(loop.batches):
        batch, ids = rows(n, number, t), list(range(100 * number, 100 * number + n))
        numbers = torch.tensor(ids, dtype=torch.int64)
        parts = list(zip(batch.tensor_split(loop.accumulate), numbers.tensor_split(loop.accumulate), strict=True))
        with accountant.step() if accountant else contextlib.nullcontext() as step:
            for tokens, own in parts:
                with step.microbatch(own) if step is not None else contextlib.nullcontext():
                    with loop.around():
                        loss = loss_of(called, tokens)
                    (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        found.watched.append(watch())
        if accountant:
            found.contributions.append(accountant.last.contributions["validation"].clone())
            found.ids.append(accountant.last.sample_ids.tolist())
    if accountant:
        accountant.close()
        assert loss_of(called, rows(3, 7)).isfinite()  # what was compiled or wrapped runs on without us
    found.weights = [p.detach().clone() for p in model.parameters()]
    return found


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference of a step, relative to the norm of its batch."""
    off = [float((x.double() - y.double()).norm() / x.double().norm().clamp_min(1e-300)) for x, y in zip(a, b, strict=True)]
    return max(off)

"""What single precision does to Adam's first steps: contributions beside those that plain autograd makes of the same gradient.

Each run returns, step by step, its contributions and what they are by their definition for the gradient that its optimizer was
about to use, with samples' and validation gradients taken in double precision at the run's own weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from jobs import SINGLE, sharded
from plays import Play, full, loss_of, rows_of, sample_losses, validation_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import inrun

LR, BETAS, EPS, CLIP = 1e-2, (0.9, 0.999), 1e-8, 0.5
PLAY = Play("secant, float32", model=SINGLE, steps=4)


def factor(gradient: Tensor, state: dict[str, Any]) -> Tensor:
    """(u(G) − u(0)) / G of AdamW, as the update is written, in double precision; 0 where G is."""
    t = float(state.get("step", 0.0)) + 1.0
    zeros = torch.zeros_like(gradient)
    m, s = (state.get(name, zeros).double() for name in ("exp_avg", "exp_avg_sq"))

    def u(z: Tensor) -> Tensor:
        first = (BETAS[0] * m + (1.0 - BETAS[0]) * z) / (1.0 - BETAS[0] ** t)
        second = (BETAS[1] * s + (1.0 - BETAS[1]) * z * z) / (1.0 - BETAS[1] ** t)
        return LR * first / (second.sqrt() + EPS)

    return torch.where(gradient == 0, zeros, (u(gradient) - u(zeros)) / torch.where(gradient == 0, 1.0, gradient))


def reference(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float, rows: Tensor) -> Tensor:
    """c_n = Σ P(G) ∘ clip·g_n ∘ ∇ℓ for the gradient that is in ``.grad`` now, ``[n]``."""
    double = PLAY.model().double()
    double.load_state_dict({name: full(x).double() for name, x in model.state_dict().items()})
    weights = list(double.parameters())
    validation = torch.autograd.grad(validation_of(PLAY, [0, 1], 2)["a"](double), weights)
    directions = []
    for p, v in zip(model.parameters(), validation, strict=True):
        assert p.grad is not None
        state = {name: full(x) if isinstance(x, Tensor) else x for name, x in optimizer.state[p].items()}
        directions.append(factor(full(p.grad).double(), state) * v)
    found = []
    for row in rows.split(1):
        g = torch.autograd.grad(sample_losses(double(row), row).mean() / sum(PLAY.sizes[0]), weights)
        found.append(clip * sum(float((x * v).sum()) for x, v in zip(g, directions, strict=True)))
    return torch.tensor(found, dtype=torch.float64)


def run(wrap: Callable[[nn.Module], Any] | None, parts: list[int], apart: bool = False, scored: bool = True) -> dict[str, Any]:
    """Train with some slices of the batch, in one backward or one for each; with scores and their references, or without."""
    model = PLAY.model()
    called = model if wrap is None else wrap(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.1)
    validation = {"a": validation_of(PLAY, parts, 2)["a"]}
    options = {"method": "first", "update": "secant", "audit_every": 1}
    accountant = inrun.Accountant(called, optimizer, validation, **options) if scored else None
    contributions, references = [], []
    for step in range(PLAY.steps):
        with contextlib.nullcontext() if accountant is None else accountant.step() as opened:
            for some in [[p] for p in parts] if apart else [parts]:
                ids = [10 * p + j for p in some for j in range(PLAY.sizes[0][p])]
                with contextlib.nullcontext() if opened is None else opened.microbatch(ids):
                    loss_of(called, PLAY, step, 0, some, 2 if wrap is None else 1).backward()
            norm = float(full(torch.nn.utils.clip_grad_norm_(called.parameters(), CLIP)))
            if scored:
                rows = torch.cat([rows_of(PLAY, step, 0, p) for p in parts])
                references.append(reference(model, optimizer, min(1.0, CLIP / (norm + 1e-6)), rows))
            optimizer.step()
            optimizer.zero_grad()
        if accountant is not None:
            contributions.append(accountant.last.contributions["a"].double())
    if accountant is not None:
        accountant.close()
    weights = [full(p) for p in model.parameters()]
    return {"contributions": contributions, "references": references, "weights": weights}


def of_rank(wrap: Callable[[nn.Module], Any], scored: bool, rank: int, world: int) -> dict[str, Any]:
    return run(wrap, [rank], scored=scored)


JOBS: dict[str, dict[str, Any]] = {
    "float32": {
        "ddp": functools.partial(of_rank, DistributedDataParallel, True),
        "fsdp": functools.partial(of_rank, sharded(), True),
        "plain ddp": functools.partial(of_rank, DistributedDataParallel, False),
    }
}

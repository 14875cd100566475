"""Scores against the true Shapley values of single steps, on a small GPT (the paper's fidelity and utility figures).

A GPT of about 115,000 parameters is trained in double precision on text of the Python installation; at chosen steps the
next step is played out with the real optimizer and the real loss, for every method beside the truth.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from inrun.corpus.python_texts import pieces_of
from inrun.errors import ConfigurationError
from inrun.fidelity import FidelityReport, fidelity, usual_choices
from inrun.training.config import Model
from inrun.training.loss import next_token_loss, row_losses
from inrun.training.models import build_model

#: Domains of the text, and how many pieces of one text are taken at most.
DOMAINS = {"reference": 4, "code": 6, "tables": 6}
#: Domains that validation rows are taken from, and rows that are held out of every domain.
VALIDATED, HELD_OUT = ("reference", "code"), 16


@dataclass(frozen=True)
class FidelityConfig:
    """What is tried."""

    lrs: tuple[float, ...] = (6e-4, 5e-3)
    steps: tuple[int, ...] = (3, 20, 100, 300)
    seeds: tuple[int, ...] = (0, 1, 2)
    batch: int = 16
    permutations: int = 300
    optimizer: str = "adamw"
    #: Play the paper's SGD game w ← w − lr·G at states of an AdamW run of lr 6e-4; ``lrs`` are then those of the game.
    proxy: bool = False
    max_norm: float = 1.0
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    validation_rows: int = 4
    subsets: int = 0
    choices: tuple[tuple[str, str], ...] = field(default=())

    def resolved_choices(self) -> tuple[tuple[str, str], ...]:
        """Return the choices, or the usual ones for this game."""
        return self.choices or usual_choices(sgd=self.proxy or self.optimizer == "sgd")


@dataclass(frozen=True)
class Cell:
    """One step of one run."""

    seed: int
    lr: float
    report: FidelityReport


def _cut_bytes(text: str, size: int) -> Iterator[bytes]:
    data = text.encode()
    return (data[start : start + size] for start in range(0, len(data) - size, size))


def byte_rows(size: int, per_domain: int, noise: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return rows of bytes of the Python installation's text, with some of noise among them, and held-out rows by domain.

    Args:
        size: Bytes of a row.
        per_domain: Rows of each domain to train on.
        noise: Rows of random bytes.
        seed: Of everything that is drawn.

    Returns:
        Tokens ``[n, size]`` in random order, and ``[16, size]`` for each domain that is validated.
    """
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    rows: list[bytes] = []
    held_out: dict[str, Tensor] = {}
    for domain, most in DOMAINS.items():
        found = [piece.content for piece in pieces_of(domain, functools.partial(_cut_bytes, size=size), most)]
        chosen = generator.sample(found, min(len(found), per_domain + HELD_OUT))
        rows += chosen[HELD_OUT:]
        if domain in VALIDATED:
            held_out[domain] = _as_tokens(chosen[:HELD_OUT])
    apart = random.Random(seed)  # noqa: S311 - not for secrets
    rows += [apart.randbytes(size) for _ in range(noise)]
    generator.shuffle(rows)
    return _as_tokens(rows), held_out


def _as_tokens(rows: list[bytes]) -> Tensor:
    return torch.tensor([list(row) for row in rows])


def sample_losses_of(rows: Tensor) -> Callable[[nn.Module], Tensor]:
    """Return each row's part of the mean next-token loss of a batch."""
    return lambda model: row_losses(model, rows) / len(rows)


def _validation_loss(rows: Tensor, model: nn.Module) -> Tensor:
    return next_token_loss(model, rows)


def _optimizer(config: FidelityConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    raise ConfigurationError(f"optimizer is {config.optimizer!r}; accepted are adamw and sgd")


def run_fidelity(config: FidelityConfig, tell: Callable[[str, int, int], None] = lambda what, done, total: None) -> list[Cell]:
    """Train and compare; ``tell`` is called with what is being done and progress."""
    cells: list[Cell] = []
    runs = [(seed, 6e-4) for seed in config.seeds] if config.proxy else [(s, lr) for s in config.seeds for lr in config.lrs]
    games = len(config.lrs) if config.proxy else 1
    total, done = len(runs) * len(config.steps) * games, 0
    for seed, lr in runs:
        tokens, held_out = byte_rows(config.context + 1, 600, 60, seed)
        # The same number of rows of each held-out domain.
        each = max(1, config.validation_rows // len(held_out))
        validation = torch.cat([rows[:each] for rows in held_out.values()])
        torch.manual_seed(seed)
        sizes = Model(context=config.context, width=config.width, layers=config.layers, heads=config.heads)
        model = build_model(sizes, 256).double()
        optimizer = _optimizer(replace(config, optimizer="adamw") if config.proxy else config, model, lr)
        order = torch.Generator().manual_seed(seed)
        for step in range(max(config.steps) + 1):
            rows = tokens[torch.randint(0, len(tokens), (config.batch,), generator=order)]
            if step in config.steps:
                for game_lr in config.lrs if config.proxy else (lr,):
                    tell(f"seed {seed}, lr {game_lr:g}, step {step}", done, total)
                    optimizer.param_groups[0]["lr"] = game_lr
                    report = fidelity(
                        model,
                        optimizer,
                        functools.partial(_validation_loss, validation),
                        sample_losses_of(rows),
                        choices=config.resolved_choices(),
                        max_norm=config.max_norm,
                        permutations=config.permutations,
                        proxy=config.proxy,
                        subsets=config.subsets,
                        seed=seed,
                        step=step,
                        name="docs and code",
                    )
                    optimizer.param_groups[0]["lr"] = lr
                    cells.append(Cell(seed, game_lr, report))
                    done += 1
            sample_losses_of(rows)(model).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            optimizer.step()
            optimizer.zero_grad()
    tell("done", total, total)
    return cells


def tabulate(cells: list[Cell]) -> list[dict[str, Any]]:
    """Return one row per learning rate, step and choice: worst, median and best over seeds."""
    rows = []
    keys = sorted({(c.lr, c.report.step) for c in cells})
    for lr, step in keys:
        mine = [c.report for c in cells if (c.lr, c.report.step) == (lr, step)]
        for index, choice in enumerate(mine[0].results):
            found = [report.results[index] for report in mine]
            spearman = [r.spearman for r in found]
            rows.append(
                {
                    "lr": lr,
                    "step": step,
                    "choice": choice.name,
                    "seeds": len(found),
                    "spearman_min": min(spearman),
                    "spearman_median": statistics.median(spearman),
                    "pearson_min": min(r.pearson for r in found),
                    "rmse_median": statistics.median(r.rmse for r in found),
                    "spread_median": statistics.median(sum(abs(x) for x in r.shapley) / r.n for r in mine),
                    "residual_max": max(r.residual for r in found),
                    "residual_median": statistics.median(r.residual for r in found),
                    "noise": max(max(r.standard_errors) for r in mine),
                }
            )
    return rows


def as_data(config: FidelityConfig, cells: list[Cell]) -> dict[str, Any]:
    """Return everything as plain data."""
    return {
        "config": asdict(config),
        "table": tabulate(cells),
        "cells": [{"seed": c.seed, "lr": c.lr, **c.report.as_dict()} for c in cells],
    }

"""States of small runs of a GPT in double precision, whose next step is played out (fidelity and utility)."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from inrun.corpus.python_texts import pieces_of
from inrun.errors import ConfigurationError
from inrun.fidelity import STEP_METHODS
from inrun.methods import PROXY
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
    #: The paper's game as its formula has it: losses are added up over the batch, and no norm is clipped.
    summed: bool = False
    max_norm: float = 1.0
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    validation_rows: int = 4
    subsets: int = 0

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the methods that are judged: all by the real step, those of the paper by its SGD step."""
        return PROXY if self.proxy else STEP_METHODS


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


def summed_losses_of(rows: Tensor) -> Callable[[nn.Module], Tensor]:
    """Return the loss of each row; the paper's update adds them up, w ← w − η Σ_n ∇ℓ_n."""
    return lambda model: row_losses(model, rows)


def _validation_loss(rows: Tensor, model: nn.Module) -> Tensor:
    return next_token_loss(model, rows)


def _optimizer(config: FidelityConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    raise ConfigurationError(f"optimizer is {config.optimizer!r}; accepted are adamw and sgd")


@dataclass(frozen=True)
class State:
    """A model about to take a step, with the learning rate of the game set in its optimizer."""

    seed: int
    lr: float
    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    validation: Callable[[nn.Module], Tensor]
    #: Each sample's part of the loss of the game's batch.
    sample_losses: Callable[[nn.Module], Tensor]
    #: Of the game.
    max_norm: float | None


def count_states(config: FidelityConfig) -> int:
    """Return how many states there will be."""
    return len(config.seeds) * len(config.lrs) * len(config.steps)


def states(config: FidelityConfig) -> Iterator[State]:
    """Train, and stop at every step that is looked at; what is done to the learning rate is taken back."""
    runs = [(seed, 6e-4) for seed in config.seeds] if config.proxy else [(s, lr) for s in config.seeds for lr in config.lrs]
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
                losses = summed_losses_of(rows) if config.summed else sample_losses_of(rows)
                held = functools.partial(_validation_loss, validation)
                for game_lr in config.lrs if config.proxy else (lr,):
                    optimizer.param_groups[0]["lr"] = game_lr
                    yield State(seed, game_lr, step, model, optimizer, held, losses, None if config.summed else config.max_norm)
                    optimizer.param_groups[0]["lr"] = lr
            sample_losses_of(rows)(model).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
            optimizer.step()
            optimizer.zero_grad()

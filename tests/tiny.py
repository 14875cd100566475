"""A tiny GPT and its batches, for tests of the engine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from inrun.training.gpt import GPT, GPTConfig, next_token_loss

VOCAB, CONTEXT = 23, 12


def tiny(dropout: float = 0.0, tied: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return GPT(GPTConfig(VOCAB, CONTEXT, 8, 2, 2, dropout, tied)).to(dtype)


def batch(n: int, seed: int, t: int = 10) -> Tensor:
    return torch.randint(0, VOCAB, (n, t), generator=torch.Generator().manual_seed(seed))


def validation(seed: int = 99, n: int = 2):
    rows = batch(n, seed)
    return lambda model: next_token_loss(model, rows)


def train_step(accountant, model, optimizer, rows: Tensor, ids=None, clip: float | None = None):
    with accountant.step(range(len(rows)) if ids is None else ids):
        next_token_loss(model, rows).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return accountant.last

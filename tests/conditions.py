"""One small model with its data, to be trained under one condition after another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH = 13, 6


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

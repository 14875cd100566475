"""Small models with data and a loss per row, of several kinds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from tiny import VOCAB, batch, tiny


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.inner = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=16, num_key_value_heads=1, **sizes))

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(input_ids=rows).logits


class Repeating(nn.Module):
    """One layer twice, a convolution, a norm over channels and a head of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(VOCAB, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.norm, self.twice, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 8), nn.Linear(8, 5 * VOCAB)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.norm(self.conv(self.embed(rows).transpose(1, 2))).transpose(1, 2)
        return self.head(self.twice(torch.tanh(self.twice(x))))


def token_losses(logits: Tensor, rows: Tensor) -> Tensor:
    found = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    return found.view(len(rows), -1).mean(1)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 3))


@dataclass(frozen=True)
class Problem:
    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Tensor]
    losses: Callable[[Tensor, Tensor], Tensor]


def points(n: int, seed: int) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PROBLEMS = {
    "gpt, tied": Problem(lambda: tiny(tied=True), batch, token_losses),
    "gpt, untied": Problem(lambda: tiny(tied=False), batch, token_losses),
    "llama": Problem(Llama, batch, token_losses),
    "perceptron": Problem(perceptron, points, lambda out, x: (out - x[:, :3].sin()).square().mean(1)),
    "repeating": Problem(Repeating, batch, token_losses),
}

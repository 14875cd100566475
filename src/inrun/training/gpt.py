"""A plain GPT: pre-norm blocks, learned positions, GELU, optionally a head tied to the token table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.training.loss import next_token_loss

__all__ = ["GPT", "Block", "GPTConfig", "next_token_loss"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model."""

    vocab: int = 4096
    context: int = 256
    width: int = 256
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    tied: bool = True


class Block(nn.Module):
    """Attention and a four times wider perceptron, each after a norm and beside a residual."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the layers."""
        super().__init__()
        d = config.width
        self.heads, self.dropout = config.heads, config.dropout
        self.norm1, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, t, d]`` to ``[n, t, d]``."""
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True, dropout_p=rate)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(n, t, d)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens ``[n, t]`` to logits ``[n, t, vocab]``."""

    def __init__(self, config: GPTConfig) -> None:
        """Make the layers with GPT-2's initialisation."""
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.out, block.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * config.layers) ** 0.5)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.drop(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

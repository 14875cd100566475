"""Small models with data and a loss per row: a layer of ``inrun.paper`` is covered by one entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.pytorch_utils import Conv1D

from reference import gradients

VOCAB, D = 11, 6


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    #: Rows of a batch, by number and seed.
    draw: Callable[[int, int], Tensor]
    #: One loss per row, from outputs and rows.
    losses: Callable[[Tensor, Tensor], Tensor]

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build().double()

    def row_losses(self, model: nn.Module, rows: Tensor) -> Tensor:
        return self.losses(model(rows), rows)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vectors(n: int, seed: int) -> Tensor:
    return torch.randn(n, D, generator=generator(seed), dtype=torch.float64)


def sequences(n: int, seed: int) -> Tensor:
    return torch.randn(n, 4, D, generator=generator(seed), dtype=torch.float64)


def images(n: int, seed: int) -> Tensor:
    return torch.randn(n, 2, 7, 6, generator=generator(seed), dtype=torch.float64)


def tokens(n: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (n, 5), generator=generator(seed))


def to_one(out: Tensor, rows: Tensor) -> Tensor:
    """A smooth loss that is not quadratic in the outputs, nor alike for two rows."""
    return torch.log1p((out.flatten(1) - rows.flatten(1).double().sum(1, keepdim=True).sin()).square()).sum(1)


def next_token(out: Tensor, rows: Tensor) -> Tensor:
    return F.cross_entropy(out[:, :-1].transpose(1, 2), rows[:, 1:], reduction="none").mean(1)


class Reused(nn.Module):
    """A layer that is called twice, and once more through a tied module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.twin = nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.twin.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.twin(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Looked(nn.Module):
    """Tables: tokens with padding, positions ``[1, t]``, one label per row ``[n]``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, D, padding_idx=3)
        self.positions, self.labels = nn.Embedding(8, D), nn.Embedding(VOCAB, D)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        at = self.positions(torch.arange(x.shape[1]).unsqueeze(0))
        return self.head(torch.tanh(self.tokens(x) * at + self.labels(x[:, 0]).unsqueeze(1)))


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.out = nn.LayerNorm(D), nn.Linear(D, D)
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        normed = self.norm1(x)
        q, k, v = (layer(normed).view(n, t, 2, D // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, D))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """Learned positions of shape ``[t]``, and a head that is tied to the token table."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(8, D)
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        return self.head(self.norm(self.blocks(hidden)))


class MyNorm(nn.LayerNorm):
    """A subclass that runs the forward of a known class."""


def frozen_bias(layer: nn.Linear) -> nn.Module:
    layer.bias.requires_grad_(False)
    return layer


def norms() -> nn.Module:
    return nn.Sequential(MyNorm((4, D)), nn.Linear(D, D), nn.RMSNorm(D), nn.GroupNorm(2, 4), nn.Tanh(), nn.Linear(D, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same", dilation=(1, 2)),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, (3, 2), stride=2, padding=(1, 0), padding_mode="reflect", groups=2),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Flatten(),
        nn.Linear(18, 3),
    )


CASES = {
    "linear": Case(lambda: nn.Linear(D, 3), vectors, to_one),
    "perceptron": Case(
        lambda: nn.Sequential(nn.Linear(D, 9), nn.Tanh(), frozen_bias(nn.Linear(9, 9)), nn.SiLU(), nn.Linear(9, 3)),
        vectors,
        to_one,
    ),
    "sequences": Case(lambda: nn.Sequential(nn.Linear(D, 40), nn.GELU(), nn.Linear(40, 30)), sequences, to_one),
    "reused": Case(Reused, sequences, to_one),
    "norms": Case(norms, sequences, to_one),
    "images": Case(convolutions, images, to_one),
    "rows of pixels": Case(
        lambda: nn.Sequential(
            nn.Conv1d(4, 5, 3, padding=2, padding_mode="circular"), nn.Tanh(), nn.Conv1d(5, 3, 2, stride=2, padding="valid")
        ),
        sequences,
        to_one,
    ),
    "transposed linear": Case(lambda: nn.Sequential(Conv1D(8, D), nn.GELU(), Conv1D(2, 8)), sequences, to_one),
    "tables": Case(Looked, tokens, next_token),
    "tiny GPT": Case(TinyGPT, tokens, next_token),
}


# The slow truth: one sample at a time, plain autograd


@dataclass(frozen=True)
class Truth:
    """By parameter: every sample's gradient, their sum G, ∇ℓ, and H·(rate ∘ G)."""

    each: list[list[Tensor]]
    total: list[Tensor]
    validation: list[Tensor]
    curved: list[Tensor]

    def values(self, rates: list[float], order: int, clip: float = 1.0) -> Tensor:
        """Theorem 1 or 2, ``[n]``, from formed gradients."""
        return torch.stack(
            [
                torch.stack(
                    [
                        clip * rate * (g * (v - (order - 1) * clip / 2 * h)).sum()
                        for rate, g, v, h in zip(rates, gradient, self.validation, self.curved, strict=True)
                    ]
                ).sum()
                for gradient in self.each
            ]
        )


def truth(case: Case, model: nn.Module, rows: Tensor, held: Tensor, rates: list[float]) -> Truth:
    """Compute it: each sample in a forward of its own, the Hessian-vector product explicitly."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    n = len(rows)
    with sdpa_kernel(SDPBackend.MATH):
        each = [gradients(case.row_losses(model, rows[j : j + 1])[0] / n, parameters) for j in range(n)]
        loss = case.row_losses(model, held).mean()
        towards = torch.autograd.grad(loss, parameters, create_graph=True)
        total = [torch.stack(part).sum(0) for part in zip(*each, strict=True)]
        product = torch.stack([(r * g * v).sum() for r, g, v in zip(rates, total, towards, strict=True)]).sum()
        curved = gradients(product, parameters)
    return Truth(each, total, [v.detach() for v in towards], curved)

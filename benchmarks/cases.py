"""Models, data and losses that the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from launches import GPT, next_token_loss, next_token_losses
from torch import Tensor, nn


@dataclass
class Task:
    """What is trained: a model, its data, its loss."""

    model: nn.Module
    #: Draws so many rows.
    draw: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    #: The same for every row, ``[n]``, which the paper's algorithms need.
    losses: Callable[[nn.Module, Any], Tensor]
    batch: int
    validation_rows: int
    clip: float | None = None
    trainer: bool = False

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make AdamW with torch's defaults."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def gpt(width: int) -> Task:
    """A GPT of 4 layers with 256 positions and a vocabulary of 4,096, batch 16, one validation row, clipped."""
    model = GPT(4096, width, layers=4, heads=width // 64, context=256)
    return Task(model, lambda n: torch.randint(0, 4096, (n, 257)), next_token_loss, next_token_losses, 16, 1, clip=1.0)


def small_gpt2(trainer: bool) -> Task:
    """GPT-2 of transformers with 0.8M parameters, 64 positions, batch 16, 16 validation rows."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))

    def loss(model: nn.Module, rows: Tensor) -> Tensor:
        return model(input_ids=rows, labels=rows).loss

    def losses(model: nn.Module, rows: Tensor) -> Tensor:
        # The paper's algorithms need the batch as the first dimension of every layer, the position table's, too.
        places = torch.arange(rows.shape[1]).expand(rows.shape)
        logits = model(input_ids=rows, position_ids=places).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").mean(1)

    return Task(model, lambda n: torch.randint(0, 256, (n, 64)), loss, losses, 16, 16, clip=1.0, trainer=trainer)


def label_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of labels, one per row or one per position."""
    return F.cross_entropy(model(rows[0]).flatten(0, -2), rows[1].flatten())


def label_losses(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Return the same for every row, ``[n]``."""
    found = F.cross_entropy(model(rows[0]).flatten(0, -2), rows[1].flatten(), reduction="none")
    return found.view(len(rows[1]), -1).mean(1)


def images(model: nn.Module, shape: tuple[int, ...], validation_rows: int) -> Task:
    """Images of ten classes, batch 32."""
    draw = lambda n: (torch.rand(n, *shape), torch.randint(0, 10, (n,)))  # noqa: E731
    return Task(model, draw, label_loss, label_losses, 32, validation_rows)


def tokens(model: nn.Module, per_position: bool) -> Task:
    """Rows of 40 tokens with a label per position or per row, batch 32, one validation row, clipped."""

    def draw(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 500, (n, 40)) if per_position else torch.randint(0, 10, (n,))
        return torch.randint(0, 500, (n, 40)), labels

    return Task(model, draw, label_loss, label_losses, 32, 1, clip=1.0)


def digits() -> Task:
    """A CNN for digits of 8 x 8, batch 32, 32 validation rows."""
    stage_1 = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    stage_2 = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return images(nn.Sequential(*stage_1, *stage_2, nn.Flatten(), nn.Linear(128, 10)), (1, 8, 8), 32)


class Residual(nn.Module):
    """The basic block of ResNet-18, with group norms."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Take channels before and after, and the stride of the first convolution."""
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, after) for _ in range(2))
        same = before == after and stride == 1
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(8, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add two convolutions to the shortcut."""
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.short(x))


def resnet(width: int) -> Task:
    """ResNet-18 with group norms for images of 32 x 32, batch 32, one validation row; ResNet-18 proper has width 64."""
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
    blocks = [
        Residual(start, after, stride)
        for before, after, first in stages
        for start, stride in ((before, first), (after, 1))
    ]  # fmt: skip
    stem = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.GroupNorm(8, width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)]
    return images(nn.Sequential(*stem, *blocks, *head), (3, 32, 32), 1)


class Encoder(nn.Module):
    """A classifier of token sequences with nn.TransformerEncoder and a raw position table."""

    def __init__(self) -> None:
        """Two layers of width 64."""
        super().__init__()
        self.tokens, self.head = nn.Embedding(500, 64), nn.Linear(64, 10)
        self.positions = nn.Parameter(torch.randn(1, 40, 64) * 0.02)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the mean over positions."""
        return self.head(self.encoder(self.tokens(x) + self.positions).mean(1))


class Recurrent(nn.Module):
    """A language model with an LSTM."""

    def __init__(self) -> None:
        """Two layers of width 128."""
        super().__init__()
        self.tokens, self.head = nn.Embedding(500, 128), nn.Linear(128, 500)
        self.lstm = nn.LSTM(128, 128, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[n, t, v]``."""
        return self.head(self.lstm(self.tokens(x))[0])


class Mixtral(nn.Module):
    """Mixtral of transformers, which returns its logits."""

    def __init__(self) -> None:
        """Two layers of width 64, two of four experts."""
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
        experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64}
        self.inner = MixtralForCausalLM(MixtralConfig(**sizes, **experts))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[n, t, v]``."""
        return self.inner(input_ids=x, use_cache=False).logits


CASES: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "gpt08m": lambda: small_gpt2(trainer=False),
    "gpt08m-trainer": lambda: small_gpt2(trainer=True),
    "gpt256": lambda: gpt(256),
    "gpt768": lambda: gpt(768),
    "resnet": lambda: resnet(16),
    "resnet18": lambda: resnet(64),
    "encoder": lambda: tokens(Encoder(), per_position=False),
    "lstm": lambda: tokens(Recurrent(), per_position=True),
    "mixtral": lambda: tokens(Mixtral(), per_position=True),
}
#: What is measured unless a case is named.
USUAL = ("digits", "gpt08m", "gpt08m-trainer", "gpt256", "gpt768", "resnet")
#: Cases that a ``transformers.Trainer`` trains.
WITH_TRAINER = ("gpt08m-trainer",)

"""The model, batch and optimizer that a benchmark runs on."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from inrun.errors import ConfigurationError
from inrun.training.config import Model
from inrun.training.models import build_model

OPTIMIZERS = ("sgd", "adamw")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """What is measured."""

    model: str = "gpt"
    width: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 256
    vocab: int = 4096
    tied: bool = True
    batch: int = 16
    validation_rows: int = 1
    optimizer: str = "adamw"
    clip: float | None = 1.0
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0

    def check(self) -> None:
        """Raise ConfigurationError for impossible shapes."""
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"optimizer is {self.optimizer!r}; accepted are {', '.join(OPTIMIZERS)}")
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype is {self.dtype!r}; accepted are {', '.join(DTYPES)}")
        if self.width % self.heads:
            raise ConfigurationError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigurationError("device is cuda, but torch sees no GPU")

    def build(self) -> nn.Module:
        """Make the model, the same for every call."""
        torch.manual_seed(self.seed)
        model = build_model(self._described(), self.vocab)
        size = self.vocab if self.model == "gpt" else model.config.vocab_size  # type: ignore[union-attr]
        if size != self.vocab:
            raise ConfigurationError(f"--vocab is {self.vocab}, the config has vocab_size {size}")
        return model.to(self.device, DTYPES[self.dtype])

    def _described(self) -> Model:
        """Return what `inrun train` would be told of the model: "gpt", a model type of transformers, or a path to its config."""
        sizes = Model(context=self.context, width=self.width, layers=self.layers, heads=self.heads)
        if self.model == "gpt":
            return msgspec.structs.replace(sizes, tied=self.tied)
        if os.path.exists(self.model):
            return msgspec.structs.replace(sizes, type="transformers", path=self.model, tied=None)
        return msgspec.structs.replace(sizes, type=self.model, tied=None)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.01)
        return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)

    def rows(self, count: int, seed: int) -> Tensor:
        """Draw token rows ``[count, context + 1]``: the model sees all but the last, the targets are all but the first."""
        generator = torch.Generator().manual_seed(self.seed * 7919 + seed)
        return torch.randint(0, self.vocab, (count, self.context + 1), generator=generator).to(self.device)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)

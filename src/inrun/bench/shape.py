"""The model, batch and optimizer that a benchmark runs on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.errors import ConfigurationError
from inrun.training.gpt import GPT, GPTConfig

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
        made = self._gpt() if self.model == "gpt" else _from_transformers(self)
        return made.to(self.device, DTYPES[self.dtype])

    def _gpt(self) -> nn.Module:
        config = GPTConfig(self.vocab, self.context, self.width, self.layers, self.heads, tied=self.tied)
        return GPT(config)

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


def _from_transformers(shape: Shape) -> nn.Module:
    """Build a causal language model from a transformers model type, or a folder or file with its config."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigurationError("models other than gpt need transformers: pip install inrun[hf]") from error
    import os

    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": max(shape.context, 8),
    }
    if os.path.exists(shape.model):
        config = AutoConfig.from_pretrained(shape.model, local_files_only=True)
    else:
        try:
            config = AutoConfig.for_model(shape.model, **sizes)
        except ValueError as error:
            raise ConfigurationError(
                f"model is {shape.model!r}; accepted are gpt, a transformers model type (gpt2, llama, ...) or a config path"
            ) from error
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    if shape.vocab != config.vocab_size:
        raise ConfigurationError(f"--vocab is {shape.vocab}, the config has vocab_size {config.vocab_size}")
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean next-token loss of token rows, for our GPT and for models of transformers."""
    out = model(rows[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

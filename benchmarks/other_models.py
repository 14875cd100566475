"""What scores cost for models other than the reference GPT: mean processor time of a step over plain training.

    taskset -c 0 python benchmarks/other_models.py --rounds 8 --model resnet --model lstm

One thread, AdamW with norm clipping, one validation row. ``first`` is the step game with the validation gradient before
the step; ``merged`` is the same with the validation row at the end of the batch, where the model's layers allow it;
``default`` is what an Accountant does unless told otherwise (whole credit).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
from inrun.bench.measure import keep_freed_memory

#: Steps before the first that counts: whole credit's window is 44 steps at β₁ = 0.9, and rows are checked most at first.
WARM_UP = 48
#: A model, and a function that draws a batch of so many rows: inputs and labels.
Model = tuple[nn.Module, Callable[[int], tuple[Tensor, Tensor]], int]


class Residual(nn.Module):
    """The basic block of ResNet-18, with group norms."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        """Take channels before and after, and the stride of the first convolution."""
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, after) for _ in range(2))
        same = before == after and stride == 1
        self.short = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(32, after))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add two convolutions to the shortcut."""
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.short(x))


def resnet() -> Model:
    """ResNet-18 for images of 32 x 32."""
    blocks = [
        Residual(before, after, stride)
        for before, after, first in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))
        for before, stride in ((before, first), (after, 1))
    ]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return model, lambda n: (torch.randn(n, 3, 32, 32), torch.randint(0, 10, (n,))), 32


class Encoder(nn.Module):
    """A classifier of token sequences with nn.TransformerEncoder."""

    def __init__(self, positions: bool) -> None:
        """Optionally with a raw position table."""
        super().__init__()
        self.tokens = nn.Embedding(500, 64)
        self.positions = nn.Parameter(torch.randn(1, 40, 64) * 0.02) if positions else None
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Classify by the mean over positions."""
        hidden = self.tokens(x)
        if self.positions is not None:
            hidden = hidden + self.positions
        return self.head(self.encoder(hidden).mean(1))


def encoder(positions: bool = False) -> Model:
    """nn.TransformerEncoder 2 x 64, 40 positions."""
    return Encoder(positions), lambda n: (torch.randint(0, 500, (n, 40)), torch.randint(0, 10, (n,))), 32


class Logits(nn.Module):
    """A causal model of transformers that returns its logits, position by position."""

    def __init__(self, inner: nn.Module) -> None:
        """Wrap."""
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[n, t, v]``."""
        return self.inner(input_ids=x, use_cache=False).logits


def mixtral() -> Model:
    """Mixtral, 2 layers of width 64."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    return Logits(MixtralForCausalLM(config)), lambda n: (torch.randint(0, 500, (n, 40)), torch.randint(0, 500, (n, 40))), 32


def gpt2() -> Model:
    """GPT-2, 4 layers of width 128, 64 positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=1000, n_positions=64, n_embd=128, n_layer=4, n_head=4)
    return Logits(GPT2LMHeadModel(config)), lambda n: (torch.randint(0, 1000, (n, 64)), torch.randint(0, 1000, (n, 64))), 16


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


def lstm() -> Model:
    """LSTM 2 x 128, 40 positions."""
    return Recurrent(), lambda n: (torch.randint(0, 500, (n, 40)), torch.randint(0, 500, (n, 40))), 32


def width_256() -> Model:
    """The shape of ``inrun bench``: a GPT of 4 layers of width 256, 256 positions."""
    from inrun.training.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocab=4096, context=256, width=256, layers=4, heads=4))
    return model, lambda n: (torch.randint(0, 4096, (n, 255)), torch.randint(0, 4096, (n, 255))), 16


MODELS: dict[str, Callable[[], Model]] = {
    "resnet": resnet,
    "encoder": encoder,
    "encoder-positions": lambda: encoder(positions=True),
    "mixtral": mixtral,
    "gpt2": gpt2,
    "lstm": lstm,
    "width-256": width_256,
}
WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "first": {"credit": "step", "method": "first"},
    "merged": {"credit": "step", "method": "first"},
    "default": {},
}
#: Recurrent layers, experts, nn.MultiheadAttention and raw parameters have no merged pass (docs/merged.md).
NOT_MERGED = ("lstm", "encoder", "encoder-positions", "mixtral")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    logits = model(batch[0])
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def make_step(name: str, way: str) -> Callable[[int], None]:
    """Return a function that trains one step."""
    options, merged = WAYS[way], way == "merged"
    torch.manual_seed(0)
    model, draw, n = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    held = draw(1)
    validation = None if merged else lambda m: loss_of(m, held)
    accountant = None if options is None else inrun.Accountant(model, optimizer, validation, **options)

    def together(batch: tuple[Tensor, Tensor], step: Any) -> Tensor:
        """Return both means of one forward over the batch and, behind it, the validation row."""
        logits, labels = model(torch.cat([batch[0], held[0]])), torch.cat([batch[1], held[1]])
        losses = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="none").view(len(labels), -1)
        return step.merge(losses[:n].mean(), losses[n:].mean())

    def train(batch: tuple[Tensor, Tensor], step: Any = None) -> None:
        (together(batch, step) if merged else loss_of(model, batch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def step(number: int) -> None:
        batch = draw(n)
        if accountant is None:
            train(batch)
            return
        with accountant.step(range(number * n, (number + 1) * n), **({"merged": 1} if merged else {})) as current:
            train(batch, current)

    return step


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=5, help="steps per round")
    parser.add_argument("--instances", type=int, default=3, help="how often every contestant is made")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(f"{'model':20} {'plain ms':>9} {'first':>7} {'merged':>7} {'default':>8}")
    for name in options.model or MODELS:
        order = [way for way in WAYS if way != "merged" or name not in NOT_MERGED]
        total = dict.fromkeys(order, 0.0)
        for instance in range(options.instances):
            # Where tensors happen to lie moves a step by some per cent, so that all are made several times, in turned order.
            order = order[1:] + order[:1]
            steps = {way: make_step(name, way) for way in order}
            for way, step in steps.items():
                for number in range(WARM_UP if way != "plain" else 5):
                    step(number)
            for turn in range(instance, options.rounds, options.instances):
                for way in order[turn % len(order) :] + order[: turn % len(order)]:
                    for number in range(options.steps):
                        began = time.process_time()
                        steps[way](100 * (turn + 1) + number)
                        total[way] += time.process_time() - began
            del steps
            gc.collect()
        ratios = {way: f"{found / total['plain']:.2f}" for way, found in total.items()}
        shown = f"{ratios['first']:>7} {ratios.get('merged', '-'):>7} {ratios['default']:>8}"
        print(f"{name:20} {1000 * total['plain'] / (options.rounds * options.steps):9.1f} {shown}", flush=True)


if __name__ == "__main__":
    main()

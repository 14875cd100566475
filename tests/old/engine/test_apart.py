"""Tables that run once for the whole batch, and parameters that are read, under conditions: exact, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import inrun
from conditions import GAMES
from inrun.errors import StepError
from packing import TWO_ROWS, Batch, both
from reference import contributions, gradients, relative_error, sample_gradients

WORDS, WIDTH, HEADS = 19, 6, 2


class Table(nn.Module):
    """Biases of attention by relative position, ``[1, heads, t, t]``: a layer that runs once, or a parameter that is read."""

    def __init__(self, read: bool) -> None:
        super().__init__()
        self.layer = None if read else nn.Embedding(16, HEADS)
        self.raw = nn.Parameter(torch.randn(16, HEADS)) if read else None

    def forward(self, t: int) -> Tensor:
        places = torch.arange(t)
        apart = (places.unsqueeze(0) - places.unsqueeze(1)).clamp(-8, 7) + 8
        found = self.layer(apart) if self.layer is not None else self.raw[apart]
        return found.permute(2, 0, 1).unsqueeze(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = q @ k.transpose(-1, -2) + bias
        weights = weights if mask is None else weights + mask
        return x + self.out((weights.softmax(-1) @ v).transpose(1, 2).reshape(n, t, WIDTH))


class Relative(nn.Module):
    """Two layers of attention. ``segments`` says what is checkpointed, and so where the biases go:

    "none", "apart" (biases made outside, handed into the segments), "returned" (made in the first segment, as T5 does), "own"
    (every segment makes those that it uses).
    """

    def __init__(self, read: bool = False, segments: str = "none", reentrant: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.table, self.layers = Table(read), nn.ModuleList([Attention(), Attention()])
        self.segments, self.reentrant = segments, reentrant

    def _segment(self, layer: Attention, x: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = self.table(x.shape[1]) if bias is None else bias
        return layer(x, bias, mask), bias

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x, bias = self.words(tokens), None
        if self.segments in ("none", "apart"):
            bias = self.table(tokens.shape[1])
        for layer in self.layers:
            if self.segments == "none":
                x = layer(x, bias, mask)
            else:
                x, made = checkpoint(self._segment, layer, x, bias, mask, use_reentrant=self.reentrant)
                bias = bias if self.segments == "own" else made
        return self.head(x)


def rows(n: int, seed: int) -> Tensor:
    return torch.randint(0, WORDS, (n, 5), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten(), reduction="sum") / 20


def scores(game: dict[str, Any], change: Callable[[nn.Module], Any] = lambda m: m, n: int = 4, **options: Any) -> list[Tensor]:
    model = Relative(**options).double()
    called = change(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    with inrun.Accountant(called, optimizer, lambda m: loss_of(m, rows(2, 9)), audit_every=0, **game) as accountant:
        for number in range(2):
            with accountant.step(range(n)):
                loss_of(called, rows(n, number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(accountant.last.contributions["validation"])
    return found


FIRST = {"credit": "step", "method": "first"}
FEW = ("first", "midpoint", "whole, sketch")
#: What makes the biases, and what is checkpointed how, where that is exact.
EXACT = [("own", True), ("own", False), ("apart", False), ("returned", False)]


def test_the_plain_model_is_exact() -> None:
    for read in (False, True):
        got = scores(FIRST, read=read)[0]
        model = Relative(read).double()
        parameters = list(model.parameters())
        batch = rows(4, 0)
        labels = batch.roll(1)

        def share(j: int, model: nn.Module = model, batch: Tensor = batch, labels: Tensor = labels) -> Tensor:
            return F.cross_entropy(model(batch[j : j + 1]).flatten(0, 1), labels[j], reduction="sum") / 20

        each = sample_gradients(share, 4, parameters)
        towards = gradients(loss_of(model, rows(2, 9)), parameters)
        assert relative_error(got, contributions(each, [torch.full_like(p, 0.1) for p in parameters], towards)) < 1e-9


@pytest.mark.parametrize("game", FEW)
@pytest.mark.parametrize(("segments", "reentrant"), EXACT)
@pytest.mark.parametrize("read", [False, True])
def test_checkpoints_that_are_exact(read: bool, segments: str, reentrant: bool, game: str) -> None:
    expected = scores(GAMES[game], read=read)
    got = scores(GAMES[game], read=read, segments=segments, reentrant=reentrant)
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("segments", "how"), [("apart", "is handed to"), ("returned", "leaves")])
@pytest.mark.parametrize("read", [False, True])
def test_biases_that_cross_reentrant_checkpoints_are_named(read: bool, segments: str, how: str) -> None:
    """The gradient of all samples arrives there as one; in a batch of one sample it is that sample's."""
    name = "table.raw" if read else r"the output of table.layer"
    with pytest.raises(StepError, match=rf"{name}.*{how} a segment under reentrant.*use_reentrant=False"):
        scores(FIRST, read=read, segments=segments)
    got, expected = (scores(FIRST, read=read, segments=which, n=1) for which in (segments, "none"))
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(got, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiled_models_with_such_a_table_are_named(part: str) -> None:
    def compiled(model: nn.Module) -> Any:
        if part == "model":
            return torch.compile(model, backend="eager")
        for layer in model.layers:
            layer.compile(backend="eager")
        return model

    torch._dynamo.reset()
    with pytest.raises(StepError, match=r"table.layer runs once for the whole batch.*leave torch.compile out"):
        scores(FIRST, compiled)
    torch._dynamo.reset()


def test_packed_documents_with_such_a_table_are_named() -> None:
    packed: Batch = both(TWO_ROWS)[0]
    model = Relative().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, rows(2, 9)), **FIRST)
    with pytest.raises(StepError, match=r"table.layer.*packed documents.*one id per row"), accountant.step(packed.ids):
        logits = model(packed.tokens, packed.mask())
        F.cross_entropy(logits.flatten(0, 1), packed.labels.flatten(), ignore_index=-100).backward()
        optimizer.step()


def test_merged_steps_with_such_a_table_are_named() -> None:
    model = Relative().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, method="first")
    both_parts = torch.cat([rows(4, 0), rows(2, 9)])
    with pytest.raises(StepError, match=r"table.layer runs once.*merged.*validation="), accountant.step(range(4), merged=2) as step:
        out = model(both_parts)
        step.merge(out[:4].square().mean(), out[4:].square().mean()).backward()
        optimizer.step()

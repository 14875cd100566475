"""What shapes decide is verified for every new size of a batch: the last batch of an epoch, another length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import RowOwnershipError
from inrun.old.engine.capture import Capture
from reference import contributions, gradients, relative_error, sample_gradients

D, T, WORDS = 6, 16, 11


def words(n: int, t: int = T, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (n, t), generator=torch.Generator().manual_seed(100 * n + t + seed))


def floats(n: int, t: int = T, seed: int = 0) -> Tensor:
    return torch.randn(n, t, D, generator=torch.Generator().manual_seed(100 * n + t + seed), dtype=torch.float64)


class Run:
    """A model in training, every step held against one sample at a time."""

    def __init__(self, model: nn.Module, held_out: Any, audit_every: int = 0, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = model.double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.value = lambda m: m(held_out).sin().mean()
        self.accountant = inrun.Accountant(
            self.model, self.optimizer, self.value, method="first", audit_every=audit_every, **options
        )

    def step(self, x: Tensor) -> float:
        """Take a step and return the error of its scores."""
        self.optimizer.zero_grad()
        twin, n = copy.deepcopy(self.model), len(x)
        params = [p for p in twin.parameters() if p.requires_grad]
        g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().mean() / n, n, params)
        truth = contributions(g_n, [torch.full_like(p, 0.05) for p in params], gradients(self.value(twin), params))
        with self.accountant.step(range(n)):
            self.model(x).square().mean().backward()
            self.optimizer.step()
        return relative_error(self.accountant.last.contributions["validation"], truth)

    def steps(self, batches: Iterable[Tensor]) -> float:
        return max(self.step(x) for x in batches)


class ScaledTable(nn.Module):
    """A learned scale of a table of positions: what it meets has no samples, whatever its sizes are."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.register_buffer("table", torch.randn(T, D))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x) + self.scale * self.table[: x.shape[1]]))


class ReadPairs(nn.Module):
    """A table of relative positions, read by an index [t, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.table = nn.Parameter(torch.randn(2 * T, 1))

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        bias = self.table[places[:, None] - places[None] + T]
        h = self.words(x)
        return (h @ h.transpose(1, 2) + bias.squeeze(-1)).softmax(-1) @ h


class ExpandedPositions(nn.Module):
    """A parameter expanded to as many copies as there are positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x) * self.scale.expand(x.shape[1], -1)))


@pytest.mark.parametrize("audit_every", [0, 1])
@pytest.mark.parametrize("module", [ScaledTable, ReadPairs, ExpandedPositions])
@pytest.mark.parametrize(
    "sizes", [[(12, 16), (12, 16), (8, 16), (8, 16)], [(8, 12), (8, 12), (8, 16), (8, 8)], [(4, 5)] * 5 + [(16, 16)]]
)
def test_what_is_read_is_verified_at_every_new_size(module: Any, audit_every: int, sizes: list[tuple[int, int]]) -> None:
    run = Run(module(), words(3), audit_every)
    assert run.steps(words(n, t, seed) for seed, (n, t) in enumerate(sizes)) < 1e-9


def test_sizes_that_were_verified_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ScaledTable(), words(3))
    run.steps(words(n, seed=seed) for seed, n in enumerate((12, 10, 12, 10, 12)))
    counts, extra, once = [], [], Capture._run_once
    # Not a number of the model's own: what extra forwards leave there is put back.
    monkeypatch.setattr(Capture, "_run_once", lambda *given: (extra.append(1), once(*given))[1])
    for seed, n in enumerate((12, 9, 9)):
        x = words(n, seed=seed)
        run.optimizer.zero_grad()
        with run.accountant.step(range(n)):
            extra.clear()
            loss = run.model(x).square().mean()
            counts.append(len(extra))
            loss.backward()
            run.optimizer.step()
    assert counts == [0, 1, 0]  # nothing that 9 samples show is new: one glance


class UsedTwice(nn.Module):
    """A scale, or a layer, of what the samples have, [n, d], and of a table of t' rows: with n = t' both look alike."""

    def __init__(self, kind: str, rows: int | None) -> None:
        super().__init__()
        self.words, self.kind, self.rows = nn.Embedding(WORDS, D), kind, rows
        if kind == "scale":
            self.scale = nn.Parameter(torch.rand(D) + 0.5)
        else:
            self.layer = nn.Linear(D, D)
        self.register_buffer("table", torch.randn(T, D))
        self.head = nn.Linear(D, 3)

    def use(self, x: Tensor) -> Tensor:
        return self.scale * x if self.kind == "scale" else self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.use(torch.tanh(self.words(x)).mean(1))
        table = self.use(self.table[: self.rows or x.shape[1] + 1])
        return self.head(torch.tanh(pooled + table.mean(-2)))  # no layer behind sees how many rows it has


def test_a_table_that_comes_to_look_like_samples_is_told_apart() -> None:
    run = Run(UsedTwice("scale", 9), words(3, 5))
    assert run.steps(words(n, 5, seed) for seed, n in enumerate((8, 8, 8, 8, 8, 9, 9))) < 1e-9


@pytest.mark.parametrize(("rows", "sizes"), [(9, [(8, 5)] * 5 + [(9, 5)]), (None, [(8, 5)] * 5 + [(8, 7)])])
def test_a_layer_that_comes_to_be_called_in_two_ways_is_refused(rows: int | None, sizes: list[tuple[int, int]]) -> None:
    run = Run(UsedTwice("layer", rows), words(3, 5))
    batches = [words(n, t, seed) for seed, (n, t) in enumerate(sizes)]
    assert run.steps(batches[:-1]) < 1e-9
    with pytest.raises(RowOwnershipError, match="layer is called with rows laid out in two ways"):
        run.step(batches[-1])


class Nano(nn.Module):
    """nanoGPT's positions, made once for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(T, D)
        self.head = nn.Linear(D, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x) + self.places(torch.arange(x.shape[1]))))


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x.t()))).transpose(0, 1)


class Mixed(nn.Module):
    """A mix of three layers (ELMo): the weights meet [3, n, t, d], which three samples make [n, n, t, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3))
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return (self.weights.softmax(0).view(-1, 1, 1, 1) * torch.stack([torch.tanh(f(x)) for f in self.layers])).sum(0)


class Slopes(nn.Module):
    """Learned slopes of ALiBi, times distances [t, t]."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.query = nn.Parameter(torch.rand(2)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q = self.query(x).view(n, t, 2, 3).transpose(1, 2)
        far = (torch.arange(t)[:, None] - torch.arange(t)[None]).abs().double()
        return ((q @ q.transpose(-1, -2) - self.slopes.view(2, 1, 1) * far).softmax(-1) @ q).transpose(1, 2).reshape(n, t, D)


@pytest.mark.parametrize(
    ("module", "draw", "sizes"),
    [
        (Nano, words, [(12, 16)] * 5 + [(8, 16), (8, 16)]),
        (SequenceFirst, words, [(4, 7)] * 5 + [(4, 8)]),
        (Mixed, floats, [(4, 5)] * 5 + [(3, 5)]),
        (Slopes, floats, [(12, 16)] * 5 + [(8, 16)]),
    ],
)
def test_a_new_size_in_mid_run_is_scored(module: Any, draw: Callable[..., Tensor], sizes: list[tuple[int, int]]) -> None:
    run = Run(module(), draw(3, 7))
    assert run.steps(draw(n, t, seed) for seed, (n, t) in enumerate(sizes)) < 1e-9


class Changes(nn.Module):
    """Begins to use its parameter in another way in mid-run, with the same shapes."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, 3)
        self.scale = nn.Parameter(torch.rand(D) + 0.5)
        self.register_buffer("table", torch.randn(T, D))
        self.way, self.changed = way, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.words(x))
        if not self.changed:
            return self.head(h * self.scale)
        if self.way == "unknown":
            return self.head(torch.einsum("ntd,d->ntd", h, self.scale))
        return self.head(h + self.scale * self.table)


@pytest.mark.parametrize("way", ["unknown", "known"])
def test_what_no_look_has_shown_can_be_run_again(way: str) -> None:
    """Neither silently wrong (t is a multiple of n) nor lost: the step is refused once."""
    run = Run(Changes(way), words(3))
    run.steps(words(8, seed=seed) for seed in range(5))
    run.model.changed = True
    with pytest.raises(RowOwnershipError, match="scale.*run this step again"):
        run.step(words(8, seed=5))
    assert run.step(words(8, seed=5)) < 1e-9


class Unpadded(nn.Module):
    """Padding is left out before the layers: [total, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        keep = x > 0
        y = self.head(torch.tanh(self.words(x[keep])))
        out = y.new_zeros(*x.shape, 3)
        out[keep] = y
        return out


def test_rows_that_depend_on_padding_are_refused_when_padding_comes() -> None:
    run = Run(Unpadded(), words(4, 6).clamp(min=1))
    assert run.steps(words(4, 6, seed).clamp(min=1) for seed in range(5)) < 1e-9
    x = words(4, 6, 5).clamp(min=1)
    x[1, 4:] = x[3, 4:] = 0  # 20 rows are a multiple of 4, too
    with pytest.raises(RowOwnershipError, match="exchanged"):
        run.step(x)

"""Compiled models: the same scores and weights as eager ones, and no graph beyond those of the first steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inrun.engine import Accountant
from inrun.errors import StepError
from inrun.methods import METHODS

#: Warnings of torch's own tracing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
WORDS, WIDTH = 13, 6
#: Rows and positions of the batches. Two sizes and lengths show all that is compiled for.
BATCHES = ((4, 5), (3, 7), (5, 9), (7, 10), (4, 5))
WARM = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.act = nn.ReLU(inplace=True)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(self.norm(x)) + 0.1))


class Net(nn.Module):
    """A table that is also the head, positions without a batch, blocks with a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def rows(n: int, seed: int, t: int = 5) -> Tensor:
    return torch.randint(0, WORDS, (n, t + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 4


class Counting:
    """A cheap compiler that counts graphs, and the calls of what it made."""

    def __init__(self, backend: str = "aot_eager") -> None:
        self.graphs, self.calls, self.backend = 0, 0, backend

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        made = torch._dynamo.lookup_backend(self.backend)(graph, inputs)

        def run(*args: Any) -> Any:
            self.calls += 1
            return made(*args)

        return run


@pytest.fixture
def counting():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def wrapped(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def by_block(model: Net, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
    return model


def blocks_wrapped(model: Net, backend: Any) -> Any:
    model.blocks = nn.ModuleList([wrapped(block, backend) for block in model.blocks])
    return model


#: How a model is compiled, and whether the accountant is made before or after, of the model or of what compiling returned.
WAYS = {
    "torch.compile": (wrapped, "of the compiled"),
    "torch.compile, accountant of the module inside": (wrapped, "of the module"),
    "torch.compile, after": (wrapped, "before"),
    "model.compile()": (in_place, "of the compiled"),
    "model.compile(), after": (in_place, "before"),
    "block.compile()": (by_block, "of the compiled"),
    "block.compile(), after": (by_block, "before"),
    "torch.compile(block)": (blocks_wrapped, "of the compiled"),
}


class Trained:
    """One run: contributions by step, credits, weights, and graphs compiled so far by step."""

    def __init__(
        self,
        method: str,
        dtype: torch.dtype,
        way: str | None = None,
        counting: Counting | None = None,
        scored: bool = True,
        batches: Any = BATCHES,
        accumulate: int = 1,
    ) -> None:
        compile_it, when = WAYS[way] if way else (lambda model, _: model, "of the compiled")
        model = net(dtype)
        called = model if when == "before" else compile_it(model, counting)
        given = called if when == "of the compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)  # so that rounding stays small
        accountant = None
        if scored:
            accountant = Accountant(given, optimizer, lambda m: loss_of(called if called is not model else m, rows(2, 99)), method)
        if when == "before":
            called = compile_it(model, counting)
        self.contributions: list[Tensor] = []
        self.graphs: list[int] = []
        for number, (n, t) in enumerate(batches):
            batch, ids = rows(n, number, t), torch.arange(n) + 100 * number
            parts = list(zip(batch.tensor_split(accumulate), ids.tensor_split(accumulate), strict=True))

            def forward_and_backward(step: Any, parts: Any = parts, called: Any = called) -> None:
                for tokens, own in parts:
                    if step is None:
                        loss_of(called, tokens).backward()
                        continue
                    with step.microbatch(own):
                        loss_of(called, tokens).backward()

            if accountant is None:
                forward_and_backward(None)
                optimizer.step()
            else:
                with accountant.step() as step:
                    forward_and_backward(step)
                    optimizer.step()
                self.contributions.append(accountant.last.contributions["validation"].clone())
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(called, rows(6, number))
            self.graphs.append(counting.graphs if counting else 0)
        self.names = [] if accountant is None else [row.parameter for row in accountant.coverage]
        self.credits = torch.zeros(0)
        if accountant is not None:
            accountant.close()
            self.credits = torch.tensor(accountant.scores()["score"].to_pylist(), dtype=torch.float64)
        self.weights = [p.detach().clone() for p in model.parameters()]
        before = counting.calls if counting else 0
        assert loss_of(called, rows(3, 7)).isfinite()
        self.compiled_again = counting is not None and counting.calls > before


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest difference, relative to the norm of each tensor."""
    return max(float((x.double() - y.double()).norm() / x.double().norm().clamp_min(1e-300)) for x, y in zip(a, b, strict=True))


FAST = [
    ("torch.compile", "whole"),
    ("torch.compile, accountant of the module inside", "whole"),
    ("torch.compile, after", "step"),
    ("model.compile()", "second"),
    ("block.compile()", "whole"),
    ("block.compile(), after", "first"),
    ("torch.compile(block)", "step"),
]
TABLE = [
    *FAST,
    *(pytest.param(way, method, marks=pytest.mark.slow) for way in WAYS for method in METHODS if (way, method) not in FAST),
]


@pytest.mark.parametrize(("way", "method"), TABLE)
def test_compiled_models_are_scored_like_eager_ones(way: str, method: str, counting: Counting) -> None:
    plain, unscored = Trained(method, torch.float64), Trained(method, torch.float64, scored=False)
    got = Trained(method, torch.float64, way, counting)
    assert distance(plain.contributions, got.contributions) < 1e-9
    assert distance([plain.credits], [got.credits]) < 1e-9
    assert distance(unscored.weights, got.weights) < 1e-9
    assert got.names == plain.names
    assert got.graphs[0] > 0
    # Neither new sizes nor lengths, nor the eval mode of the validation pass, compile anything after the first steps.
    assert got.graphs[WARM - 1] == got.graphs[-1]
    assert got.compiled_again


@pytest.mark.parametrize("method", ["whole", *(pytest.param(m, marks=pytest.mark.slow) for m in METHODS if m != "whole")])
def test_single_precision(method: str, counting: Counting) -> None:
    plain = Trained(method, torch.float32, batches=BATCHES[:3])
    got = Trained(method, torch.float32, "torch.compile", counting, batches=BATCHES[:3])
    assert distance(plain.contributions, got.contributions) < 1e-6
    assert distance(plain.weights, got.weights) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["torch.compile", "block.compile()"])
def test_inductor(way: str) -> None:
    torch._dynamo.reset()
    counting = Counting("inductor")
    plain = Trained("whole", torch.float64, batches=BATCHES[:3])
    got = Trained("whole", torch.float64, way, counting, batches=BATCHES[:3])
    assert distance(plain.contributions, got.contributions) < 1e-9
    assert distance(plain.weights, got.weights) < 1e-9
    torch._dynamo.reset()


def test_accumulation(counting: Counting) -> None:
    plain = Trained("whole", torch.float64, batches=BATCHES[:3], accumulate=2)
    got = Trained("whole", torch.float64, "block.compile()", counting, batches=BATCHES[:3], accumulate=2)
    assert distance(plain.contributions, got.contributions) < 1e-9
    assert distance(plain.weights, got.weights) < 1e-9


def one_step(called: Any, model: nn.Module) -> Accountant:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = Accountant(model, optimizer, lambda m: loss_of(m, rows(2, 99)), "first")
    with accountant.step(range(4)):
        loss_of(called, rows(4, 1)).backward()
        optimizer.step()
    return accountant


@pytest.mark.parametrize("way", [None, "model.compile()"])
def test_the_log_says_that_compiled_models_run_eagerly_in_steps(way: str | None, caplog: Any, counting: Counting) -> None:
    model = net(torch.float64)
    if way:
        WAYS[way][0](model, counting)
    with caplog.at_level(logging.INFO, "inrun"):
        one_step(model, model)
    assert sum("runs eagerly inside scored steps" in r.message for r in caplog.records) == (way is not None)


def test_a_compiled_function_around_the_model_is_scored(counting: Counting) -> None:
    model, plain = net(torch.float64), net(torch.float64)

    @torch.compile(backend=counting)
    def called(tokens: Tensor) -> Tensor:
        return model(tokens)

    called(rows(4, 1)[:, :-1])
    expected, got = one_step(plain, plain).last, one_step(called, model).last
    assert distance([expected.contributions["validation"]], [got.contributions["validation"]]) < 1e-9


def test_a_step_that_fails_leaves_compiling_on(counting: Counting) -> None:
    model = wrapped(net(torch.float64), counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = Accountant(model, optimizer, lambda m: loss_of(m, rows(2, 99)), "first")
    with pytest.raises(ZeroDivisionError), accountant.step(range(4)):
        loss_of(model, rows(4, 1)).backward()
        raise ZeroDivisionError
    before = counting.calls
    loss_of(model, rows(4, 1))
    assert counting.calls > before


def test_a_step_inside_of_compiled_code_is_refused(counting: Counting) -> None:
    model = net(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = Accountant(model, optimizer, lambda m: loss_of(m, rows(2, 99)), "first")

    @torch.compile(backend=counting)
    def train_step() -> None:
        with accountant.step(range(4)):
            loss_of(model, rows(4, 1)).backward()
            optimizer.step()

    with pytest.raises(StepError, match="compiled code"):
        train_step()

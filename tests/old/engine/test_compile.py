"""Compiled models: the same scores, the same weights, and no graph beyond those of the first steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from conditions import GAMES, Loop, Net, distance, loss_of, net, rows, train, validation
from inrun.errors import StepError

#: Warnings of torch's own tracing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

#: Batches that change their size and length: the first three show everything that is compiled for.
BATCHES = ((4, 5), (3, 7), (5, 9), (7, 10), (4, 5))
WARM = 3


class Counting:
    """A cheap compiler that counts graphs."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


@pytest.fixture
def counting():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def same(model: Any) -> Any:
    return model


def whole(backend: Any) -> Callable[[Any], Any]:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True)


def in_place(backend: Any) -> Callable[[Any], Any]:
    def compile_it(model: nn.Module) -> nn.Module:
        model.compile(backend=backend, fullgraph=True)
        return model

    return compile_it


def by_block(backend: Any) -> Callable[[Any], Any]:
    def compile_it(model: Net) -> nn.Module:
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
        return model

    return compile_it


#: What is compiled, and whether before the accountant is made.
WAYS = {
    "torch.compile, before": (whole, True),
    "torch.compile, after": (whole, False),
    "model.compile()": (in_place, True),
    "block.compile()": (by_block, True),
    "block.compile(), after": (by_block, False),
}
#: Every way, and every game: whole credit where most happens in compiled code.
SMALL = [
    ("torch.compile, before", "whole, sketch"),
    *((way, "first") for way in ("torch.compile, after", "model.compile()", "block.compile(), after")),
    *(("block.compile()", game) for game in GAMES),
]
TABLE = [
    *SMALL,
    *(pytest.param(way, game, marks=pytest.mark.slow) for way in WAYS for game in GAMES if (way, game) not in SMALL),
]


@pytest.mark.parametrize(("way", "game"), TABLE)
def test_compiled_models_are_scored_like_eager_ones(way: str, game: str, counting: Counting) -> None:
    compile_with, early = WAYS[way]
    place = "before" if early else "after"
    plain = Loop(GAMES[game], batches=BATCHES)
    compiled = Loop(GAMES[game], batches=BATCHES, **{place: compile_with(counting)})
    expected, unscored = train(plain), train(plain, scored=False)
    got = train(compiled, watch=lambda: counting.graphs)
    assert distance(expected.contributions, got.contributions) < 1e-9
    assert got.ids == expected.ids
    assert distance(unscored.weights, got.weights) < 1e-9
    assert got.watched[0] > 0
    # Neither new sizes nor lengths, nor the eval mode of the validation pass, compile anything after the first steps.
    assert got.watched[WARM - 1] == got.watched[-1]


def test_modes_and_validation_shapes_do_not_compile_again(counting: Counting) -> None:
    model = net()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = iter([*range(2, 9)] * 20)
    accountant = inrun.Accountant(compiled, optimizer, lambda m: loss_of(m, rows(next(sizes), 1)), credit="step", method="first")
    counts = []
    for step in range(8):
        with accountant.step(range(4)):
            loss_of(compiled, rows(4, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        compiled.eval()
        with torch.no_grad():
            loss_of(compiled, rows(6, step))
        compiled.train()
        counts.append(counting.graphs)
    assert counts[3] == counts[-1]


class WithScale(nn.Module):
    """A parameter that no rule knows, beside layers that have one."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x * self.scale)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scale, self.last = nn.Linear(3, 4), self.Scale(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(self.first(x)))


def _scores(compile_with: Callable[[nn.Module], Any]) -> Tensor:
    model = WithScale().double()
    called = compile_with(model)
    x = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(called, optimizer, lambda m: m(x[1]).square().mean(), credit="step", method="midpoint")
    with accountant.step(range(4)):
        called(x[0]).square().mean().backward()
        optimizer.step()
    return accountant.last.contributions["validation"]


def test_modules_without_a_rule_leave_compiled_code(counting: Counting) -> None:
    expected = _scores(same)
    got = _scores(lambda m: torch.compile(m, backend=counting))
    assert distance([expected], [got]) < 1e-9
    assert counting.graphs > 0


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "changes", "near"),
    [
        *((game, {}, 1e-9) for game in GAMES),
        # In single precision with SGD: the first steps of Adam divide by gradients that are mostly rounding.
        ("midpoint", {"dtype": torch.float32, "optimizer": sgd}, 1e-5),
    ],
)
def test_inductor(game: str, changes: dict[str, Any], near: float) -> None:
    torch._dynamo.reset()
    batches = ((4, 5), (4, 5), (3, 7))
    plain = Loop(GAMES[game], batches=batches, **changes)
    compiled = Loop(GAMES[game], batches=batches, before=by_block("inductor"), **changes)
    assert distance(train(plain).contributions, train(compiled).contributions) < near
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_on_a_whole_model_with_whole_credit() -> None:
    """GPT-2 of transformers in one graph, AdamW, sketched memory: scores and weights of the eager run."""
    import transformers as tr

    config = tr.GPT2Config(vocab_size=30, n_positions=12, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    g = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 30, (4, 8), generator=g) for _ in range(3)]
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = tr.GPT2LMHeadModel(config).double()
        called = torch.compile(model, backend="inductor") if compiles else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def loss(m: Any, tokens: Tensor) -> Tensor:
            return m(input_ids=tokens, labels=tokens, use_cache=False).loss

        with inrun.Accountant(called, optimizer, lambda m: loss(m, batches[0][:2]), credit="whole") as accountant:
            parts = []
            for number, tokens in enumerate(batches):
                with accountant.step(range(4 * number, 4 * number + 4)):
                    loss(called, tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                parts.append(accountant.last.contributions["validation"].clone())
        found.append((parts, [p.detach().clone() for p in model.parameters()]))
    torch._dynamo.reset()
    assert distance(found[0][0], found[1][0]) < 1e-5
    assert distance(found[0][1], found[1][1]) < 1e-5


def test_a_model_that_was_compiled_behind_our_back_is_named(counting: Counting) -> None:
    """The accountant has the module inside, and the loop calls what torch.compile made of it before: nobody is asked first."""
    model = net()
    compiled = torch.compile(model, backend=counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation, credit="step", method="first")
    with pytest.raises(StepError, match="what torch.compile returned"), accountant.step(range(4)):
        loss_of(compiled, rows(4, 1)).backward()
        optimizer.step()


def checkpointed(reentrant: bool) -> Callable[[Any], Any]:
    def change(model: Net) -> nn.Module:
        model.reentrant = reentrant
        return model

    return change


def halved(model: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return validation(model)


#: What comes on top of being compiled.
TOGETHER: dict[str, dict[str, Any]] = {
    "checkpoints": {"before": checkpointed(False)},
    "reentrant checkpoints": {"before": checkpointed(True)},
    "autocast": {"around": lambda: torch.autocast("cpu", dtype=torch.bfloat16), "validation": halved, "dtype": torch.float32},
    "accumulation": {"accumulate": 2},
}


@pytest.mark.parametrize(
    ("condition", "compile_with"),
    [
        *((condition, by_block) for condition in TOGETHER),
        pytest.param("checkpoints", whole, marks=pytest.mark.slow),
        pytest.param("autocast", whole, marks=pytest.mark.slow),
    ],
)
def test_compiled_under_other_conditions(condition: str, compile_with: Any, counting: Counting) -> None:
    changes = dict(TOGETHER[condition])
    change = changes.pop("before", same)
    batches = ((4, 5), (3, 7), (3, 7))
    plain = Loop(GAMES["whole, sketch"], batches=batches, before=change, **changes)
    compiled = Loop(GAMES["whole, sketch"], batches=batches, before=lambda m: compile_with(counting)(change(m)), **changes)
    expected, got = train(plain), train(compiled, watch=lambda: counting.graphs)
    assert distance(expected.contributions, got.contributions) < 1e-5
    assert distance(expected.weights, got.weights) < 1e-6
    assert got.watched[1] == got.watched[2] > 0

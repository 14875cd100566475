"""Norms of per-sample gradients and their cosines with the validation gradient, against one sample at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import inrun
from inrun.errors import ConfigurationError, CoverageError, OptimizerError, StepError
from inrun.old.layers import Formed, LookUp, Outer
from inrun.old.layers.squares import paired, squares, squares_of_sum
from problems import PROBLEMS
from reference import gradients, relative_error, sample_gradients

N, M = 4, 3

CHOICES = {
    "first, sgd": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"method": "first"}),
    "first, adamw": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), {"method": "first"}),
    "first, secant": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), {"method": "first", "update": "secant"}),
    "project": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), {"method": "first", "form": "project"}),
    "refresh": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"method": "first", "refresh": 1}),
    "midpoint": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), {"method": "midpoint"}),
    "whole": (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2), {"credit": "whole"}),
}
CASES = [(p, c) for p in PROBLEMS for c in CHOICES]


def flat(gradients_of: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients_of])


@pytest.mark.parametrize(("problem", "choice"), CASES)
def test_norms_and_cosines(problem: str, choice: str) -> None:
    chosen, (make, options) = PROBLEMS[problem], CHOICES[choice]
    torch.manual_seed(0)
    model = chosen.build().double()
    optimizer = make(model)
    parameters = list(model.parameters())
    held = chosen.draw(M, 99)
    # Its norms compute in single precision, batch by batch.
    accuracy = 1e-6 if problem == "llama" else 1e-9
    knows = "method" in options and options["method"] == "first"
    extra = ("norm", "cosine") if knows else ("norm",)
    sets = {"all": lambda m: chosen.losses(m(held), held).mean(), "points": lambda m: chosen.losses(m(held), held)}
    with inrun.Accountant(model, optimizer, sets, extra=extra, audit_every=1, **options) as accountant:
        for number in range(2):
            rows = chosen.draw(N, number)
            shares = lambda j, rows=rows: chosen.losses(model(rows[j : j + 1]), rows[j : j + 1])[0] / N  # noqa: E731
            g_n = torch.stack([flat(g) for g in sample_gradients(shares, N, parameters)])
            points = lambda m, held=held: (chosen.losses(m(held), held)[j] for j in range(M))  # noqa: E731
            columns = [flat(gradients(loss, parameters)) for loss in points(model, held)]
            towards = torch.stack([torch.stack(columns).mean(0), *columns])
            with accountant.step(range(N)):
                chosen.losses(model(rows), rows).mean().backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.3)
                optimizer.step()
                optimizer.zero_grad()
            last = accountant.last
            assert relative_error(last.norms, last.clip[0] * g_n.norm(dim=1)) < accuracy
            if not knows:
                assert last.cosines == {}
                continue
            expected = (g_n @ towards.t()) / g_n.norm(dim=1, keepdim=True) / towards.norm(dim=1)
            assert relative_error(last.cosines["all"], expected[:, 0]) < accuracy
            assert relative_error(last.cosines["points"], expected[:, 1:]) < accuracy


def test_contributions_stay_what_they_were() -> None:
    found = []
    for extra in ((), ("norm", "cosine")):
        torch.manual_seed(0)
        problem = PROBLEMS["gpt, tied"]
        model = problem.build().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        held = problem.draw(M, 99)
        with inrun.Accountant(model, optimizer, lambda m: problem.losses(m(held), held).mean(), method="first", extra=extra) as a:  # noqa: B023
            for number in range(3):
                rows = problem.draw(N, number)
                with a.step(range(N)):
                    problem.losses(model(rows), rows).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append((a.last, [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (told, same) = found
    assert plain.norms is None and plain.cosines == {}
    assert torch.equal(plain.contributions["validation"], told.contributions["validation"])
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize("frozen", [False, True], ids=["", "its weight frozen"])
def test_a_layer_that_runs_twice_unseen_is_an_error(frozen: bool) -> None:
    problem = PROBLEMS["repeating"]
    model = problem.build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = problem.draw(N, 0)
    with inrun.Accountant(
        model, optimizer, lambda m: problem.losses(m(rows), rows).mean(), method="first", extra="norm", check_rows=False
    ) as accountant:
        model.twice.weight.requires_grad_(not frozen)
        with pytest.raises(StepError, match="more than once"), accountant.step(range(N)):
            model(rows)
        with accountant.step(range(N)):
            problem.losses(model(rows), rows).mean().backward()
            optimizer.step()
        assert accountant.last.norms.shape == (N,)


class Saved(nn.Module):
    """A layer that runs once, or twice, in a segment that the backward recomputes."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.first, self.norm, self.inner, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.twice = twice

    def segment(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(self.norm(x)))
        return torch.tanh(self.inner(x)) if self.twice else x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.segment, self.first(x), use_reentrant=False))


def norms_of(build: Callable[[], nn.Module], push: Callable[[Tensor], None], n: int = N, tries: int = 1) -> tuple[Tensor, Tensor]:
    """Return norms as told, and one sample at a time; ``push`` runs the backwards of a loss, and all but the last try fail."""
    problem = PROBLEMS["perceptron"]
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, rows, held = list(model.parameters()), problem.draw(n, 0), problem.draw(M, 99)
    shares = lambda j: problem.losses(model(rows[j : j + 1]), rows[j : j + 1])[0] / n  # noqa: E731
    g_n = torch.stack([flat(g) for g in sample_gradients(shares, n, parameters)])
    with inrun.Accountant(
        model, optimizer, lambda m: problem.losses(m(held), held).mean(), method="first", extra="norm"
    ) as accountant:
        for left in reversed(range(tries)):
            expected = pytest.raises(StepError, match="several backwards") if left else contextlib.nullcontext()
            with expected, accountant.step(range(n)):
                push(problem.losses(model(rows), rows).mean())
                optimizer.step()
            optimizer.zero_grad()
        return accountant.last.norms, g_n.norm(dim=1)


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("twice", [False, True])
def test_segments_that_are_recomputed(twice: bool, n: int) -> None:
    """Of one row no look is taken; what runs twice is seen all the same."""
    told, expected = norms_of(lambda: Saved(twice), Tensor.backward, n)
    assert relative_error(told, expected) < 1e-9


def test_several_backwards_of_one_forward() -> None:
    """What two backwards push is one gradient: its norm is not made of theirs."""

    def push(loss: Tensor) -> None:
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()

    told, expected = norms_of(PROBLEMS["perceptron"].build, push, tries=2)
    assert relative_error(told, expected) < 1e-9


REFUSALS = [
    ({"extra": "length"}, ConfigurationError, "norm, cosine"),
    ({"extra": "cosine", "method": "midpoint"}, ConfigurationError, "lookahead"),
    ({"extra": "cosine", "credit": "whole"}, ConfigurationError, "lookahead"),
    ({"extra": "norm", "validation": None}, ConfigurationError, "merged steps"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSALS)
def test_refusals(options: dict[str, object], kind: type[Exception], text: str) -> None:
    model = nn.Linear(3, 2)
    given = {"validation": lambda m: m(torch.ones(1, 3)).sum(), **options}
    with pytest.raises(kind, match=text):
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_clipping_by_value_is_refused() -> None:
    """What a sample's gradient is then, as the optimizer used it, no factor tells."""
    problem = PROBLEMS["perceptron"]
    model, rows = problem.build().double(), problem.draw(N, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fn = lambda m: problem.losses(m(rows), rows).mean()  # noqa: E731
    with (
        inrun.Accountant(model, optimizer, fn, method="midpoint", extra="norm") as accountant,
        pytest.raises(OptimizerError, match="extra="),
        accountant.step(range(N)),
    ):
        problem.losses(model(rows), rows).mean().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()


def test_layers_that_are_not_told_apart_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2))
    with pytest.raises(CoverageError, match="LSTM"):
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m: m(torch.ones(1, 3))[0].sum(), extra="norm")


# Shapes


def shapes_of(seed: int, t: int) -> dict[str, object]:
    g = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(3, t, size, generator=g, dtype=torch.float64) for size in (7, 4))
    tokens = torch.randint(0, 7, (3, t), generator=g)
    return {
        "outer": Outer(x, y),
        "formed": Formed(torch.randn(3, 7, 4, generator=g, dtype=torch.float64)),
        "look-up": LookUp(tokens, y, 7, None),
        "padded": LookUp(tokens, y, 7, 2),
    }


@pytest.mark.parametrize("t", [1, 2, 9])
@pytest.mark.parametrize("first", ["outer", "formed", "look-up", "padded"])
@pytest.mark.parametrize("second", ["outer", "formed", "look-up", "padded"])
def test_pairs_of_shapes(first: str, second: str, t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inrun.old.layers.squares.SCRATCH_BYTES", 2 * 7 * 4 * 8)
    a, b = shapes_of(0, t)[first], shapes_of(1, t + 1)[second]
    torch.testing.assert_close(paired(a, b), (a.form() * b.form()).sum((1, 2)), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(squares(a), a.form().square().sum((1, 2)), rtol=1e-11, atol=1e-11)
    both = (a.form() + b.form()).square().sum((1, 2))
    torch.testing.assert_close(squares_of_sum([a, b]), both, rtol=1e-11, atol=1e-11)
    # The control: uses of a weight are not apart.
    assert relative_error(squares(a) + squares(b), both) > 1e-3


@pytest.mark.parametrize("extra", [("norm",), ("norm", "cosine")])
@pytest.mark.parametrize("kind", ["memory", "disk", "saved"])
def test_the_ledger_keeps_them(kind: str, extra: tuple[str, ...], tmp_path: Path) -> None:
    """As columns of contributions: norms with every label, cosines each with its own."""
    problem = PROBLEMS["perceptron"]
    held = problem.draw(M, 99)
    sets = {"all": lambda m: problem.losses(m(held), held).mean(), "points": lambda m: problem.losses(m(held), held)}
    model = problem.build().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path, expected = tmp_path / "run", {}
    ledger = path if kind == "disk" else None
    with inrun.Accountant(model, optimizer, sets, extra=extra, method="first", credit="step", ledger=ledger) as accountant:
        for number in range(2):
            rows = problem.draw(N, number)
            with accountant.step(range(N)):
                problem.losses(model(rows), rows).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            last = accountant.last
            for label in ("all", *(f"points[{j}]" for j in range(M))):
                name, _, place = label.rstrip("]").partition("[")
                for n in range(N):
                    cosine = None
                    if "cosine" in extra:
                        cosine = float(last.cosines[name][n, int(place)] if place else last.cosines[name][n])
                    expected[number, n, label] = float(last.norms[n]), cosine
        if kind == "saved":
            accountant.save(path)
    source = accountant.ledger if kind == "memory" else inrun.Ledger.open(path)
    found = {(r["step"], r["sample_id"], r["validation"]): (r["norm"], r.get("cosine")) for r in source.contributions().to_pylist()}
    assert found.keys() == expected.keys()
    for key, wanted in expected.items():
        norm, cosine = wanted
        assert found[key] == (pytest.approx(norm, rel=1e-6), None if cosine is None else pytest.approx(cosine, rel=1e-6)), key

"""The view ``specific``: known answers, and that its scores are those of a contrast of validation losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import inrun
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.specific import Rows, common_part, moments, specific


def books(values: dict[str, list[list[float]]], ids: list[list[int]] | None = None) -> MemoryLedger:
    """A run of a step per list, with the contributions given by label."""
    ledger = MemoryLedger()
    steps = len(next(iter(values.values())))
    for step in range(steps):
        given = {label: np.array(rows[step], np.float32) for label, rows in values.items()}
        n = len(next(iter(given.values())))
        ledger.write(StepRecord(step, np.array(ids[step]) if ids else np.arange(n) + n * step, given))
    return ledger


def scores(ledger, name: str, view: str = "specific") -> list[float]:
    return ledger.scores(name, view)["score"].to_pylist()


KNOWN = {
    "nothing in common": ({"a": [[1.0, 0.0]], "b": [[0.0, 1.0]]}, {"a": [1.0, 0.0], "b": [0.0, 1.0]}),
    # b = ⟨a, b⟩ / (⟨b, b⟩ + λ⟨b, b⟩): half of what two equal sets share is left to each.
    "all in common": ({"a": [[1.0, 2.0]], "b": [[1.0, 2.0]]}, {"a": [0.5, 1.0], "b": [0.5, 1.0]}),
    "opposite": ({"a": [[1.0, 2.0]], "b": [[-1.0, -2.0]]}, {"a": [0.5, 1.0], "b": [-0.5, -1.0]}),
    "another size": ({"a": [[1.0, 2.0]], "b": [[10.0, 20.0]]}, {"a": [0.5, 1.0], "b": [5.0, 10.0]}),
    "one set": ({"a": [[3.0, -1.0]]}, {"a": [3.0, -1.0]}),
    "one set in folds": ({"a#0": [[3.0, -1.0]], "a#1": [[1.0, 1.0]]}, {"a": [2.0, 0.0]}),
    "a set that is all zero": ({"a": [[3.0, -1.0]], "b": [[0.0, 0.0]]}, {"a": [3.0, -1.0], "b": [0.0, 0.0]}),
    # Folds stay apart as predictors: a is b's first fold, and its second is at right angles to it. ⟨b̄, a⟩ = 1/2, of 1 + λ = 2.
    "folds predict by themselves": (
        {"a": [[1.0, 0.0]], "b#0": [[1.0, 0.0]], "b#1": [[0.0, 1.0]]},
        {"a": [0.5, 0.0], "b": [0.5 - 0.25, 0.5]},
    ),
    "points are sets": ({"a[0]": [[1.0, 2.0]], "a[1]": [[1.0, 2.0]]}, {"a[0]": [0.5, 1.0], "a[1]": [0.5, 1.0]}),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case: str) -> None:
    values, truth = KNOWN[case]
    for name, expected in truth.items():
        assert scores(books(values), name) == pytest.approx(expected, abs=1e-12)


def test_what_helps_everybody_falls_behind_what_helps_one() -> None:
    """Three sets, a sample that is worth 5 to each and one that is worth 4 to the first alone."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 200)) + rng.normal(size=200)
    rows[:, 0], rows[:, 1] = 5.0, [4.0, 0.0, 0.0]
    ledger = books({name: [row.tolist()] for name, row in zip("abc", rows, strict=True)})
    plain, seen = scores(ledger, "a", "plain"), scores(ledger, "a")
    assert plain[0] > plain[1]  # the control
    assert seen[1] > seen[0]


def test_other_sets_count_although_they_are_not_asked_for() -> None:
    values = {"a": [[1.0, 2.0]], "b": [[1.0, 2.0]]}
    both = books(values).scores(view="specific")
    alone = books(values).scores("a", "specific")
    assert alone["score"].to_pylist() == both["score"].to_pylist()[:2]


def test_a_sample_that_is_twice_in_a_step_has_one_use_there() -> None:
    twice = books({"a": [[1.0, 2.0, 5.0]], "b": [[2.0, 1.0, 1.0]]}, [[7, 7, 8]])
    once = books({"a": [[3.0, 5.0]], "b": [[3.0, 1.0]]}, [[7, 8]])
    assert scores(twice, "a") == pytest.approx(scores(once, "a"), rel=1e-12)
    assert twice.scores("a", "specific")["times_used"].to_pylist() == [2, 1]


def test_sets_that_some_steps_do_not_have() -> None:
    ledger = MemoryLedger()
    ledger.write(StepRecord(0, np.array([0, 1]), {"a": np.float32([1, 2]), "b": np.float32([1, 2])}))
    ledger.write(StepRecord(1, np.array([2]), {"a": np.float32([4])}))
    b = (1 + 4) / (2 * (1 + 4))
    assert scores(ledger, "a") == pytest.approx([1 - b, 2 - 2 * b, 4.0])
    half = (1 + 4) / (2 * (1 + 4 + 16))
    assert scores(ledger, "b") == pytest.approx([1 - half, 2 - 2 * half])


def test_values_that_are_not_finite_do_not_spread() -> None:
    rows = Rows(np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([1.0, 1.0, math.nan, 1.0]))
    common = common_part(moments(rows.matrix(2)[0]), [[0], [1]])
    found = specific(rows, [[0], [1]], common)
    assert found[:2] == pytest.approx([0.5, 0.5])
    assert math.isnan(found[2])


def test_errors_over_folds_are_those_of_the_folds(tmp_path) -> None:
    values = {"a#0": [[3.0, -1.0]], "a#1": [[1.0, 1.0]], "b": [[1.0, 0.0]]}
    disk = Ledger.open(books(values).save(tmp_path / "run", {}))
    plain, seen = (disk.scores("a", view) for view in ("plain", "specific"))
    # What is taken off is the same for all folds.
    assert seen["standard_error"].to_pylist() == pytest.approx(plain["standard_error"].to_pylist())
    assert seen["score"].to_pylist() != plain["score"].to_pylist()


@pytest.mark.parametrize("options", [{"method": "first"}, {"method": "step"}, {"method": "whole", "sketch": "exact"}])
def test_specific_scores_are_the_scores_of_a_contrast_of_losses(options: dict[str, Any]) -> None:
    """The same run again, with ℓ_a − b ℓ_b as its validation loss: linearity makes them the same."""
    torch.manual_seed(0)
    data, held = torch.randn(24, 5, dtype=torch.float64), {name: torch.randn(6, 6, dtype=torch.float64) for name in "ab"}
    first = torch.randn(1, 5, dtype=torch.float64)

    def score(losses):
        model = torch.nn.Linear(5, 1, bias=False).double()
        model.weight.data.copy_(first)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        with inrun.Accountant(model, optimizer, losses, **options) as accountant:
            for step in range(6):
                ids = np.arange(24).reshape(6, 4)[step]
                with accountant.step(ids.tolist()):
                    mse_loss(model(data[ids]).squeeze(1), data[ids].sum(1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return accountant

    def loss(name):
        return lambda model: mse_loss(model(held[name][:, :5]).squeeze(1), held[name][:, 5])

    ledger = score({name: loss(name) for name in "ab"}).ledger
    values = [np.array(scores(ledger, name, "plain")) for name in "ab"]
    b = float(values[0] @ values[1] / (2 * values[1] @ values[1]))
    contrast = score({"c": lambda model: loss("a")(model) - b * loss("b")(model)}).ledger
    found = np.array(scores(ledger, "a"))
    assert np.allclose(found, scores(contrast, "c"), atol=1e-6 * np.abs(values[0]).max())
    assert not np.allclose(found, values[0], atol=1e-2 * np.abs(values[0]).max())  # the control: plain scores are others

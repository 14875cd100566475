"""Baselines: one table for all, and answers that are known beforehand."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import inrun.baselines
from inrun.baselines import BASELINES, register, run
from inrun.errors import ConfigurationError, IdsError, InrunError, ValidationError
from inrun.ledger.schema import SCORES
from reference import gradients
from tiny import batch, next_token_loss, tiny, validation

IDS = [7, 3, 11, 5]
#: Files of the room that are no baseline.
SHARED = {"checks", "__init__", "registry", "retraining", "extra", "subsets", "gradients", "kronecker", "projection"}


def scores(table: pa.Table, name: str = "validation") -> dict[int, float]:
    return {row["sample_id"]: row["score"] for row in table.to_pylist() if row["validation"] == name}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A baseline registered for the time of a test: the sample's id, times a number."""
    monkeypatch.setitem(BASELINES, "made_up", None)  # put back what was there, nothing, afterwards

    @register("made_up", "ids times a number", unit="none")
    def made_up(sample_ids, validation, *, factor, offset=0.0):
        return dict.fromkeys(validation, sample_ids * factor + offset)


def test_every_file_is_registered() -> None:
    files = {path.stem for path in Path(inrun.baselines.__file__).parent.glob("*.py")}
    assert files - SHARED == BASELINES.keys()
    assert all(b.name == name and b.summary and b.unit for name, b in BASELINES.items())
    assert BASELINES["gradient_cosine"].needs == ["model", "sample_loss"]
    assert BASELINES["random"].options == {"seed": 0}


def test_baselines_on_subsets_share_their_options() -> None:
    drawing = {"subsets": 1000, "share": 0.5, "draw": "size", "seed": 0, "jobs": 1, "cells": None, "tell": None}
    assert BASELINES["empirical_influence"].needs == BASELINES["datamodels"].needs == ["utility"]
    assert BASELINES["empirical_influence"].options == drawing
    assert BASELINES["datamodels"].options == {**drawing, "regression": "lasso", "strength": None}
    with pytest.raises(
        ConfigurationError, match="'empirical_influence' does not take strength; it needs utility, and takes subsets"
    ):
        run("empirical_influence", IDS, None, utility=None, strength=1.0)


def test_the_table_is_that_of_scores(made_up: None) -> None:
    table = run("made_up", IDS, {"b": None, "a": None}, factor=2)
    assert table.schema.equals(SCORES)
    assert table.schema.metadata == {b"baseline": b"made_up", b"unit": b"none"}
    assert table["validation"].to_pylist() == ["a"] * 4 + ["b"] * 4
    assert table["sample_id"].to_pylist() == [3, 5, 7, 11] * 2
    assert table["score"].to_pylist() == [6, 10, 14, 22] * 2
    for unknown in ("standard_error", "times_used", "first_step", "last_step"):
        assert table[unknown].null_count == len(table)
    assert scores(run("made_up", np.array([2], np.uint64), None, factor=1, offset=0.5)) == {2: 2.5}


def test_what_is_wrong_is_named(made_up: None) -> None:
    for arguments, options, error, words in (
        (("nonsense", IDS, None), {}, ConfigurationError, "available: random, gradient_cosine"),
        (("made_up", IDS, None), {}, ConfigurationError, "needs factor"),
        (("made_up", IDS, None), {"factor": 1, "seed": 1}, ConfigurationError, "does not take seed.*takes offset"),
        (("made_up", IDS, {}), {"factor": 1}, ConfigurationError, "no validation set"),
        (("made_up", IDS, {1: None, "a": None}), {"factor": 1}, ConfigurationError, "called 1, a int; names must be text"),
        (("made_up", [1, 2, 1], None), {"factor": 1}, IdsError, "sample 1 is given 2 times"),
        (("made_up", [0.5], None), {"factor": 1}, IdsError, "float64"),
        (("made_up", [], None), {"factor": 1}, IdsError, "not empty"),
        (("made_up", np.array([2**63], np.uint64), None), {"factor": 1}, IdsError, "64-bit"),
        (("made_up", IDS, None), {"factor": math.nan}, InrunError, "4 of 4 samples no finite score.*sample 7"),
    ):
        with pytest.raises(error, match=words):
            run(*arguments, **options)


def test_random_is_seeded_and_knows_nothing() -> None:
    ids = np.arange(4000)
    table = run("random", ids, {"a": None, "b": None}, seed=3)
    assert table.equals(run("random", ids, {"a": None, "b": None}, seed=3))
    assert scores(table, "a") == scores(run("random", ids, {"a": None}, seed=3), "a")
    a, b, other = (np.array(list(x.values())) for x in (scores(table, "a"), scores(table, "b"), scores(run("random", ids, None))))
    assert abs(a.mean()) < 0.1 and abs(a.std() - 1) < 0.1
    for x, y in ((a, b), (a, other), (a, ids)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.06


def test_cosines_of_a_linear_model() -> None:
    """The gradient of wᵀx is x, so that scores are cosines of inputs."""
    model = nn.Linear(2, 1, bias=False)
    inputs = torch.tensor([[1.0, 0.0], [3.0, 3.0], [0.0, -2.0], [0.0, 0.0]])
    table = run(
        "gradient_cosine",
        IDS,
        {"right": lambda m: m(torch.tensor([5.0, 0.0])).sum(), "up": lambda m: m(torch.tensor([0.0, 0.1])).sum()},
        model=model,
        sample_loss=lambda m, k: m(inputs[k]).sum(),
    )
    half = math.sqrt(0.5)
    assert scores(table, "right") == pytest.approx({7: 1.0, 3: half, 11: 0.0, 5: 0.0})
    assert scores(table, "up") == pytest.approx({7: 0.0, 3: half, 11: -1.0, 5: 0.0})


def test_cosines_of_a_gpt_are_those_of_its_gradients() -> None:
    model, rows = tiny(dropout=0.3), batch(4, 1)
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    state, noise = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    with torch.no_grad():
        table = run("gradient_cosine", IDS, validation(), model=model, sample_loss=lambda m, k: next_token_loss(m, rows[k : k + 1]))
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(noise, torch.get_rng_state())
    model.eval()
    parameters = list(model.parameters())
    flat = [
        torch.cat([g.flatten() for g in gradients(loss, parameters)])
        for loss in [validation()(model), *(next_token_loss(model, row[None]) for row in rows)]
    ]
    expected = {i: float(torch.cosine_similarity(flat[0], g, dim=0)) for i, g in zip(IDS, flat[1:], strict=True)}
    assert scores(table) == pytest.approx(expected, rel=1e-10)


def test_losses_that_are_none() -> None:
    model, ones = nn.Linear(2, 1), torch.ones(2)
    losses = {"model": model, "sample_loss": lambda m, k: m(ones).sum()}
    with pytest.raises(ValidationError, match=r"sample 7 returned a tensor of shape \[1\]"):
        run("gradient_cosine", IDS, lambda m: m(ones).sum(), model=model, sample_loss=lambda m, k: m(ones))
    with pytest.raises(ValidationError, match="validation 'v' returned a float"):
        run("gradient_cosine", IDS, {"v": lambda m: 1.0}, **losses)
    model.requires_grad_(False)
    with pytest.raises(ConfigurationError, match="no parameter"):
        run("gradient_cosine", IDS, {"v": lambda m: 1.0}, **losses)


def test_import_is_light() -> None:
    subprocess.run([sys.executable, "-c", "import sys, inrun.baselines; assert 'torch' not in sys.modules"], check=True)

"""`inrun train` under whole credit: what is open when a run stops is in its checkpoint, and is settled once, at the end."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import inrun
from inrun.training.checkpoint import CREDIT, checkpoints_of
from inrun.training.config import make_config
from inrun.training.session import train
from small_run import corpus, settings

#: A rate that does not depend on the planned length; and betas that forget within 7 steps, so that windows pass.
LEVEL = {"lr": 3e-3, "final_lr": 3e-3, "warmup": 4, "betas": [0.5, 0.9]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path)
    return tmp_path


def stop_after(steps: int):
    count = iter(range(1000))
    return lambda: next(count) >= steps - 1


def books(run: Path) -> list:
    reader = inrun.Ledger.open(run)
    return [reader.contributions(), reader.credits(), reader.accounts(), reader.scores()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(str(checkpoints_of(run)[-1] / "model.safetensors"))


@pytest.mark.parametrize(
    ("sketch", "order"),
    [
        pytest.param(256, ("broken", "unbroken"), id="sketch, broken first"),
        pytest.param("exact", ("unbroken", "broken"), id="exact, unbroken first", marks=pytest.mark.slow),
        pytest.param(256, ("unbroken", "broken"), id="sketch, unbroken first", marks=pytest.mark.slow),
        pytest.param("exact", ("broken", "unbroken"), id="exact, broken first", marks=pytest.mark.slow),
    ],
)
def test_stopped_inside_windows_and_resumed_is_bitwise_unbroken(folder, sketch, order):
    more = {"steps": 30, "optimizer": LEVEL, "scoring": {"sketch": sketch}, "batch": {"accumulation": 2}}
    for name in order:
        config = make_config(settings(folder, name, **more))
        if name == "broken":
            for after in (3, 9, 11):  # at steps 3, 12 and 23, with checkpoints of its own in between
                assert not train(config, resume=True, stop=stop_after(after)).finished
                reader = inrun.Ledger.open(folder / name)
                assert 0 < reader.credits().num_rows < reader.contributions().num_rows or after == 3
        assert train(config, resume=True).finished
    a, b = weights(folder / "broken"), weights(folder / "unbroken")
    assert all(torch.equal(a[k], b[k]) for k in b)
    for mine, theirs in zip(books(folder / "broken"), books(folder / "unbroken"), strict=True):
        assert mine.num_rows and mine.equals(theirs)
    settled = books(folder / "unbroken")[1]
    assert settled.num_rows == 30 * 4 * 3 and settled["step"].to_pylist() == sorted(settled["step"].to_pylist())


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.9)], ids=["no window ends", "windows of 7 steps"])
def test_the_credits_of_a_run_add_up_to_what_its_steps_paid(folder, betas):
    """A window ends when 99 % of a use's push is spent: what is left then is in the account of data, and nobody's."""
    train(make_config(settings(folder, steps=30, optimizer={**LEVEL, "betas": betas}, scoring={"audit_every": 1})))
    reader = inrun.Ledger.open(folder / "run")
    assert reader.about["method"] == "whole" and reader.about["sketch"] > 0
    credits, accounts = reader.credits(), reader.accounts()
    for label in ("code", "all#0", "all#1"):
        paid = sum(r["credit"] for r in credits.to_pylist() if r["validation"] == label)
        rows = [r for r in accounts.to_pylist() if r["validation"] == label]
        data = sum(r["data"] for r in rows)
        assert paid == pytest.approx(data, rel=1e-4) if betas[0] == 0.9 else 0.99 * data < paid < data
        fall = sum(r["loss_before"] - r["loss_after"] for r in rows)
        residual = sum(r["residual"] for r in rows)
        assert data + residual + sum(r["decay"] + r["inherited"] + r["rounding"] for r in rows) == pytest.approx(fall, rel=1e-3)
        assert abs(residual) < 0.02 * abs(fall)
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-2])["domains"]
    assert sum(last["code"].values()) == pytest.approx(
        sum(r["credit"] for r in credits.to_pylist() if r["validation"] == "code"), rel=1e-5
    )  # curves are the credit so far, open windows too


def test_a_run_that_stops_settles_nothing_and_a_finished_one_all(folder):
    config = make_config(settings(folder))
    assert not train(config, stop=stop_after(7)).finished
    scores = inrun.Ledger.open(folder / "run").scores()
    assert inrun.Ledger.open(folder / "run").credits().num_rows == 0 and scores["pending"].to_numpy().sum() == 7 * 4 * 2
    assert train(config, resume=True).finished
    assert inrun.Ledger.open(folder / "run").scores()["pending"].to_numpy().sum() == 0
    before = books(folder / "run")
    assert train(config, resume=True).finished  # asked once more: the same, and not twice
    assert all(x.equals(y) for x, y in zip(before, books(folder / "run"), strict=True))


def test_a_run_that_fails_settles_nothing(folder):
    config = make_config(settings(folder, checkpoints={"every": 5}))

    def fail(status):
        if status.step == 7:
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        train(config, tell=fail)
    assert inrun.Ledger.open(folder / "run").credits().num_rows == 0
    assert train(config, resume=True).finished
    train(make_config(settings(folder, "unbroken", checkpoints={"every": 5})))
    assert all(x.equals(y) for x, y in zip(books(folder / "run"), books(folder / "unbroken"), strict=True))


def test_a_finished_run_can_be_made_longer(folder):
    """What its end had cut off is paid after all."""
    train(make_config(settings(folder, steps=12, optimizer=LEVEL)))
    cut = inrun.Ledger.open(folder / "run").credits()
    train(make_config(settings(folder, steps=30, optimizer=LEVEL)), resume=True)
    train(make_config(settings(folder, "long", steps=30, optimizer=LEVEL)))
    assert all(x.equals(y) for x, y in zip(books(folder / "run"), books(folder / "long"), strict=True))
    whole = inrun.Ledger.open(folder / "run").credits()
    assert max(whole["step"].to_pylist()) == 29 and min(cut["paid"].to_pylist()) < 0.6
    early = [p for s, p in zip(whole["step"].to_pylist(), whole["paid"].to_pylist(), strict=True) if s == 11]
    assert min(early) > 0.99


def test_a_checkpoint_with_damaged_windows_is_passed_over(folder, caplog):
    config = make_config(settings(folder, checkpoints={"every": 5}))
    train(config)
    train(make_config(settings(folder, "unbroken", checkpoints={"every": 5})))
    newest = checkpoints_of(folder / "run")[-1] / CREDIT
    data = bytearray(newest.read_bytes())
    data[-9] ^= 1
    newest.write_bytes(data)
    assert train(config, resume=True).finished
    assert f"{CREDIT} is damaged" in caplog.text and "goes on from step 10" in caplog.text
    assert all(x.equals(y) for x, y in zip(books(folder / "run"), books(folder / "unbroken"), strict=True))


@pytest.mark.parametrize("method", ["step", "first", "second"])
def test_other_methods_have_no_windows(folder, method):
    """A use is worth what its own step gave it; with method="step" that is settled at once, with the error of its sketch."""
    train(make_config(settings(folder, scoring={"method": method})), stop=stop_after(3))
    reader = inrun.Ledger.open(folder / "run")
    assert reader.about["method"] == method and reader.contributions().num_rows == 3 * 4 * 3
    assert reader.scores()["pending"].to_numpy().sum() == 0
    found = reader.credits()
    assert found.num_rows == (3 * 4 * 3 if method == "step" else 0) and set(found["paid"].to_pylist()) <= {1.0}
    keys = ["step", "validation", "sample_id"]
    own, paid = (
        x.to_pandas().sort_values([*keys, value]) for x, value in ((reader.contributions(), "contribution"), (found, "credit"))
    )
    assert method != "step" or np.allclose(own["contribution"], paid["credit"], rtol=1e-5, atol=1e-9)


def test_the_end_says_what_it_cut_off(folder, caplog):
    with caplog.at_level(logging.INFO, "inrun"):
        train(make_config(settings(folder)))
    assert "settled before their window has passed" in caplog.text
    paid = inrun.Ledger.open(folder / "run").credits()["paid"].to_numpy()
    assert np.all((paid > 0) & (paid < 1))

"""`inrun train` in several processes: the books and weights of one, whatever their number and whatever kills them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from several import Ranks, free_port, train_in

import inrun
from inrun.errors import ConfigurationError
from inrun.ledger.verify import verify
from inrun.training.checkpoint import checkpoints_of
from inrun.training.config import make_config
from inrun.training.processes import launched
from inrun.training.session import train
from long import LONG
from small_run import corpus, settings

#: Relative to the largest figure of its kind, in float32 and with AdamW.
CLOSE = 1e-5
#: Of keys' biases. Attention does not depend on them: their gradient is nothing but rounding, and AdamW's first moves divide by it.
#: Plain training differs by as much (tests/engine/distributed/test_rounding.py).
CLOSE_KEYS = 2e-4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus(tmp_path)
    return tmp_path


def configured(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """A run without dropout, whose masks would depend on the number of processes."""
    model = {"context": 24, "width": 16, "layers": 1, "heads": 2, "dropout": 0.0}
    return settings(folder, name, **{"model": model, "distributed": {"timeout": 120.0}, **more})


def off(a: Any, b: Any) -> float:
    """Return the largest difference as a share of the largest number."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape and (np.isnan(a) == np.isnan(b)).all()
    return float(np.nanmax(np.abs(a - b), initial=0.0) / max(np.nanmax(np.abs(a), initial=0.0), 1e-30))


def check_same(one: Path, other: Path) -> None:
    """Two runs have the same books, losses and weights, to rounding."""
    left, right = inrun.Ledger.open(one), inrun.Ledger.open(other)
    order = {"contributions": ["step", "validation", "sample_id", "contribution"], "credits": ["step", "validation", "row"]}
    for table, keys in order.items():
        a, b = (getattr(x, table)().to_pandas().sort_values(keys).reset_index(drop=True) for x in (left, right))
        names = [name for name in keys if name != "contribution"]
        assert a[names].equals(b[names])
        value = "contribution" if table == "contributions" else "credit"
        assert off(a[value], b[value]) < CLOSE
        if table == "credits" and len(a):
            assert (
                a["sample_id"].equals(b["sample_id"]) and off(a["error"], b["error"]) < CLOSE and off(a["paid"], b["paid"]) < CLOSE
            )
    a, b = left.scores().to_pandas(), right.scores().to_pandas()
    assert a[["sample_id", "validation", "times_used", "pending"]].equals(b[["sample_id", "validation", "times_used", "pending"]])
    assert off(a["score"], b["score"]) < CLOSE
    a, b = left.accounts().to_pandas(), right.accounts().to_pandas()
    assert a[["step", "validation", "n_samples", "skipped"]].equals(b[["step", "validation", "n_samples", "skipped"]])
    for name in ("data", "spread", "loss_before", "lr", "clip"):
        assert off(a[name], b[name]) < CLOSE, name
    for name in ("decay", "residual"):  # differences of losses; methods of the paper know no decay
        x, y = (z[name].to_numpy(np.float64) for z in (a, b))
        assert (np.isnan(x) == np.isnan(y)).all()
        assert np.abs(x - y)[~np.isnan(x)].max(initial=0.0) < CLOSE * a["loss_before"].max(), name
    assert verify(other).good
    same_weights(one, other)
    x, y = metrics(one), metrics(other)
    assert [row["step"] for row in x] == [row["step"] for row in y]
    assert off([r["loss"] for r in x if "loss" in r], [r["loss"] for r in y if "loss" in r]) < CLOSE
    for p, q in zip(x, y, strict=True):
        for name, totals in p.get("domains", {}).items():
            assert off(list(totals.values()), [q["domains"][name][d] for d in totals]) < CLOSE


def same_weights(one: Path, other: Path) -> None:
    a, b = (load_file(checkpoints_of(run)[-1] / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        apart = np.abs(a[name] - b[name]) / np.abs(a[name]).max()
        if name.endswith("qkv.bias"):
            queries, keys, values = np.split(apart, 3)
            assert keys.max() < CLOSE_KEYS
            apart = np.concatenate([queries, values])
        assert apart.max() < CLOSE, name


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


RUNS: dict[str, dict[str, Any]] = {
    "whole credit, folds": {},
    "whole credit, exact, a batch that is no multiple": {
        "scoring": {"sketch": "exact", "audit_every": 4},
        "batch": {"size": 5},
    },
    "step, accumulated": {"scoring": {"method": "step", "audit_every": 4}, "batch": {"size": 8, "accumulation": 2}},
    "fsdp": {"distributed": {"mode": "fsdp", "timeout": 120.0}},
    "fsdp, first, accumulated": {
        "distributed": {"mode": "fsdp", "timeout": 120.0},
        "scoring": {"method": "first", "audit_every": 4},
        "batch": {"size": 8, "accumulation": 2},
    },
    "validation rows that are taken by all": {"scoring": {"method": "first"}, "validation": {"all": {"split": "val", "rows": 3}}},
}


#: The first one is what test_a_rank_that_dies_is_named_in_bounded_time compares too.
SLOW = (
    "whole credit, folds",
    "whole credit, exact, a batch that is no multiple",
    "step, accumulated",
    "fsdp, first, accumulated",
    "validation rows that are taken by all",
)


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in RUNS])
def test_two_processes_leave_the_books_of_one(folder: Path, name: str) -> None:
    """Without whole credit, of one that adds up the slices that ranks have: first steps divide by the gradient as it is rounded."""
    batch = dict(RUNS[name].get("batch", {}))
    if "method" in RUNS[name].get("scoring", {}):
        batch["accumulation"] = 2 * batch.get("accumulation", 1)
    train(make_config(configured(folder, "one", **{**RUNS[name], **({"batch": batch} if batch else {})})))
    found = train_in(folder, 2, configured(folder, "two", **RUNS[name]))
    assert [x["finished"] for x in found] == [True, True], found
    check_same(folder / "one", folder / "two")
    files = {f.name.split("-")[0] for f in (folder / "two" / "contributions").iterdir()}
    assert files == {"r0", "r1"}


@pytest.mark.slow
def test_four_processes_leave_the_books_of_one(folder: Path) -> None:
    more = {"batch": {"size": 9}}
    train(make_config(configured(folder, "one", **more)))
    assert all(x.get("finished") for x in train_in(folder, 4, configured(folder, "four", **more)))
    check_same(folder / "one", folder / "four")


@pytest.mark.parametrize(
    ("scoring", "mode"),
    [
        pytest.param({}, "ddp", id="whole"),
        pytest.param({}, "fsdp", id="whole, split", marks=pytest.mark.slow),
        pytest.param({"method": "first"}, "ddp", id="first", marks=pytest.mark.slow),
        pytest.param({"method": "first"}, "fsdp", id="first, split", marks=pytest.mark.slow),
        pytest.param({"enabled": False}, "ddp", id="plain", marks=pytest.mark.slow),
        pytest.param({"enabled": False}, "fsdp", id="plain, split", marks=pytest.mark.slow),
    ],
)
def test_runs_go_on_with_another_number_of_processes(folder: Path, scoring: dict[str, Any], mode: str) -> None:
    """1, then 2, which are stopped by a wish of one rank, then 1 again."""
    more = {"scoring": scoring, "distributed": {"mode": mode, "timeout": 120.0}}
    one, other = configured(folder, "one", **more), configured(folder, "other", **more)
    train(make_config(one))
    stop = iter([False] * 3 + [True])
    train(make_config(other), stop=lambda: next(stop))
    found = train_in(folder, 2, other, resume=True, stop_at={"1": 9})
    assert [(x["step"], x["finished"]) for x in found] == [(9, False), (9, False)], found
    assert train(make_config(other), resume=True).finished
    if scoring.get("enabled", True):
        check_same(folder / "one", folder / "other")
    else:
        same_weights(folder / "one", folder / "other")


@pytest.mark.parametrize("mode", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_same_processes_go_on_bit_for_bit(folder: Path, mode: str) -> None:
    """With dropout, inside windows; a sketch with losses has a state of its own."""
    more = {"distributed": {"mode": mode, "timeout": 120.0}, "scoring": {"audit_every": 4, "sketch": 512}}
    dropout = {"context": 24, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1}
    one, other = (configured(folder, name, model=dropout, **more) for name in ("one", "other"))
    unbroken = train_in(folder, 2, one)
    stopped = train_in(folder, 2, other, stop_at={"0": 7})
    assert [x["finished"] for x in stopped] == [False, False], stopped
    resumed = train_in(folder, 2, other, resume=True)
    assert [x["weights"] for x in resumed] == [x["weights"] for x in unbroken], resumed
    assert resumed[0]["validation"] == unbroken[0]["validation"]
    a, b = (inrun.Ledger.open(folder / name) for name in ("one", "other"))
    for table in ("contributions", "credits", "accounts"):
        left, right = (sorted(getattr(x, table)().to_pylist(), key=str) for x in (a, b))
        assert left and str(left) == str(right), table
    assert a.scores().equals(b.scores())


def test_a_rank_that_dies_is_named_in_bounded_time(folder: Path) -> None:
    began = time.monotonic()
    found = train_in(folder, 2, configured(folder, "run"), die_at=[1, 6])
    assert found[1] == {} and time.monotonic() - began < 60
    assert "ProcessError: rank 1 (process " in found[0]["error"], found
    resumed = train_in(folder, 2, configured(folder, "run"), resume=True)
    assert [x["finished"] for x in resumed] == [True, True], resumed
    train(make_config(configured(folder, "one")))
    check_same(folder / "one", folder / "run")


def test_a_rank_that_hangs_is_named_after_the_timeout(folder: Path) -> None:
    config = configured(folder, "run", distributed={"timeout": 3.0}, scoring={"enabled": False})
    with Ranks(folder, 2, config, hang_at=[1, 3]) as ranks:
        ranks.children[0].join(60)
        assert not ranks.children[0].is_alive()
        error = json.loads((ranks.out / "out-0.json").read_text())["error"]
    assert "rank 1" in error and "did not answer" in error


def test_what_rank_0_finds_wrong_is_said_by_all(folder: Path) -> None:
    wrong = configured(folder, "run", data={"paths": [str(folder / "nothing.jsonl")]})
    found = train_in(folder, 2, wrong)
    assert "nothing.jsonl" in found[0]["error"]
    assert found[1]["error"].startswith("ProcessError: rank 0 failed") and "nothing.jsonl" in found[1]["error"]
    few = train_in(folder, 2, configured(folder, "few", batch={"size": 2, "accumulation": 2}))
    assert all("cannot be split over 2 processes" in x["error"] for x in few)


def test_a_launcher_that_makes_no_sense(monkeypatch) -> None:
    for rank, world in (("2", "2"), ("x", "2"), ("-1", "2"), ("0", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(ConfigurationError, match="torchrun sets both"):
            launched()


# kill -9


def kill_until_done(folder: Path, config: dict[str, Any], kills: int, worlds: list[int], seed: int) -> int:
    """Kill a random rank at random moments, and go on, with other numbers of processes; return how often it was killed."""
    rng, count = random.Random(seed), 0
    while count < kills:
        world, run = worlds[count % len(worlds)], Path(config["run"])
        with Ranks(folder, world, config, resume=run.exists(), pause=0.05) as ranks:
            # Steps after the first one; None: while it begins, where a rank is missed only when the group's timeout has passed.
            more = rng.choice([None, 0, 1, 3, 5])
            if more is None:
                time.sleep(rng.uniform(0.0, 3.0))
            else:
                until, first = time.monotonic() + 90, 0
                while (first == 0 or ranks.steps() < first + more) and time.monotonic() < until and ranks.children[0].is_alive():
                    first = first or ranks.steps()
                    time.sleep(0.005)
                time.sleep(rng.uniform(0.0, 0.1))
            victim = ranks.children[rng.randrange(world)]
            if victim.is_alive():
                os.kill(victim.pid, signal.SIGKILL)
                count += 1
            found = ranks.finish(150)
        assert all(x == {} or "error" in x or x["finished"] for x in found), found
        if any(x.get("finished") for x in found):  # it was over before it could be killed: start anew
            shutil.rmtree(run)
    return count


@pytest.mark.slow
def test_killed_ranks_go_on_to_the_books_of_an_unbroken_run(folder: Path) -> None:
    kills = 20 if LONG else 6
    more = {"steps": 60, "checkpoints": {"every": 4}, "batch": {"size": 8}, "distributed": {"timeout": 30.0}}
    train(make_config(configured(folder, "one", **more)))
    config = configured(folder, "killed", **more)
    assert kill_until_done(folder, config, kills, [2, 4, 3], seed=kills) == kills
    found = train_in(folder, 2, config, resume=True)
    assert [x.get("finished") for x in found] == [True, True], found
    assert found[0]["weights"] == found[1]["weights"], "ranks ended with other weights"
    check_same(folder / "one", folder / "killed")


# The command


def test_torchrun(folder: Path) -> None:
    """The real command: one line of output by one rank, and a rank that fails ends the job with its name."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(configured(folder, "run", scoring={"enabled": False}, steps=3)))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", f"--master-port={free_port()}"]
    done = subprocess.run([*command, "-m", "inrun", "train", str(file)], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 steps done") == 1 and done.stderr.count("step 3/3") <= 1

"""Trainers in two processes (gloo) against a plain loop in one, on the global batches that both had; and broken and resumed."""

from __future__ import annotations

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("lightning.pytorch")

from engine.distributed.ranks_job import launch
from inrun.integrations.saved import is_whole
from inrun.ledger import MemoryLedger
from integrations import test_lightning, trainer_jobs
from integrations.test_transformers import adamw
from integrations.tiny_text import Recorder, difference, llama, plain_loop, token_losses, validation_of, weights
from integrations.trainer_jobs import HELD, LABELS, LR, ROWS

pytestmark = pytest.mark.filterwarnings("ignore")
#: transformers rounds losses to float32.
TOLERANCE = 1e-5


@functools.cache
def found(job: str, folder: Path) -> list[dict[str, Any]]:
    return launch(job, 2, seconds=300.0, extra={"JOB_MODULE": "integrations.trainer_jobs", "JOB_SHARED": str(folder)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def ranks(name: str, folder: Path, job: str = "trainers") -> list[dict[str, Any]]:
    parts = [x.get(name, {"error": x["log"]}) for x in found(job, folder)]
    assert not any("error" in x for x in parts), [x.get("trace", x.get("error")) for x in parts]
    return parts


def labels_of(ids: list[int]) -> Tensor:
    return LABELS[torch.tensor(ids)]


def tokens(ids: list[int]) -> int:
    return int((labels_of(ids)[:, 1:] != -100).sum())


def summed(model: Any, ids: list[int]) -> Tensor:
    return token_losses(model(input_ids=ROWS[torch.tensor(ids)]).logits, labels_of(ids))


def close(got: dict[Any, float], expected: dict[Any, float], tolerance: float = TOLERANCE) -> None:
    assert got.keys() == expected.keys()
    scale = max(map(abs, expected.values()))
    assert scale > 0
    assert max(abs(got[k] - expected[k]) for k in got) <= tolerance * scale


def by_use(steps: list[tuple[int, int, float]]) -> dict[tuple[int, int], float]:
    """Add up by step and sample: a sample that pads a step is in it twice."""
    found: dict[tuple[int, int], float] = {}
    for step, sample, value in steps:
        found[step, sample] = found.get((step, sample), 0.0) + value
    return found


def of_ranks(parts: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    each = [(t, i, c) for part in parts for t, (ids, cs) in enumerate(part["steps"]) for i, c in zip(ids, cs, strict=True)]
    return by_use(each)


def of_books(books: Recorder) -> dict[tuple[int, int], float]:
    return by_use([(t, i, c) for t, (ids, cs) in enumerate(trainer_jobs.steps_of(books)) for i, c in zip(ids, cs, strict=True)])


def same_weights(parts: list[dict[str, Any]], expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    assert difference(parts[0]["weights"], parts[1]["weights"]) == 0
    assert difference(parts[0]["weights"], expected) < tolerance


def same_scores(got: dict[str, list[Any]], expected: dict[str, list[Any]]) -> None:
    for column in ("sample_id", "validation", "times_used", "first_step", "last_step", "pending"):
        assert got[column] == expected[column], column
    for column in ("score", "step_score"):
        close(dict(enumerate(got[column])), dict(enumerate(expected[column])))


# transformers


def test_trainer_with_a_ragged_end_and_books_of_both(folder: Path) -> None:
    parts = ranks("ragged", folder)
    uses = parts[0]["ours"]
    ids: list[list[int]] = [[] for _ in range(4)]
    for step, sample in zip(uses["step"], uses["sample_id"], strict=True):
        ids[step].append(sample)
    assert [len(x) for x in ids] == [8, 4, 8, 4]  # one of eleven rows fills up each epoch
    model, books = llama(), MemoryLedger()

    def loss(model: Any, mine: list[int], of_step: list[list[int]]) -> Tensor:
        return summed(model, mine) / sum(map(tokens, of_step))

    rates = [LR * (1 - t / 4) for t in range(4)]
    steps = [[x] for x in ids]
    plain_loop(model, adamw(model), steps, loss, validation_of(HELD), rates, clip=0.3, books=books, audit_every=1)
    same_weights(parts, weights(model))
    for part in parts:
        same_scores(part["scores"], books.scores().to_pydict())
        assert sum(part["scored"]) == 24 == sum(part["scores"]["times_used"])
        assert part["coverage"] == 1.0
        assert {"inrun/validation/loss", "inrun/validation/paid"} <= set(part["logs"])
    accounts, expected = parts[0]["accounts"], books.accounts().to_pydict()
    for column in ("loss_before", "loss_after", "data"):
        assert accounts[column] == pytest.approx(expected[column], rel=TOLERANCE, abs=TOLERANCE * 0.1), column


@pytest.mark.parametrize("name", ["across", "each by itself", "dispatched", "sharded"])
def test_trainer_averages_tokens_as_it_says(name: str, folder: Path) -> None:
    parts = ranks(name, folder)
    steps = [[part["steps"][t][0] for part in parts] for t in range(3)]

    def loss(model: Any, mine: list[int], of_step: list[list[int]]) -> Tensor:
        total = 2 * tokens(mine) if name == "each by itself" else sum(map(tokens, of_step))
        return summed(model, mine) / total

    rates = [LR * (1 - t / 3) for t in range(3)]
    options = {"clip": 0.3, "method": "first" if name == "sharded" else "step"}
    model = llama()
    expected = of_books(plain_loop(model, adamw(model), steps, loss, validation_of(HELD), rates, **options))
    close(of_ranks(parts), expected)
    same_weights(parts, weights(model))
    if name == "across":
        assert all("Give ledger=FOLDER, which all processes write" in part["refused"] for part in parts)
    if name == "sharded":
        assert all(part["kinds"] == ["DTensor"] for part in parts)


def test_a_stream_equals_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer itself, since it carries the end of a stream over into a step of the next epoch."""
    parts = ranks("stream", folder)
    monkeypatch.setenv("JOB_SHARED", str(folder))
    alone = trainer_jobs.JOBS["trainers"]["stream"](0, 1)
    assert [len(ids) for ids, _ in alone["steps"]] == [8, 12, 12]
    close(of_ranks(parts), of_ranks([alone]))
    same_weights(parts, alone["weights"])


def test_the_two_averages_differ(folder: Path) -> None:
    """The control: what one normalisation gives is not what the other gives."""
    one, other = (of_ranks(ranks(name, folder)) for name in ("across", "each by itself"))
    with pytest.raises(AssertionError):
        close(one, other, 1e-3)


def test_trainer_resumed_and_with_another_number_of_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ranks("resumed", folder)
    for part in parts:
        assert part["again"]["scores"] == part["unbroken"]["scores"]
        assert difference(part["again"]["weights"], part["unbroken"]["weights"]) == 0
        assert "inrun-1.json" in part["damaged"]
    assert "TrainingError" in parts[1]["damaged"]
    assert "rank 1: TrainingError" in parts[0]["damaged"]
    monkeypatch.setenv("JOB_SHARED", str(folder))
    alone = trainer_jobs.resumable(0, 1, books="books of one")
    same_scores(alone["scores"], parts[0]["unbroken"]["scores"])
    same_weights([part["unbroken"] for part in parts], alone["weights"])
    went_on = trainer_jobs.resumable(0, 1, folder / "kept" / "checkpoint-2", "kept books")
    same_scores(went_on["scores"], alone["scores"])
    assert difference(went_on["weights"], alone["weights"]) < TOLERANCE


SCRIPT = """
import os, sys, torch
from integrations.trainer_jobs import resumable
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.save(resumable(rank, world), os.environ["JOB_SHARED"] + f"/found{rank}.pt")
assert torch.distributed.get_backend() == "gloo"
sys.stdout.flush(); os._exit(0)  # as docs/distributed.md says: gloo's threads may abort a process whose work is done
"""


@pytest.mark.slow
def test_torchrun_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but torchrun and the Trainer sets up the processes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setenv("JOB_SHARED", str(tmp_path))
    paths = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = run.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 0, said
    parts = [torch.load(tmp_path / f"found{rank}.pt") for rank in range(2)]
    alone = trainer_jobs.resumable(0, 1, books="books of one")
    same_weights(parts, alone["weights"])
    for part in parts:
        same_scores(part["scores"], alone["scores"])


@pytest.mark.slow
def test_a_killed_trainer_goes_on_to_the_scores_of_an_unbroken_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of one rank, again and again: the other ends by itself, and nothing is lost or counted twice."""
    rng, whole, broken = random.Random(3), tmp_path / "whole", tmp_path / "broken"
    told, began, causes = broken / "told", broken / "run", []

    def run(where: Path, resume: Path | None = None, during: Any = None) -> list[dict[str, Any]]:
        where.mkdir(exist_ok=True)
        extra = {"JOB_MODULE": "integrations.trainer_jobs", "JOB_SHARED": str(where), "JOB_STOPS": "1", "JOB_TIMEOUT": "20"}
        extra |= {} if resume is None else {"JOB_RESUME": str(resume)}
        return launch("killable", 2, seconds=120.0, extra=extra, during=during)

    def kill_one(processes: list[Any]) -> None:
        begun = int(told.read_text()) if told.exists() else 0
        victim, after, until = rng.randrange(2), begun + rng.choice([1, 2, 3]), time.monotonic() + 90
        while (int((told.exists() and told.read_text()) or 0) < after) and time.monotonic() < until and processes[0].poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.15))
        processes[victim].kill()
        causes.append(1 - victim)

    def newest() -> Path | None:
        found = [f for f in began.glob("checkpoint-*") if is_whole(f)]
        return max(found, key=lambda f: int(f.name.split("-")[1]), default=None)

    expected = run(whole)
    for _ in range(3):
        resume = newest()
        if resume is None:
            shutil.rmtree(broken / "books", ignore_errors=True)
        else:
            told.write_text(resume.name.split("-")[1])
        found = run(broken, resume, kill_one)
        left = found[causes[-1]]
        assert re.search(r"ProcessError: .*rank \d .process \d+ on .* did not answer", left["killable"]["error"]), left
        for checkpoint in began.glob("checkpoint-*"):  # of a branch that is dropped
            if (place := newest()) is not None and int(checkpoint.name.split("-")[1]) > int(place.name.split("-")[1]):
                shutil.rmtree(checkpoint)
    found = run(broken, newest())
    for part, of_whole in zip(found, expected, strict=True):
        assert "error" not in part["killable"], part["killable"]
        assert part["killable"]["scores"] == of_whole["killable"]["scores"]
        assert difference(part["killable"]["weights"], of_whole["killable"]["weights"]) == 0
    assert difference(found[0]["killable"]["weights"], found[1]["killable"]["weights"]) == 0


# TRL


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "packed", "dpo", "dpo, lora"])
def test_trl_equals_one_process(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trainer in one process, which is held against plain loops in test_trl."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    parts = ranks(name, folder, "trl")
    monkeypatch.setenv("JOB_SHARED", str(folder))
    alone = trainer_jobs.JOBS["trl"][name](0, 1)
    same_weights(parts, alone["weights"])
    for part in parts:
        same_scores(part["scores"], alone["scores"])
        assert part.get("coverage", 1.0) == 1.0
        assert part.get("used") == alone.get("used")
    if name != "sft":  # three steps of four rows; a pair is two, a packed row several
        assert sum(alone["scores"]["times_used"]) == (24 if "dpo" in name else sum(alone["used"]))
        assert sum(alone["scores"]["times_used"]) >= 24


# Accelerate


@pytest.mark.parametrize("name", ["before", "after", "fsdp2", "fsdp2, whole"])
def test_accelerate_in_either_order(name: str, folder: Path) -> None:
    parts = ranks(f"accelerate {name}", folder)
    assert parts[0]["called"] == ("DistributedDataParallel" if "fsdp2" not in name else "FSDPLlamaForCausalLM")
    assert parts[0]["kinds"] == (["Parameter"] if "fsdp2" not in name else ["DTensor"])
    # Five batches of two over two processes: the sixth is the first again.
    steps = [[ids[j : j + 2] for part in parts for ids in [part["steps"][t][0]] for j in range(0, len(ids), 2)] for t in range(2)]
    assert [len(x) for x in steps] == [4, 2]

    def loss(model: Any, ids: list[int], of_step: list[list[int]]) -> Tensor:
        return trainer_jobs.mean_loss(model, ROWS[torch.tensor(ids)]) / 4

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    scoring = {} if name in ("before", "fsdp2, whole") else {"method": "first"}
    expected = of_books(plain_loop(model, optimizer, steps, loss, validation_of(HELD), [LR, LR], clip=0.3, **scoring))
    close(of_ranks(parts), expected)
    same_weights(parts, weights(model))


@pytest.mark.parametrize("name", ["accelerate resumed", "lightning resumed", "sharded resumed"])
def test_resumed_equals_unbroken(name: str, folder: Path) -> None:
    for part in ranks(name, folder):
        assert part["again"]["scores"] == part["unbroken"]["scores"]
        assert difference(part["again"]["weights"], part["unbroken"]["weights"]) == 0
        assert sum(part["unbroken"]["scores"]["times_used"]) == (24 if "lightning" in name else 16)
        if name == "sharded resumed":
            same_scores(part["unbroken"]["scores"], ranks("resumed", folder)[0]["unbroken"]["scores"])


def test_processes_end_cleanly_and_leave_nobody(folder: Path) -> None:
    assert [(x["code"], x["orphans"]) for x in found("trainers", folder)] == [(0, False)] * 2


def test_what_is_refused_is_named(folder: Path) -> None:
    for part in ranks("errors", folder):
        assert "FSDP1" in part["FSDP1"]
        assert "fsdp_version=2" in part["FSDP1"]
        assert "comes after prepare()" in part["FSDP2 before prepare"]


# Lightning


@pytest.mark.parametrize("name", ["lightning", "lightning, the module itself", "lightning, by hand"])
def test_lightning_with_ddp(name: str, folder: Path) -> None:
    parts = ranks(name, folder)
    count = len(parts[0]["steps"])
    steps = [
        [ids[j : j + 2] for part in parts for ids in [part["steps"][t][0]] for j in range(0, len(ids), 2)] for t in range(count)
    ]

    def loss(model: Any, ids: list[int], of_step: list[list[int]]) -> Tensor:
        return (model(test_lightning.X[ids]) - test_lightning.Y[ids]).square().mean() / 4

    model = test_lightning.net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=test_lightning.LR)
    scoring = {"method": "first"} if "itself" in name else {}
    rates = [test_lightning.LR] * count
    expected = of_books(plain_loop(model, optimizer, steps, loss, test_lightning.validation, rates, clip=0.5, **scoring))
    close(of_ranks(parts), expected, 1e-9)
    same_weights(parts, weights(model), 1e-9)

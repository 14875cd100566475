"""The engine reproduces the stored golden runs; ``tests/golden/record.py`` lists their content."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from golden.record import (
    ACCOUNTS,
    AMOUNTS,
    FOLDER,
    Record,
    disagreements,
    expected,
    load,
    measure,
    path_of,
    plain_weights,
    store,
)
from golden.runs import RUNS

BOTH = pytest.mark.parametrize("bitwise", [True, False], ids=["bitwise", "default"])
EVERY = pytest.mark.parametrize("name", RUNS)


@functools.cache
def measured(name: str, bitwise: bool) -> Record:
    return measure(RUNS[name], bitwise)


@EVERY
@BOTH
def test_a_run_gives_the_stored_numbers(name: str, bitwise: bool) -> None:
    stored, same_machine = expected(name)
    assert disagreements(stored, measured(name, bitwise), bitwise and same_machine) == []


@EVERY
def test_bitwise_training_equals_training_without_inrun(name: str) -> None:
    record = measured(name, True)
    plain = plain_weights(RUNS[name])
    assert plain.keys() == {key for key in record if key.startswith("weights.")}
    assert [key for key, weight in plain.items() if not torch.equal(record[key], weight)] == []


def test_there_is_one_small_file_per_run() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {path_of(name).name for name in RUNS}
    assert max(p.stat().st_size for p in FOLDER.iterdir()) < 100_000


def test_stored_runs_cover_what_they_are_for() -> None:
    records = {name: load(name)[0] for name in RUNS}
    points = {}
    for name, record in records.items():
        (column, *_) = (v for k, v in record.items() if k.endswith(".points"))
        points[name] = set(column.int().tolist())
    assert points.pop("tied_gpt") == {1, 2, 3}  # rough steps
    assert all(taken == {1} for taken in points.values())
    assert sum(k.startswith("credits.") for k in records["untied_gpt"]) == 2  # validation sets
    ended = {name for name, record in records.items() if int((record["paid"] > 0.99).sum()) >= 20}
    assert ended == {"lstm", "vit"}  # no memory, and one so short that windows end
    assert {n for n, r in records.items() if any("unspread" in k for k in r)} == {"vit"}
    uses = records["tied_gpt"]
    pairs = list(zip(uses["uses.step"].tolist(), uses["uses.sample_id"].tolist(), strict=True))
    assert len(set(pairs)) < len(pairs)  # a sample twice in a step
    assert bool((records["packed_gpt"]["credits.main"] == 0).any())  # a document without a label


@EVERY
def test_stored_accounts_add_up(name: str) -> None:
    record, _ = load(name)
    for key in [k for k in record if k.startswith("credits.")]:
        account = {c: record[f"accounts.{key.removeprefix('credits.')}.{c}"] for c in ACCOUNTS}
        fall = account["loss_before"] - account["loss_after"]
        assert float((fall - sum(account[c] for c in AMOUNTS)).abs().max()) < 1e-12
        error = record[key].double().sum() - account["data"].sum()
        assert float(error.abs()) < 1e-6 * float(record[key].abs().sum())


# Controls: what the comparison must notice


def swap(values: torch.Tensor, i: int, j: int) -> None:
    values[[i, j]] = values[[j, i]]


def swap_extremes(values: torch.Tensor) -> None:
    swap(values, int(values.argmax()), int(values.argmin()))


def flip_largest(values: torch.Tensor) -> None:
    values[values.abs().argmax()] *= -1


def scale(values: torch.Tensor) -> None:
    values *= 1 + 3e-6


def add_to_one(values: torch.Tensor) -> None:
    values[0] += 1


def lose_one(values: torch.Tensor) -> None:
    values[0] = torch.nan


def add_one_bit(values: torch.Tensor) -> None:
    values.view(-1)[0] = torch.nextafter(values.view(-1)[0], torch.tensor(torch.inf).double())


CHANGES: list[tuple[str, Callable[[torch.Tensor], None]]] = [
    ("credits.near", swap_extremes),
    ("credits.far", flip_largest),
    ("credits.far", scale),
    ("credits.near", lose_one),
    ("contributions.near", swap_extremes),
    ("contributions.far", flip_largest),
    ("first.near", scale),
    ("first.far", lambda values: swap(values, 0, -1)),
    ("paid", lambda values: values.sub_(0.01)),
    ("uses.sample_id", add_to_one),
    ("uses.row", lambda values: swap(values, 0, 1)),
    ("accounts.near.data", scale),
    ("accounts.near.decay", flip_largest),
    ("accounts.far.inherited", lambda values: values.add_(1e-6)),
    ("accounts.far.residual", flip_largest),
    ("accounts.far.loss_before", lambda values: values.mul_(1 + 3e-9)),
    ("accounts.far.loss_after", lose_one),
    ("accounts.near.clip", scale),
    ("accounts.near.lr", add_to_one),
    ("accounts.near.points", add_to_one),
    ("weights.head.weight", add_one_bit),
]


@pytest.mark.parametrize(("key", "change"), CHANGES)
def test_a_changed_number_is_noticed(key: str, change: Callable[[torch.Tensor], None]) -> None:
    stored, _ = load("untied_gpt")
    got = {k: v.clone() for k, v in stored.items()}
    assert disagreements(stored, got) == []
    change(got[key])
    found = disagreements(stored, got)
    assert len(found) == 1
    assert found[0].startswith(f"{key} ")


def test_a_missing_tensor_and_another_shape_are_noticed() -> None:
    stored, _ = load("untied_gpt")
    got = dict(stored)
    del got["credits.near"]
    got["paid"] = got["paid"][1:]
    got["credits.other"] = stored["paid"]
    assert [line.split()[0] for line in disagreements(stored, got)] == [
        "credits.near",
        "credits.other",
        "paid",
    ]


def test_another_run_does_not_agree() -> None:
    """Control of the whole chain: the stored run without clipping."""
    stored, _ = expected("packed_gpt")
    found = disagreements(stored, measure(replace(RUNS["packed_gpt"], clip=None)), False)
    groups = {line.split(".")[0] for line in found}
    assert {"accounts", "contributions", "credits", "first", "weights"} <= groups


@pytest.mark.parametrize("name", ["lstm", "packed_gpt"])
def test_the_same_run_gives_the_same_file(name: str, tmp_path: Path) -> None:
    once = store(name, measured(name, True), tmp_path / "once")
    again = store(name, measure(RUNS[name]), tmp_path / "again")
    assert once.read_bytes() == again.read_bytes()

"""Several processes give the figures of one with the same global batch; what they cannot do is named on all of them."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from guards import AGREED, GUARDS
from job import launch
from jobs import BLOCKWISE, BY_NAME, COMPILED, FOUR, IN_SINGLE, JOBS, LONG, PLAYS, ROUNDED, SHARDED
from plays import assembled, batch_gaps, differences, play_part


@functools.cache
def found(job: str, world: int = 2) -> list[dict[str, Any]]:
    return launch(job, world, seconds=300.0)


def both(job: str, name: str, world: int = 2) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what several processes found, put together, and what one finds."""
    parts = [x[name] if name in x else {"error": x["log"]} for x in found(job, world)]
    assert not any("error" in x for x in parts), [x.get("trace", x.get("error")) for x in parts]
    for x in parts[1:]:
        assert all(map(torch.equal, x["weights"], parts[0]["weights"]))
    play = BY_NAME[name]
    return assembled(parts, play), play_part(play, 0, 1, world)


def compare(job: str, name: str, world: int = 2) -> dict[str, float]:
    return differences(*both(job, name, world))


@pytest.mark.parametrize("name", [p.name for p in PLAYS if p.name != "wrong"])
def test_ddp_equals_one_process(name: str) -> None:
    off = compare("ddp", name)
    assert max(off.values()) < 1e-9, off


def test_bytes_are_counted_as_computed() -> None:
    """Validation gradients of two sets in double precision; of a split direction the rows that are here, of tied weights twice."""
    whole, split = (found(job)[0][name] for job, name in (("ddp", "first"), ("fsdp", "fsdp first, not resharded")))
    sizes = [x.shape for x in whole["weights"]]
    entries = sum(s.numel() for s in sizes[:-1])  # the tied head comes last in a state_dict
    assert whole["steps"][-1]["bytes"]["validation gradient"] == 2 * 8 * entries
    rows = [(s[0] + 1) // 2 * (s.numel() // s[0]) for s in sizes]
    assert split["steps"][-1]["bytes"]["directions"] == 2 * 8 * sum(rows)


def test_a_wrong_factor_shows() -> None:
    """The control: ranks that do not average their losses."""
    parts, play = [x["wrong"] for x in found("ddp")], BY_NAME["wrong"]
    off = differences(assembled(parts, play), play_part(dataclasses.replace(play, wrong=1.0), 0, 1))
    assert off["contributions"] > 0.5


@pytest.mark.parametrize("name", [p.name for p in IN_SINGLE])
def test_ddp_in_float32_equals_one_process(name: str) -> None:
    """One that adds up the same slices: to 1e-6 of the batch's norm, with the same weights bit for bit.

    One that takes the batch in one piece has a gradient that is rounded in another way, and Adam's first two moves in the step game
    divide by it: 1e-5 of the batch's norm is then asked of the later steps (test_rounding.py shows that this is all).
    """
    several, batch = both("ddp", name)
    slices = play_part(dataclasses.replace(BY_NAME[name], apart=True), 0, 1)
    assert max(batch_gaps(several, slices)) < 1e-6
    assert all(map(torch.equal, several["weights"], slices["weights"]))
    gaps = batch_gaps(several, batch)
    assert max(gaps if "whole" in name else gaps[2:]) < 1e-5, gaps
    assert max(gaps) < 5e-5, gaps


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.name for p in COMPILED])
def test_compiled_ddp_equals_one_process(name: str) -> None:
    off = compare("compiled", name)
    assert max(off.values()) < 1e-9, off


@pytest.mark.parametrize("name", [p.name for p in SHARDED])
def test_fsdp_equals_one_process(name: str) -> None:
    off = compare("fsdp", name)
    # Central differences divide rounding by a small step.
    assert max(off.values()) < (1e-7 if "second" in name else 1e-9), off


@pytest.mark.parametrize("name", [p.name for p in ROUNDED])
def test_fsdp_in_bfloat16_is_near_one_process(name: str) -> None:
    off = compare("fsdp", name)
    assert off["batch"] < 2e-2, off


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.name for p in BLOCKWISE + LONG])
def test_fsdp_with_compiled_blocks_and_for_long_equals_one_process(name: str) -> None:
    off = compare("fsdp compiled", name)
    assert max(off.values()) < 1e-9, off


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.name for p in FOUR])
def test_four_processes_equal_one(name: str) -> None:
    off = compare("four", name, world=4)
    assert max(off.values()) < 1e-9, off


@pytest.mark.parametrize("name", list(GUARDS))
def test_errors_are_raised_on_all_ranks(name: str) -> None:
    for x in found("guards"):
        assert re.search(GUARDS[name][1], x[name]["error"], re.DOTALL), x[name]


@pytest.mark.parametrize("name", list(AGREED))
def test_what_is_agreed(name: str) -> None:
    assert [x[name] for x in found("guards")] == [AGREED[name][1]] * 2


MORE = [pytest.param(job, marks=pytest.mark.slow) for job in ("dies in the forward", "dies sleeps", "dies, sharded")]


@pytest.mark.parametrize("job", ["dies before the optimizer", *MORE])
def test_a_rank_that_dies_is_named(job: str) -> None:
    first, second = launch(job, seconds=120.0, extra={"JOB_TIMEOUT": "8", "JOB_STOPS": "1"})
    assert re.search(r"ProcessError: rank 1 \(process \d+ on .*did not answer", first["dies"]["error"]), first
    assert first["dies"]["seconds"] < 30
    assert second["code"] == 7 or "sleeps" in job


@pytest.mark.parametrize("job", ["ddp", "fsdp", "guards"])
def test_processes_end_cleanly_and_leave_nobody(job: str) -> None:
    assert job in JOBS
    assert [(x["code"], x["orphans"]) for x in found(job)] == [(0, False)] * 2, [x["log"][-2000:] for x in found(job)]

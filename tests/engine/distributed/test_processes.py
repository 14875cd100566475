"""Several processes against one, and what they tell each other."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from inrun.engine.processes import Communication

sys.path.insert(0, str(Path(__file__).parent))
from ranks_cases import BY_NAME, CONTROL, DDP, FOUR, FSDP, MORE_DDP, MORE_FSDP, RESUMED, RESUMED_FOUR, UNBROKEN
from ranks_exchanges import ERRORS
from ranks_guards import AGREED, REFUSED
from ranks_job import launch
from ranks_runs import assembled, differences, play


@functools.cache
def found(job: str, world: int) -> list[dict[str, Any]]:
    return launch(job, world)


def test_sums_over_ranks_take_few_calls() -> None:
    for x in found("fast", 2):
        first, second, third, mean, payload, calls = x["sums"]
        assert first == [[1.0, 1.0]] * 3 and second == [2.0] * 4 and mean == [0.5, 0.5]
        assert third == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert payload == {"x": 12 * 4 + 4 * 8, "y": 8} and calls == 3


def test_bytes_that_a_rank_sends() -> None:
    """Rings: sums go round twice in parts of 1/W, what is gathered is sent to all others, what rank 0 gets once."""
    payload = {"validation gradient": 800, "directions": 100, "barriers": 10, "messages": 1000, "parts for rank 0": 7}
    assert Communication(4, payload).bytes == 1917
    assert Communication(4, payload).wire == 800 * 2 * 3 / 4 + (100 + 10 + 1000) * 3 + 7
    assert Communication(1, payload).wire == 0


def test_ranks_exchange_plain_objects() -> None:
    for rank, x in enumerate(found("fast", 2)):
        objects, packed, answer, some, none = x["words"]
        assert objects == [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}]
        assert packed == ([] if rank else [b"\1\2", b"\1\2\1\2"])
        assert answer == [0, "first"] and some is True and none is False


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_on_one_rank_is_raised_on_all(name: str) -> None:
    for x in found("fast", 2):
        assert re.search(ERRORS[name], x[name]["error"], re.DOTALL), x[name]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_is_named_on_all(name: str) -> None:
    for x in found("fast", 2):
        assert re.search(REFUSED[name][1], x[name]["error"], re.DOTALL), x[name]


@pytest.mark.parametrize("name", list(AGREED))
def test_ranks_agree(name: str) -> None:
    assert [x[name] for x in found("fast", 2)] == [AGREED[name][1]] * 2


@pytest.mark.parametrize("how", ["dies", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sleeps", "dies, split"))])
def test_a_rank_that_does_not_come_is_named(how: str) -> None:
    first, second = launch(how, extra={"JOB_TIMEOUT": "8", "JOB_STOPS": "1"})
    assert re.search(r"ProcessError: rank 1 \(process \d+ on .*did not answer", first["left"]["error"]), first
    assert first["left"]["seconds"] < 30
    assert second["code"] == 7 or how == "sleeps"


def test_processes_end_cleanly_and_leave_nobody() -> None:
    assert [(x["code"], x["orphans"]) for x in found("fast", 2)] == [(0, False)] * 2, [x["log"][-2000:] for x in found("fast", 2)]


def compare(job: str, name: str, world: int = 2) -> dict[str, float]:
    """How far a run of several processes is from one process, figure by figure."""
    case, parts = BY_NAME[name], [x[name] for x in found(job, world)]
    assert all("error" not in x for x in parts), "\n".join(x.get("trace", "") for x in parts)
    off = differences(assembled(parts, case), play(case, 0, 1, world))
    # In lower precision than double, rounded losses do not tell how far they fell.
    return off if case.tolerance < 1e-8 else {what: off[what] for what in ("contributions", "scores", "weights")}


def names(cases: list[Any]) -> list[str]:
    return [c.name for c in cases]


@pytest.mark.parametrize("name", names(DDP))
def test_ddp_equals_one_process(name: str) -> None:
    off = compare("fast", name)
    assert max(off.values()) < BY_NAME[name].tolerance, off


@pytest.mark.slow
@pytest.mark.parametrize("name", names(MORE_DDP))
def test_more_of_ddp_equals_one_process(name: str) -> None:
    off = compare("more ddp", name)
    assert max(off.values()) < BY_NAME[name].tolerance, off


def test_gradients_that_are_not_averaged_fail_the_audit() -> None:
    """The control: ranks that do not exchange gradients do not pass for one process."""
    for x in found("fast", 2):
        assert "ConservationError" in x[CONTROL.name]["error"], x[CONTROL.name]


@pytest.mark.slow
@pytest.mark.parametrize("name", names(RESUMED))
def test_resumed_runs_equal_one_process(name: str) -> None:
    off = compare("resumed", name)
    assert max(off.values()) < BY_NAME[name].tolerance, off


@pytest.mark.slow
@pytest.mark.parametrize("name", names(UNBROKEN))
def test_the_same_number_of_processes_goes_on_bit_for_bit(name: str) -> None:
    for x in found("resumed", 2):
        resumed, unbroken = x[name.removesuffix(", unbroken")], x[name]
        assert repr(resumed["steps"]) == repr(unbroken["steps"]) and resumed["scores"] == unbroken["scores"]
        assert all(map(torch.equal, resumed["weights"], unbroken["weights"]))


@pytest.mark.parametrize("name", names(FSDP))
def test_fully_shard_equals_one_process(name: str) -> None:
    off = compare("fast", name)
    assert max(off.values()) < BY_NAME[name].tolerance, off


@pytest.mark.slow
@pytest.mark.parametrize("name", names(MORE_FSDP))
def test_more_of_fully_shard_equals_one_process(name: str) -> None:
    off = compare("more fsdp", name)
    assert max(off.values()) < BY_NAME[name].tolerance, off


@pytest.mark.slow
@pytest.mark.parametrize("name", names([*FOUR, *RESUMED_FOUR]))
def test_four_processes_equal_one(name: str) -> None:
    off = compare("four", name, world=4)
    assert max(off.values()) < BY_NAME[name].tolerance, off

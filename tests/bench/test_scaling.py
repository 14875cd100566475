"""`inrun bench --processes`: what is exchanged is what the sizes of the model ask for, and nobody is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inrun.bench.scaling import Scaled, _result, check
from inrun.bench.shape import Shape
from inrun.errors import ConfigurationError

SIZES = {"width": 16, "heads": 2, "layers": 1, "context": 8, "vocab": 131, "batch": 3, "rounds": 2}
SMALL = ["--json", *(word for name, size in SIZES.items() for word in (f"--{name}", str(size)))]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@contextlib.contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python in a session of its own; whoever is left in it is ended."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, *command], env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def session_is_over(process: subprocess.Popen[str], seconds: float = 10.0) -> bool:
    """Whether all processes of a session end (a helper of multiprocessing ends a little after the others)."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        (["-m", "inrun", "bench", *SMALL, "--processes", "2"], "ddp"),
        pytest.param([*TORCHRUN, "-m", "inrun", "bench", *SMALL, "--fsdp"], "fsdp", marks=pytest.mark.slow),
    ],
    ids=["started by us, ddp", "torchrun, fsdp"],
)
def test_bytes_are_those_of_the_parameters(command: list[str], mode: str) -> None:
    with started(*command) as process:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert session_is_over(process)
    data = json.loads(out)
    assert data["mode"] == mode and data["software"]["threads"] == 1
    plain, first, whole = data["results"]
    assert [plain["name"], first["name"], whole["name"]] == ["plain", "first", "whole"]
    assert plain["bytes"] == 0 and plain["relative"] == plain["relative_alone"] == 1.0
    entries = 131 * 16 + 8 * 16 + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 3 * 32
    if mode == "ddp":
        computed = {"first": {"validation gradient": 4 * entries}}
        computed["whole"] = {**computed["first"], "sums of gradients": 4 * entries}
    else:  # 131 rows are split into 66 and 65, which are filled up
        computed = {"first": {"directions": 2 * (entries + 16)}}
        kinds = ("gradients of small tensors", "sums of gradients", "sketches of directions")
        computed["whole"] = dict.fromkeys(kinds, 4 * entries)
    for r in (first, whole):
        assert r["processes"] == 2 and r["seconds"] > 0 and r["scaling"] == pytest.approx(2 * r["seconds_alone"] / r["seconds"])
        large = {kind: size for kind, size in r["payload"].items() if size > 1000}
        assert large.keys() == computed[r["name"]].keys(), r["payload"]
        small = r["bytes"] - sum(computed[r["name"]].values())
        assert 0 < small < 500, r["payload"]  # barriers, losses, and sums of a few numbers


def children_of(process: int) -> list[int]:
    """Return the ranks that a bench has started."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(p) for p in found if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for children in /proc")
def test_a_rank_that_is_killed_ends_the_bench() -> None:
    with started("-m", "inrun", "bench", *SMALL, "--processes", "2", "--rounds", "100000") as process:
        until = time.monotonic() + 60
        while len(ranks := children_of(process.pid)) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(3.0)
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1 and "rank" in err and "Traceback (most recent call last):\n  File" not in err[-300:], err
        assert session_is_over(process)


def test_results_are_those_of_the_median_step() -> None:
    """An audited step exchanges more and does not count."""
    seen: list[Any] = [({"a": size}, 2.0 * size) for size in (5, 900, 5)]
    mean = {("plain", False): 1.0, ("plain", True): 0.8, ("x", False): 2.0, ("x", True): 1.0}
    assert _result("x", 4, mean, seen) == Scaled("x", 4, 2.0, 1.0, 0.5, 0.8, 2.0, {"a": 5}, 10.0)


@pytest.mark.parametrize(
    ("world", "processes", "match"),
    [("1", None, "two processes at least"), ("3", 2, "--processes is 2, but a launcher started 3")],
)
def test_what_cannot_be_measured(world: str, processes: int | None, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ConfigurationError, match=match):
        check(Shape(), processes)

"""Operations and host reads per step: the counting convention, the two yardsticks, and the budgets of the methods."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

FILE = Path(__file__).parents[2] / "benchmarks" / "launches.py"
#: Mean operations per step, as a multiple of the floor's.
BUDGETS = {"first": 1.3, "whole": 1.8}


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("launches", FILE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["launches"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launches = _load()
SHORT = launches.Setting(warm_up=2, steps=2)


def tensors(n: int = 3) -> list[Tensor]:
    return [torch.ones(4, 6) for _ in range(n)]


X, MASK = torch.ones(4, 6), torch.arange(24).view(4, 6) % 2 == 0


@pytest.mark.parametrize(
    ("run", "operations", "reads"),
    [
        pytest.param(lambda: X.t()[1:].unsqueeze(0).view(5, 4, 1).detach().expand(5, 4, 3), 0, 0, id="views"),
        pytest.param(lambda: torch.empty_like(X), 0, 0, id="uninitialized memory"),
        pytest.param(lambda: torch.zeros(3), 1, 0, id="memory that is filled"),
        pytest.param(lambda: X.t().reshape(-1), 1, 0, id="a reshape that copies"),
        pytest.param(lambda: X @ X.t() * 2 + 1, 3, 0, id="elementwise operations and a product"),
        pytest.param(lambda: X.add_(0.0), 1, 0, id="in place"),
        pytest.param(lambda: torch._foreach_mul(tensors(), 2.0), 3 + 3, 0, id="foreach: one per tensor"),
        pytest.param(lambda: torch.nn.functional.layer_norm(X, (6,), X[0], X[1]), 2, 0, id="a composite operation"),
        pytest.param(lambda: X.sum().item(), 1, 1, id="item"),
        pytest.param(lambda: bool((X > 0).all()), 2, 1, id="bool"),
        pytest.param(lambda: torch.equal(X, MASK.float()), 2, 1, id="equal"),
        pytest.param(lambda: MASK.nonzero(), 1, 1, id="nonzero"),
        pytest.param(lambda: X[MASK], 1, 1, id="index by a mask"),
        pytest.param(lambda: X[torch.tensor([0, 2])], 1, 0, id="index by positions"),
        pytest.param(lambda: X.clone().index_put_((MASK,), torch.tensor(0.0)), 2, 0, id="fill by a mask"),
        pytest.param(lambda: X.clone().index_put_((MASK,), X.flatten()[:12]), 2, 1, id="assign by a mask"),
    ],
)
def test_convention(run: Callable[[], Any], operations: int, reads: int) -> None:
    with launches.OperationCounter() as counter:
        run()
    assert (counter.count.operations, counter.count.reads) == (operations, reads), counter.count.by_name


def test_backward_is_counted() -> None:
    x = X.clone().requires_grad_()
    with launches.OperationCounter() as counter:
        (x * x).sum().backward()
    # Product, sum; ones for the gradient's seed (the sum's is a view); two products and their sum.
    assert counter.count.by_name.total() == counter.count.operations == 6, counter.count.by_name


def test_host_tensors_are_free() -> None:
    step = torch.zeros(())
    with launches.OperationCounter(host=[step]) as counter:
        torch._foreach_add_([step], 1)
        step.item()
        X.add_(0.0)
    assert (counter.count.operations, counter.count.reads, counter.count.on_host) == (1, 0, 1)


class Wasteful:
    """An accountant that takes operations and reads as told, in the forward and after the step."""

    def __init__(self, model: nn.Module, operations: int, reads: int) -> None:
        self.weight, self.operations, self.reads = next(model.parameters()).detach(), operations, reads

    @contextlib.contextmanager
    def step(self, ids: Any) -> Iterator[None]:
        for _ in range(self.operations):
            self.weight + 1
        yield
        for _ in range(self.reads):
            self.weight[0, 0].item()

    def close(self) -> None:
        pass


def test_an_accountant_that_reads_and_computes_is_found_out() -> None:
    """The control of the budgets below."""

    def attach(model: nn.Module, optimizer: Any, validation: Any, method: str, operations: int, reads: int) -> Wasteful:
        return Wasteful(model, operations, reads)

    plain = launches.count_steps("plain", SHORT)
    none = launches.count_method("first", SHORT, attach, operations=0, reads=0)
    some = launches.count_method("first", SHORT, attach, operations=5, reads=3)
    assert none.mean("operations") == plain.mean("operations") and none.most("reads") == 0
    assert some.mean("operations") == plain.mean("operations") + 5 and some.most("reads") == 3


def test_yardsticks() -> None:
    plain, floor = launches.count_yardsticks(SHORT)
    assert {x.operations for x in plain.each} == {784}
    assert {x.operations for x in floor.each} == {1032}
    assert plain.most("reads") == floor.most("reads") == 0


@pytest.mark.parametrize("method", list(BUDGETS))
def test_methods_keep_their_budget(method: str) -> None:
    _, floor = launches.count_yardsticks(SHORT)
    found = launches.count_method(method, **launches.NO_AUDITS)
    each = [x.operations for x in found.each]
    assert found.mean("operations") <= BUDGETS[method] * floor.mean("operations"), each
    assert found.most("reads") == 0, found.as_dict()


@pytest.mark.parametrize("method", list(launches.PAPER))
def test_the_paper_s_algorithms_are_counted(method: str) -> None:
    _, floor = launches.count_yardsticks(SHORT)
    assert launches.count_method(method, SHORT).mean("operations") > floor.mean("operations")


@pytest.mark.skipif("INRUN_PRETEND" not in os.environ, reason="INRUN_PRETEND is not set: the folder of the pretend device")
def test_pretend_device_counts_the_same() -> None:
    """No CPU tensor is mixed with the device's, and nothing waits for a copy."""
    command = [sys.executable, str(FILE), "--json", "--device", "pretend", "--pretend", os.environ["INRUN_PRETEND"]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    plain, floor, *scored = json.loads(found.stdout)["results"]
    assert (plain["operations"]["mean"], floor["operations"]["mean"]) == (784, 1032)
    for x in scored:
        assert x["operations"]["mean"] <= BUDGETS[x["name"]] * 1032
        assert x["reads"]["most"] == 0

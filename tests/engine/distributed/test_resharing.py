"""Saved states that are shared out among another number of processes, without processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inrun.engine.accountant import Accountant
from inrun.engine.processes import Processes
from inrun.engine.resharing import state_of_rank
from inrun.errors import ConfigurationError
from tiny import batch, tiny, train_step, validation


class Rank(Processes):
    """A rank that exchanges nothing."""

    def __init__(self, rank: int, world: int, sharded: bool = False) -> None:
        self.rank, self.world, self.sharded = rank, world, sharded


def trained(sketch: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A run whose steps have different numbers of rows, one of them none."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    accountant = Accountant(model, optimizer, validation(), sketch=sketch)
    for t, n in enumerate((3, 1, 5, 2)):
        train_step(accountant, model, optimizer, batch(n, t), ids=range(10 * t, 10 * t + n))
    state = copy.deepcopy(accountant.state_dict())
    accountant.close()
    return model, state


def shared(states: list[dict[str, Any]], world: int, sharded: bool, shapes: list[torch.Size]) -> list[dict[str, Any]]:
    return [copy.deepcopy(state_of_rank(states, Rank(r, world, sharded), shapes)) for r in range(world)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("sketch", [256, "exact"])
def test_states_shared_out_over_ranks_and_back_are_the_same(sketch: Any) -> None:
    model, state = trained(sketch)
    shapes = [p.shape for p in model.parameters()]
    states = [state]
    for world, sharded in ((2, False), (4, True), (3, True), (2, False), (7, True)):
        states = shared(states, world, sharded, shapes)
        uses = [i for s in states for ids, _ in s["ids"].values() for i in ids.tolist()]
        assert sorted(uses) == sorted(i for ids, _ in state["ids"].values() for i in ids.tolist())
    (back,) = shared(states, 1, False, shapes)
    for step, (ids, rows) in state["ids"].items():
        assert torch.equal(back["ids"][step][0], ids) and rows is None
        assert back["ids"][step][1].tolist() == list(range(len(ids)))
    ring = [int(slot[2]) for slot in state["scorer"]["window"]["slots"]]
    for name, x in state["scorer"]["window"]["held"].items():  # of a row that no use fills, nothing is kept
        if "errors" not in name:
            for j, n in enumerate(ring):
                x[j, n:] = 0
    assert same(back["scorer"], state["scorer"])


def test_states_that_are_not_of_all_ranks_are_refused() -> None:
    model, state = trained(256)
    shapes = [p.shape for p in model.parameters()]
    one, other = shared([state], 2, False, shapes)
    for given, said in (
        ([other], "this is rank 0 of 2, and the given states are those of: rank 1 of 2"),
        ([state, state], "rank 0 of 1, rank 0 of 1"),
        ([], "those of: none"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            state_of_rank(given, Rank(0, 2), shapes)
    with pytest.raises(ConfigurationError, match="different checkpoints: rank 0 after 4 steps, rank 1 after 5 steps"):
        state_of_rank([one, {**other, "steps_done": 5}], Rank(0, 1), shapes)
    assert state_of_rank([one, other], Rank(1, 2), shapes)["ids"] == other["ids"]

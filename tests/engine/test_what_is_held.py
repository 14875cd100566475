"""What an accountant holds between steps does not grow with the run."""

from __future__ import annotations

import pytest

from inrun.engine.saved import split_state
from loops import METHODS, attach, losses, perceptron, points, run_step, sgd


@pytest.mark.parametrize("method", METHODS)
def test_memory_and_saved_state_stop_growing(method: str) -> None:
    model = perceptron()
    accountant = attach(model, sgd(model), **METHODS[method])
    found = []
    for t in range(130):
        run_step(accountant, lambda t=t: losses(model, points(4, t)).mean(), range(4))
        if t in (64, 129):
            plain, tensors = split_state(accountant.state_dict())
            tensors = tensors or {}
            found.append((len(tensors), sum(x.nbytes for x in tensors.values()), len(plain["ids"]), accountant.held_bytes()))
    assert found[0] == found[1]
    assert (found[0][2] > 0) == (method in ("whole", "exact"))

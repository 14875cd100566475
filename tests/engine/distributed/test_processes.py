"""Several processes against one, and what they tell each other."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from exchanges import ERRORS
from job import launch


@functools.cache
def found(job: str, world: int = 2) -> list[dict[str, Any]]:
    return launch(job, world)


def test_sums_over_ranks_take_few_calls() -> None:
    for x in found("exchanges"):
        first, second, third, mean, payload, calls = x["sums"]
        assert first == [[1.0, 1.0]] * 3 and second == [2.0] * 4 and mean == [0.5, 0.5]
        assert third == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
        assert payload == {"x": 12 * 4 + 4 * 8, "y": 8} and calls == 3


def test_ranks_exchange_plain_objects() -> None:
    for rank, x in enumerate(found("exchanges")):
        objects, packed, answer, some, none = x["words"]
        assert objects == [{"rank": 0, "text": ""}, {"rank": 1, "text": "ä"}]
        assert packed == ([] if rank else [b"\1\2", b"\1\2\1\2"])
        assert answer == [0, "first"] and some is True and none is False


@pytest.mark.parametrize("name", list(ERRORS))
def test_an_error_on_one_rank_is_raised_on_all(name: str) -> None:
    for x in found("exchanges"):
        assert re.search(ERRORS[name], x[name]["error"], re.DOTALL), x[name]

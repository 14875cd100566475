"""Settled credits: what is taken and refused, and which steps have been settled."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inrun.errors import LedgerError
from inrun.ledger import SettledCredits
from inrun.ledger.schema import CREDITS
from inrun.ledger.settled import SettledSteps, check_settlement, credit_table


def settled(step: int = 3, **changed) -> SettledCredits:
    fields = {
        "sample_ids": np.array([7, 9]),
        "credits": {"v": np.float32([1.5, -2])},
        "errors": {"v": np.float32([0, 0.25])},
        "paid": np.float32([1, 0.5]),
    }
    return SettledCredits(step, **{**fields, **changed})


BAD = {
    "half a step": ({"step": 0.5}, "step is 0.5"),
    "before the first": ({"step": -1}, "step is -1"),
    "ids not whole": ({"sample_ids": np.array([0.5, 1])}, "row of integers"),
    "too few": ({"credits": {"v": np.float32([1])}}, "credits to 'v' have the shape"),
    "not finite": ({"credits": {"v": np.float32([1, np.nan])}}, "credits to 'v' are not all finite"),
    "too large for its type": ({"credits": {"v": np.float64([1, 1e300])}}, "not all finite"),
    "errors of another label": ({"errors": {"w": np.float32([0, 0])}}, r"speak of \['v'\], their errors of \['w'\]"),
    "no errors": ({"errors": {}}, r"their errors of \[\]"),
    "a negative error": ({"errors": {"v": np.float32([0, -1])}}, "errors of credits to 'v' range from -1.0"),
    "paid more than all": ({"paid": np.float32([1, 1.1])}, "paid shares range"),
    "paid less than nothing": ({"paid": np.float32([1, -0.1])}, "paid shares range"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_kept_is_refused(name: str) -> None:
    changed, message = BAD[name]
    check_settlement(settled())  # the control
    with pytest.raises(LedgerError, match=message):
        check_settlement(settled(**changed))


def test_arrays_may_be_used_again() -> None:
    given_ = settled()
    kept = check_settlement(given_)
    for array in (given_.sample_ids, given_.credits["v"], given_.errors["v"], given_.paid):
        array[:] = 0
    assert credit_table([kept]).equals(credit_table([settled()]))


def test_rows_of_the_table() -> None:
    two = settled(4, credits={"v": np.float32([1, 2]), "w#0": np.float32([3, 4])}, errors={x: np.zeros(2) for x in ("v", "w#0")})
    table = credit_table([check_settlement(settled()), check_settlement(two)])
    assert table.schema.equals(CREDITS)
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        (3, 0, 7, "v", 1.5, 0.0, 1.0),
        (3, 1, 9, "v", -2.0, 0.25, 0.5),
        (4, 0, 7, "v", 1.0, 0.0, 1.0),
        (4, 1, 9, "v", 2.0, 0.0, 0.5),
        (4, 0, 7, "w#0", 3.0, 0.0, 1.0),
        (4, 1, 9, "w#0", 4.0, 0.0, 0.5),
    ]
    assert credit_table([]).equals(CREDITS.empty_table())


@given(st.lists(st.integers(0, 12)))
def test_settled_steps_are_a_set(steps: list[int]) -> None:
    kept = SettledSteps(steps)
    assert [s in kept for s in range(-1, 14)] == [s in set(steps) for s in range(-1, 14)]
    ranges = list(zip(kept._first, kept._last, strict=True))
    assert all(a <= b for a, b in ranges)
    assert all(after[0] > before[1] + 1 for before, after in itertools.pairwise(ranges))  # joined, so that they are few


def test_each_step_settles_once() -> None:
    steps = SettledSteps([1])
    for bad, message in (
        ([settled(2), settled(1)], "step 1 was settled already; the credit of each use is settled once"),
        ([settled(2), settled(2)], "step 2 was settled already"),
        ([settled(2), settled(5)], r"step 5 cannot be settled: it was not written yet \(the next step is 5\)"),
    ):
        with pytest.raises(LedgerError, match=message):
            steps.take(bad, 5)
        assert 2 not in steps  # none of them was taken
    assert [s.step for s in steps.take([settled(4), settled(2)], 5)] == [4, 2]
    assert 2 in steps and 4 in steps

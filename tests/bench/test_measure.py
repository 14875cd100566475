"""Interleaved timing: who takes part, how often it is made, and that the least time counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inrun.bench.contestants import Entry
from inrun.bench.measure import INSTANCES, Result, best_of, compared, measure
from inrun.bench.shape import Shape

SMALL = Shape(width=8, layers=1, heads=1, context=4, vocab=16, batch=2)


class Counted:
    """A contestant that counts how often it was made and how many steps each of its kind took."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
        self.steps.append(0)
        place = len(self.steps) - 1

        def step(number: int) -> None:
            self.steps[place] += 1

        return step, lambda: 7


@pytest.mark.parametrize(
    ("rounds", "slow_rounds", "fast", "slow"),
    [
        (1, 1, [1], [1]),
        (11, 1, [11], [1]),
        (19, 3, [7, 6, 6], [1, 1, 1]),
        (18, 1, [6, 6, 6], [1]),
        (12, 0, [6, 6], []),
    ],
)
def test_rounds_are_shared_out_over_instances(rounds: int, slow_rounds: int, fast: list[int], slow: list[int]) -> None:
    plain, limit, other = Counted(), Counted(), Counted()
    entries = [Entry("plain", plain), Entry("limit", limit), Entry("other", other, slow=True)]
    results = measure(SMALL, entries, rounds, slow_rounds)
    assert len(fast) <= INSTANCES
    memory = [1] + [0] * len(fast)
    for counted in (plain, limit):
        assert counted.steps == [2 + count + memory[i] for i, count in enumerate(fast)]
    assert other.steps == [2 + count + memory[i] for i, count in enumerate(slow)]
    assert [r.name for r in results] == ["plain", "limit", "other"][: 3 if slow else 2]
    assert all(r.peak_bytes >= 7 for r in results)
    assert results[0].relative == 1.0 and results[1].of_limit == 1.0


def test_the_least_time_counts() -> None:
    a = [Result("plain", 2.0, 1.9, 5), Result("limit", 3.0, 2.0, 6)]
    b = [Result("plain", 1.5, 2.5, 0), Result("limit", 4.0, 1.0, 0)]
    found = compared([best_of(x, y) for x, y in zip(a, b, strict=True)])
    assert [(r.seconds, r.cpu_seconds, r.peak_bytes) for r in found] == [(1.5, 1.9, 5), (3.0, 1.0, 6)]
    assert found[1].relative == 0.5 and found[1].relative_cpu == 1.9

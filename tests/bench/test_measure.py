"""Interleaved timing: who takes part, how often it is made, and that the mean of all steps counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from inrun.bench.contestants import Entry
from inrun.bench.measure import INSTANCES, Result, compared, measure, pooled
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
        (99, 1, [99], [1]),
        (151, 3, [51, 50, 50], [1, 1, 1]),
        (150, 1, [50, 50, 50], [1]),
        (100, 0, [50, 50], []),
    ],
)
def test_rounds_are_shared_out_over_instances(rounds: int, slow_rounds: int, fast: list[int], slow: list[int]) -> None:
    plain, floor, other = Counted(), Counted(), Counted()
    entries = [Entry("plain", plain), Entry("floor", floor), Entry("other", other, slow=True)]
    results = measure(SMALL, entries, rounds, slow_rounds)
    assert len(fast) <= INSTANCES
    memory = [1] + [0] * len(fast)
    for counted in (plain, floor):
        assert counted.steps == [2 + count + memory[i] for i, count in enumerate(fast)]
    assert other.steps == [2 + count + memory[i] for i, count in enumerate(slow)]
    assert [r.name for r in results] == ["plain", "floor", "other"][: 3 if slow else 2]
    assert all(r.peak_bytes >= 7 for r in results)
    assert results[0].relative == 1.0 and results[1].of_floor == 1.0


def test_instances_are_pooled_by_steps() -> None:
    a = [Result("plain", 2.0, 1.9, 5, steps=1), Result("floor", 3.0, 2.0, 6, steps=1)]
    b = [Result("plain", 1.0, 2.5, 0, steps=3), Result("floor", 2.0, 1.0, 0, steps=1)]
    found = compared([pooled(x, y) for x, y in zip(a, b, strict=True)])
    assert [(r.seconds, r.cpu_seconds, r.peak_bytes, r.steps) for r in found] == [(1.25, 2.35, 5, 4), (2.5, 1.5, 6, 2)]
    assert found[1].relative == 0.5 and found[1].relative_cpu == 2.35 / 1.5


class Uneven:
    """A contestant whose warm-up is slow, and which settles in every fourth step what the other steps leave over."""

    def __call__(self, shape: Shape) -> tuple[Callable[[int], None], Callable[[], int]]:
        def step(number: int) -> None:
            time.sleep(0.1 if number < 3 else 0.08 if number % 4 == 3 else 0.0)

        return step, lambda: 7


def test_the_mean_of_all_steps_after_the_warm_up_counts() -> None:
    entries = [Entry("plain", Uneven(), warm_up=3), Entry("floor", Uneven(), warm_up=3)]
    for r in measure(SMALL, entries, 8, 0):
        assert r.steps == 8
        assert 0.02 <= r.seconds < 0.08, "neither the best step (nothing), nor one with the warm-up in it"

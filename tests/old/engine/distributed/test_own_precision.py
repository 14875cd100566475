"""Under a bfloat16 policy second takes differences in the parameters' own precision, and training does not notice."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from job import launch
from own_precision import ROUGH
from plays import assembled, batch_gaps, play_part


@functools.cache
def launched() -> list[dict[str, Any]]:
    return launch("own precision", seconds=200.0, extra={"JOB_MODULE": "own_precision"})


def found(name: str) -> list[Any]:
    parts = [x.get(name, {"error": x["log"]}) for x in launched()]
    assert not any(isinstance(x, dict) and "error" in x for x in parts), parts
    return parts


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


@pytest.mark.parametrize("how", ["again", "kept"])
def test_training_is_the_same_bit_for_bit(how: str) -> None:
    """With parameters that are split again after a forward, and kept whole."""
    for scored, plain in zip(found(f"scored, {how}"), found(f"plain, {how}"), strict=True):
        assert same(scored, plain)


@pytest.mark.parametrize("how", ["again", "kept"])
def test_a_pass_that_fails_leaves_nothing_behind_and_says_what_it_was(how: str) -> None:
    for failed, plain in zip(found(f"failing, {how}"), found(f"plain, {how}"), strict=True):
        assert same(failed["weights"], plain)
        assert "in the precision of the parameters" in failed["told"] and 'method="midpoint"' in failed["told"]


def test_a_policy_that_is_not_put_back_shows() -> None:
    """The control of both."""
    assert not same(found("not put back")[0], found("plain, again")[0])


def test_rounded_passes_would_show() -> None:
    """The control of what test_processes.py holds to 2e-2: the same play, with differences of rounded weights."""
    gaps = batch_gaps(assembled(found("rounded"), ROUGH), play_part(ROUGH, 0, 1))
    assert min(gaps) > 0.1, gaps


def test_models_that_round_by_themselves_are_left_to_it() -> None:
    assert len(found("autocast")[0]) > 0

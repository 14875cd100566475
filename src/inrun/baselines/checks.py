"""What the baselines that look at gradients ask of their options, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from inrun.errors import ConfigurationError


def one_each(baseline: str, checkpoints: Sequence[Any], **given: Sequence[Any]) -> None:
    """Raise ConfigurationError unless there are checkpoints, and one of everything else for each."""
    for name, values in {"checkpoints": checkpoints, **given}.items():
        if isinstance(values, Mapping) or not hasattr(values, "__len__"):
            raise ConfigurationError(f"{baseline}: {name} is a {type(values).__name__}; give a list, one for each checkpoint")
    if not len(checkpoints):
        raise ConfigurationError(f"{baseline}: checkpoints is empty; give at least one state dict")
    for name, values in given.items():
        if len(values) != len(checkpoints):
            raise ConfigurationError(f"{baseline}: {len(checkpoints)} checkpoints, but {len(values)} {name}; give one for each")


def at_least(baseline: str, least: float, **given: float) -> None:
    """Raise ConfigurationError unless options are finite numbers that are no less than ``least``."""
    for name, value in given.items():
        if not least <= value < math.inf:
            raise ConfigurationError(f"{baseline}: {name}={value}; it must be a finite number, {least:g} or more")


def rates(baseline: str, lrs: Sequence[Any]) -> list[float]:
    """Return learning rates as plain numbers, of a list or a tensor; ConfigurationError where one is none."""
    found = [float(lr) for lr in lrs]
    for c, lr in enumerate(found):
        at_least(baseline, 0, **{f"lrs[{c}]": lr})
    return found

"""``leave_one_out``: how much worse is training on all samples but this one?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inrun.baselines.registry import Ids, register
from inrun.baselines.retraining import LEAVE_ONE_OUT, Retraining, Subset, Tell, Utility, Vector, derived_seed
from inrun.errors import ConfigurationError


@register("leave_one_out", "utility of training on all samples, minus that of training on all others", unit="utility")
def leave_one_out(
    sample_ids: Ids,
    validation: Mapping[str, Any],
    *,
    utility: Utility,
    repeats: int = 1,
    seed: int = 0,
    jobs: int = 1,
    cells: Path | None = None,
    tell: Tell | None = None,
) -> dict[str, Vector]:
    """Train once on all samples and once without each: score of n = V(all) − V(all but n), mean over repeats.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers.
        utility: ``(positions [m], seed) -> number per validation set``. Both sides of a difference have the same seed.
        repeats: How often, each time with another seed; each costs n + 1 training runs. One sample changes less than another seed
            does in most training runs, so that one repeat is mostly noise.
        seed: Of training runs.
        jobs: Processes.
        cells: Folder where finished training runs are kept.
        tell: Hears of progress.
    """
    if repeats < 1:
        raise ConfigurationError(f"leave_one_out got repeats={repeats}; it must be at least 1")
    n = len(sample_ids)
    masks = np.vstack([np.ones(n, np.bool_), ~np.eye(n, dtype=np.bool_)])
    tasks = [Subset(mask, derived_seed(seed, LEAVE_ONE_OUT, r)) for r in range(repeats) for mask in masks]
    found = Retraining(sample_ids, validation, utility, jobs, cells, tell).utilities("leave_one_out: training runs", tasks)
    runs = {name: v.reshape(repeats, n + 1) for name, v in found.items()}
    return {name: (v[:, :1] - v[:, 1:]).mean(0) for name, v in runs.items()}

"""``empirical_influence``: how much better are models that were trained with a sample than those that were not?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from inrun.baselines.registry import Ids, register
from inrun.baselines.retraining import Draw, Retraining, Tell, Utility, Vector, random_subsets
from inrun.errors import ConfigurationError


@register("empirical_influence", "mean utility of models trained on random subsets with the sample, minus without", unit="utility")
def empirical_influence(
    sample_ids: Ids,
    validation: Mapping[str, Any],
    *,
    utility: Utility,
    subsets: int = 1000,
    share: float = 0.5,
    draw: Draw = "size",
    seed: int = 0,
    jobs: int = 1,
    cells: Path | None = None,
    tell: Tell | None = None,
) -> dict[str, Vector]:
    """Compare subsets with a sample with those without it (Feldman & Zhang 2020).

    Score of n = mean of V(S) over the subsets with n ∈ S − mean over those with n ∉ S. Where all subsets have the same size, a
    sample that is in has taken the place of another: for V(S) = Σ w over S, scores tend to (w − mean w) · n / (n − 1), so that 0
    means as good as the average. With ``draw="coins"`` they tend to w, with more noise.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers.
        utility: ``(positions [m], seed) -> number per validation set``; every subset has a seed of its own.
        subsets: How many; each costs one training run. ``datamodels`` with the same draws and ``cells`` shares them.
        share: The part of the samples in a subset.
        draw: ``size``: all subsets have round(share · n) samples; ``coins``: each sample is in with probability ``share``.
        seed: Of subsets and training runs; the k-th subset does not depend on their number.
        jobs: Processes.
        cells: Folder where finished subsets are kept.
        tell: Hears of progress.
    """
    drawn = random_subsets(len(sample_ids), subsets, share, draw, seed)
    masks = np.stack([subset.mask for subset in drawn])
    times = masks.sum(0)
    alone = np.flatnonzero((times == 0) | (times == subsets))
    if len(alone):  # said before the training runs, not after
        raise ConfigurationError(
            f"empirical_influence: of {subsets} subsets, sample {sample_ids[alone[0]]} is in {times[alone[0]]}, so that there is "
            f"nothing to compare it with ({len(alone)} such samples); draw more subsets"
        )
    found = Retraining(sample_ids, validation, utility, jobs, cells, tell).utilities("empirical_influence: subsets", drawn)
    return {name: (v @ masks) / times - (v @ ~masks) / (subsets - times) for name, v in found.items()}

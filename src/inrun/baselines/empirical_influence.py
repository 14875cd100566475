"""``empirical_influence``: how much better are models that were trained with a sample than those that were not?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from inrun.baselines.registry import Ids, register
from inrun.baselines.retraining import Vector
from inrun.baselines.subsets import Drawing, Drawn
from inrun.errors import ConfigurationError


@register(
    "empirical_influence",
    "mean utility of models trained on random subsets with the sample, minus without",
    unit="utility",
    takes=Drawing,
)
def empirical_influence(sample_ids: Ids, validation: Mapping[str, Any], **drawing: Any) -> dict[str, Vector]:
    """Compare subsets with a sample with those without it (Feldman & Zhang 2020).

    Score of n = mean of V(S) over the subsets with n ∈ S − mean over those with n ∉ S. Where all subsets have the same size, a
    sample that is in has taken the place of another: for V(S) = Σ w over S, scores tend to (w − mean w) · n / (n − 1), so that 0
    means as good as the average. With ``draw="coins"`` they tend to w, with more noise.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Its names are those of the utility's numbers.
        drawing: How subsets are drawn and trained, see ``subsets.Drawing``; ``datamodels`` with the same and ``cells`` shares them.
    """
    drawn = Drawn("empirical_influence", sample_ids, Drawing(**drawing))
    masks = drawn.masks
    subsets, times = len(masks), masks.sum(0)
    alone = np.flatnonzero((times == 0) | (times == subsets))
    if len(alone):  # said before the training runs, not after
        raise ConfigurationError(
            f"empirical_influence: of {subsets} subsets, sample {sample_ids[alone[0]]} is in {times[alone[0]]}, so that there is "
            f"nothing to compare it with ({len(alone)} such samples); draw more subsets"
        )
    found = drawn.utilities(validation)
    return {name: (v @ masks) / times - (v @ ~masks) / (subsets - times) for name, v in found.items()}

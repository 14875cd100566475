"""``loss_at_end``: how badly does the trained model still fit a sample? What a practitioner looks at first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inrun.baselines.gradients import looking
from inrun.baselines.registry import Ids, register

if TYPE_CHECKING:
    from torch import nn

    from inrun.baselines.gradients import SampleLoss


@register("loss_at_end", "the sample's own loss at the final weights, negated", unit="loss of the sample")
def loss_at_end(
    sample_ids: Ids, validation: Mapping[str, Any], *, model: nn.Module, sample_loss: SampleLoss
) -> dict[str, npt.NDArray[np.float64]]:
    """Return −ℓ_n(w): higher (a smaller loss) counts as the better sample. The same for every validation set.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Names only; no loss of them is asked for.
        model: At its final weights.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
    """
    with looking(model, sample_loss, sample_ids) as look:
        scores = -look.losses().double().cpu().numpy()
    return dict.fromkeys(validation, scores)

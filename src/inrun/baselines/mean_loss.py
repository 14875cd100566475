"""``mean_loss``: how badly did the model fit a sample, over the whole run? Less is memorised than at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from inrun.baselines.checks import one_each
from inrun.baselines.gradients import looking
from inrun.baselines.registry import Ids, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss


@register("mean_loss", "the sample's own loss, mean over checkpoints of the run, negated", unit="loss of the sample")
def mean_loss(
    sample_ids: Ids,
    validation: Mapping[str, Any],
    *,
    model: nn.Module,
    sample_loss: SampleLoss,
    checkpoints: Sequence[Mapping[str, Tensor]],
) -> dict[str, npt.NDArray[np.float64]]:
    """Return −(1/C) Σ_c ℓ_n(w_c): higher (smaller losses) counts as the better sample. The same for every validation set.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: Names only; no loss of them is asked for.
        model: Gives the structure.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
        checkpoints: State dicts.
    """
    one_each("mean_loss", checkpoints)
    with looking(model, sample_loss, sample_ids) as look:
        losses = [look.losses(weights).double().cpu().numpy() for weights in checkpoints]
    return dict.fromkeys(validation, -np.mean(losses, axis=0))

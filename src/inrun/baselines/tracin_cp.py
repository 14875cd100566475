"""``tracin_cp``: gradients of a sample and of the validation set, multiplied at checkpoints of the run (Pruthi et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.checks import one_each, rates
from inrun.baselines.gradients import looking
from inrun.baselines.registry import Ids, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss, ValidationLosses


@register("tracin_cp", "inner products of sample and validation gradients at checkpoints, times the learning rate", unit="loss")
def tracin_cp(
    sample_ids: Ids,
    validation: ValidationLosses,
    *,
    model: nn.Module,
    sample_loss: SampleLoss,
    checkpoints: Sequence[Mapping[str, Tensor]],
    lrs: Sequence[float],
) -> dict[str, npt.NDArray[np.float64]]:
    """Add up over checkpoints: score of n = Σ_c η_c ⟨g_n(w_c), g_val(w_c)⟩.

    In units of the validation loss: by how much it would fall, to first order, if at every checkpoint plain SGD took one
    step on the sample alone. Positive means the sample lowers it.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: ``model -> scalar loss`` by name.
        model: Gives the structure, and says what is trained.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
        checkpoints: State dicts.
        lrs: The learning rate at every checkpoint.
    """
    one_each("tracin_cp", checkpoints, lrs=lrs)
    weights_of = rates("tracin_cp", lrs)
    found = np.zeros((len(validation), len(sample_ids)))
    with looking(model, sample_loss, sample_ids) as look:
        for weights, lr in zip(checkpoints, weights_of, strict=True):
            g_val = look.validation(validation, weights)
            for rows, g in look.blocks(weights):
                found[:, rows] += lr * (g_val @ g.T).double().cpu().numpy()
    return dict(zip(validation, found, strict=True))

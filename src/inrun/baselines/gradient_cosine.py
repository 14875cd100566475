"""``gradient_cosine``: do a sample and the validation set pull the weights the same way, as they stand now?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.gradients import looking
from inrun.baselines.registry import Ids, register

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss, ValidationLosses


@register("gradient_cosine", "cosine of a sample's gradient and the validation gradient at the present weights", unit="cosine")
def gradient_cosine(
    sample_ids: Ids, validation: ValidationLosses, *, model: nn.Module, sample_loss: SampleLoss
) -> dict[str, npt.NDArray[np.float64]]:
    """Compare directions: score of n = ⟨g_n, g_val⟩ / (|g_n| |g_val|), 0 where one of them is 0. In [−1, 1], without unit.

    Positive: a step along the sample's negative gradient lowers the validation loss. The model is in evaluation mode
    meanwhile and left as it was, its ``.grad`` included.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: ``model -> scalar loss`` by name.
        model: At the weights to look from.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
    """
    found = np.zeros((len(validation), len(sample_ids)))
    with looking(model, sample_loss, sample_ids) as look:
        g_val = unit(look.validation(validation))
        for rows, g in look.blocks():
            found[:, rows] = (g_val @ unit(g).T).double().cpu().numpy()
    return dict(zip(validation, found, strict=True))


def unit(vectors: Tensor) -> Tensor:
    """Return rows of length 1, ``[m, P]``; one of length 0 stays."""
    lengths = vectors.norm(dim=1, keepdim=True)
    return vectors / lengths.where(lengths > 0, 1.0)

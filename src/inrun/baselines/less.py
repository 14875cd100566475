"""``less``: directions in which Adam would move for a sample, against the validation gradient (Xia et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.checks import at_least, one_each, rates
from inrun.baselines.gradient_cosine import unit
from inrun.baselines.gradients import looking
from inrun.baselines.projection import Projection
from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss, ValidationLosses


@register(
    "less", "cosine of Adam's move for a sample and the validation gradient, mean over checkpoints by learning rate", unit="cosine"
)
def less(
    sample_ids: Ids,
    validation: ValidationLosses,
    *,
    model: nn.Module,
    sample_loss: SampleLoss,
    checkpoints: Sequence[Mapping[str, Tensor]],
    lrs: Sequence[float],
    second_moments: Sequence[Mapping[str, Tensor]],
    steps: Sequence[int],
    first_moments: Sequence[Mapping[str, Tensor]] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    dimension: int = 2048,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.float64]]:
    """Compare Adam's next move with the validation gradient: score of n = Σ_c η_c cos(S Γ_c(n), S g_val(w_c)) / Σ_c η_c.

    Γ(n) = m̂ / (√v̂ + ε), with m̂ = (β₁ m + (1 − β₁) g_n) / (1 − β₁^(t+1)) and v̂ = (β₂ v + (1 − β₂) g_n²) / (1 − β₂^(t+1)): the
    next step of Adam from its state after t steps, if the sample were its whole batch. S is a random projection. In
    [−1, 1], without unit; positive means that this step lowers the validation loss.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: ``model -> scalar loss`` by name; its gradient is taken as it is, as if by SGD.
        model: Gives the structure, and says what is trained.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
        checkpoints: State dicts, spread over the run.
        lrs: The learning rate at every checkpoint, its weight.
        second_moments: Adam's ``exp_avg_sq`` by parameter name, at every checkpoint.
        steps: Steps taken until every checkpoint, t.
        first_moments: Adam's ``exp_avg`` likewise, as in the authors' code; without, m = 0: what the sample itself adds.
        betas: Adam's.
        eps: Adam's.
        dimension: Of the projection.
        seed: Of the projection.
    """
    moments = {"second_moments": second_moments} | ({} if first_moments is None else {"first_moments": first_moments})
    one_each("less", checkpoints, lrs=lrs, steps=steps, **moments)
    rate = rates("less", lrs)
    if sum(rate) <= 0:
        raise ConfigurationError(f"less: the learning rates {rate[:5]} are the checkpoints' weights; one must be above 0")
    at_least("less", 0, **{f"steps[{c}]": float(t) for c, t in enumerate(steps)})
    found = np.zeros((len(validation), len(sample_ids)))
    with looking(model, sample_loss, sample_ids) as look:
        project = Projection(look.size, dimension, seed)
        for c, weights in enumerate(checkpoints):
            v = look.flat(second_moments[c], f"second_moments[{c}]")
            m = 0.0 if first_moments is None else look.flat(first_moments[c], f"first_moments[{c}]")
            g_val = unit(project(look.validation(validation, weights)))
            for rows, g in look.blocks(weights):
                moves = unit(project(adam_move(g, m, v, steps[c], betas, eps)))
                found[:, rows] += rate[c] / sum(rate) * (g_val @ moves.T).double().cpu().numpy()
    return dict(zip(validation, found, strict=True))


def adam_move(g: Tensor, m: Tensor | float, v: Tensor, t: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Return Γ for gradients ``[n, P]`` from moments ``[P]`` after t steps; without the learning rate and its sign."""
    beta1, beta2 = betas
    first = (beta1 * m + (1 - beta1) * g) / (1 - beta1 ** (t + 1))
    second = (beta2 * v + (1 - beta2) * g.square()) / (1 - beta2 ** (t + 1))
    return first / (second.sqrt() + eps)

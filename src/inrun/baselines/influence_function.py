"""``influence_function``: what would leaving a sample out change, to first order, at an optimum (Koh & Liang 2017)?"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.checks import at_least
from inrun.baselines.gradients import Look, looking
from inrun.baselines.kronecker import KroneckerFisher
from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss, ValidationLosses

log = logging.getLogger(__name__)
CURVATURES = ("fisher", "hessian")


@register(
    "influence_function", "change of the validation loss if a sample were left out, by a damped inverse curvature", unit="loss"
)
def influence_function(
    sample_ids: Ids,
    validation: ValidationLosses,
    *,
    model: nn.Module,
    sample_loss: SampleLoss,
    curvature: str = "fisher",
    damping: float | None = None,
    iterations: int = 30,
    tolerance: float = 1e-6,
    curvature_samples: int = 256,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.float64]]:
    """Solve once per validation set: score of n = (1/N) g_valᵀ (H + λ I)⁻¹ g_n, N samples, all at the weights that the model has.

    In units of the validation loss: by how much it would rise, to first order, if the sample were left out of the mean loss
    of the N and the model trained to its new optimum. Positive means the sample lowers it.

    ``curvature="fisher"``: H is the Fisher matrix of the sample gradients in an eigenbasis of Kronecker factors
    (:mod:`inrun.baselines.kronecker`); never negative, and one decomposition serves all validation sets. ``"hessian"``: H is the
    Hessian of the mean loss of ``curvature_samples`` samples drawn at random (all, where there are no more), and the solution
    conjugate gradients': exact for convex losses, far more costly, and where the curvature is negative in spite of
    the damping it ends early, with a warning; so it does where ``iterations`` are not enough.

    Args:
        sample_ids: The samples, ``[n]``: all that the model was trained on.
        validation: ``model -> scalar loss`` by name.
        model: At its final weights.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone, without weight decay: that is damping.
        curvature: ``fisher`` or ``hessian``.
        damping: λ; None is 0.01 for the Hessian and a tenth of every parameter's mean eigenvalue for the Fisher matrix.
        iterations: Of conjugate gradients, at most.
        tolerance: Of conjugate gradients, relative length of the residual.
        curvature_samples: For the Hessian.
        seed: Of the draw for the Hessian.
    """
    if curvature not in CURVATURES:
        raise ConfigurationError(f"influence_function: unknown curvature {curvature!r}; available: {', '.join(CURVATURES)}")
    at_least("influence_function", 0, damping=damping or 0.0, tolerance=tolerance)
    at_least("influence_function", 1, iterations=iterations, curvature_samples=curvature_samples)
    found = np.zeros((len(validation), len(sample_ids)))
    with looking(model, sample_loss, sample_ids) as look:
        g_val = look.validation(validation)
        if curvature == "fisher":
            solved = KroneckerFisher(look).solve(g_val, damping)
        else:
            drawn = np.random.default_rng(seed).permutation(len(sample_ids))[:curvature_samples]
            damp = 0.01 if damping is None else damping
            solved = _conjugate_gradients(look, g_val, np.sort(drawn), damp, iterations, tolerance)
        for rows, g in look.blocks():
            found[:, rows] = (solved @ g.T).double().cpu().numpy() / len(sample_ids)
    return dict(zip(validation, found, strict=True))


def _conjugate_gradients(look: Look, b: Tensor, drawn: Ids, damping: float, iterations: int, tolerance: float) -> Tensor:
    """Solve (H + λ I) x = b for every row of b, ``[sets, P]``, by Hestenes and Stiefel's method, each by itself."""
    import torch

    solved, left = [], []
    for row in b:
        x, residual = torch.zeros_like(row), row.clone()
        direction, square = residual.clone(), residual @ residual
        for done in range(iterations + 1):
            if square <= tolerance**2 * (row @ row):
                break
            if done == iterations:
                left.append(float((square / (row @ row)).sqrt()))
                break
            image = look.hessian_product(direction, drawn) + damping * direction
            bend = direction @ image
            if bend <= 0:
                log.warning(
                    "influence_function: negative curvature in spite of damping %g; give more damping, or curvature='fisher'",
                    damping,
                )
                # Nothing was solved yet: the gradient itself is then the direction, as with infinite damping.
                x = x if x.any() else row / max(damping, 1e-12)
                break
            x = x + square / bend * direction
            residual = residual - square / bend * image
            square, before = residual @ residual, square
            direction = residual + square / before * direction
        solved.append(x)
    if left:
        log.warning(
            "influence_function: conjugate gradients stopped after %d iterations for %d of %d validation sets, with up to %.2g of "
            "the right side left where tolerance=%g was asked for; scores are rough: give more iterations= or more damping=",
            iterations,
            len(left),
            len(b),
            max(left),
            tolerance,
        )
    return torch.stack(solved)

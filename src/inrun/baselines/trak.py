"""``trak``: a linear model in randomly projected gradients stands in for training (Park et al. 2023)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.checks import at_least, one_each
from inrun.baselines.extra import need
from inrun.baselines.gradients import Look, looking
from inrun.baselines.projection import Projection
from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError, ValidationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from inrun.baselines.gradients import SampleLoss, ValidationLosses

OUTPUTS = ("margin", "loss")


@register("trak", "influence in a linear model of projected gradients, mean over checkpoints", unit="arbitrary")
def trak(
    sample_ids: Ids,
    validation: ValidationLosses,
    *,
    model: nn.Module,
    sample_loss: SampleLoss,
    checkpoints: Sequence[Mapping[str, Tensor]],
    output: str = "margin",
    dimension: int = 2048,
    damping: float = 0.1,
    seed: int = 0,
) -> dict[str, npt.NDArray[np.float64]]:
    """Regress in gradient space: score of n = mean_c(φ_cᵀ (Φ_cᵀΦ_c + λ_c I)⁻¹ S g_val(w_c)) · mean_c(Q_c), all of sample n.

    φ = −S ∇f(w) is the projected gradient of the model's output f for the sample, Φ ``[n, dimension]`` has those of all,
    and Q = −∂ℓ/∂f. For ``output="margin"``, f = log(p / (1 − p)) with p = exp(−ℓ), so that −∇f = g_n / (1 − p) and
    Q = 1 − p, as in the paper for losses that are log-likelihoods (for a text p is the geometric mean over its tokens); for
    ``"loss"``, f = −ℓ: −∇f = g_n and Q = 1. λ_c is ``damping`` times the mean eigenvalue of ΦᵀΦ: that has no inverse where there
    are fewer samples than dimensions. The linear algebra is traker's, which also scales every checkpoint's inverse to a mean
    entry of 1. Hence the unit is arbitrary; positive means the sample lowers the validation loss.

    Args:
        sample_ids: The samples, ``[n]``: all that the model was trained on, or a fair part.
        validation: ``model -> scalar loss`` by name; its plain gradient is the target.
        model: Gives the structure, and says what is trained.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
        checkpoints: State dicts of independently trained models, or spread over one run.
        output: Of which function of the loss gradients are regressed on.
        dimension: Of the projection.
        damping: Relative to the mean eigenvalue.
        seed: Of the projections; every checkpoint has its own.
    """
    one_each("trak", checkpoints)
    if output not in OUTPUTS:
        raise ConfigurationError(f"trak: unknown output {output!r}; available: {', '.join(OUTPUTS)}")
    at_least("trak", 0, damping=damping)
    computers = need("trak.score_computers", "trak")
    import torch

    found = torch.zeros(len(sample_ids), len(validation))
    to_loss = torch.zeros(len(sample_ids), 1)
    with looking(model, sample_loss, sample_ids) as look:
        for c, weights in enumerate(checkpoints):
            project = Projection(look.size, dimension, seed + c)
            if not damping and len(sample_ids) < project.dimension:
                raise ConfigurationError(
                    f"trak: damping=0 with {len(sample_ids)} samples in {project.dimension} dimensions, where ΦᵀΦ has no inverse; "
                    "give some damping, more samples or a smaller dimension"
                )
            features, q = _features(look, weights, project, output)
            target = project(look.validation(validation, weights)).float().cpu()
            # Single precision is kept in range; traker's scaled inverse is the same for it, and the target takes the factor back.
            scale = features.square().mean().sqrt()
            scale = scale.where(scale > 0, 1.0)
            features, target = features / scale, target * scale
            damp = damping * float(features.square().sum()) / project.dimension
            computer = computers.BasicScoreComputer(torch.float32, "cpu", logging_level=logging.WARNING, lambda_reg=damp)
            inverted = computer.get_x_xtx_inv(features, computer.get_xtx(features))
            computer.get_scores(inverted, target, accumulator=found)
            to_loss += q
    scores = (found / len(checkpoints) * to_loss / len(checkpoints)).double().numpy()
    return dict(zip(validation, scores.T, strict=True))


def _features(look: Look, weights: Mapping[str, Tensor], project: Projection, output: str) -> tuple[Tensor, Tensor]:
    """Return −S ∇f of all samples, ``[n, dimension]``, and Q, ``[n, 1]``."""
    import torch

    features, q = [], []
    for rows, g, losses in look.blocks_with_losses(weights):
        if output == "margin" and bool((losses < -1e-6).any()):
            worst = int(losses.argmin())
            raise ValidationError(
                f"trak: the loss of sample {look.ids[rows][worst]} is {float(losses[worst]):.4g}, so exp(−loss) is no probability, "
                "and there is no margin; give output='loss'"
            )
        # 1 − exp(−ℓ) without cancellation; a loss of 0, whose gradient is 0 too, must not give 0 / 0.
        rest = (-torch.expm1(-losses)).clamp_min(1e-6) if output == "margin" else torch.ones_like(losses)
        features.append((project(g) / rest[:, None]).float().cpu())
        q.append(rest[:, None].float().cpu())
    return torch.cat(features), torch.cat(q)

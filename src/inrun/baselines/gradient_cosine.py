"""``gradient_cosine``: do a sample and the validation set pull the weights the same way, as they stand now?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inrun.baselines.registry import Ids, register
from inrun.errors import ConfigurationError, ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn


@register("gradient_cosine", "cosine of a sample's gradient and the validation gradient at the present weights", unit="cosine")
def gradient_cosine(
    sample_ids: Ids,
    validation: Mapping[str, Callable[[nn.Module], Tensor]],
    *,
    model: nn.Module,
    sample_loss: Callable[[nn.Module, int], Tensor],
) -> dict[str, npt.NDArray[np.float64]]:
    """Take one gradient at a time by plain autograd: score of n = ⟨g_n, ∇ℓ⟩ / (|g_n| |∇ℓ|), 0 where one of them is 0.

    The model is in evaluation mode meanwhile (one sample is no batch to take statistics of) and left as it was, its ``.grad``
    included. The gradients of the validation sets, and one of a sample, are in memory together.

    Args:
        sample_ids: The samples, ``[n]``.
        validation: ``model -> scalar loss`` by name.
        model: At the weights to look from.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ConfigurationError("gradient_cosine: no parameter of the model requires a gradient")
    with _evaluating(model):
        g_val = {name: _unit(_gradient(f"validation {name!r}", loss(model), parameters)) for name, loss in validation.items()}
        scores = {name: np.zeros(len(sample_ids)) for name in validation}
        for k, sample_id in enumerate(sample_ids.tolist()):
            g = _unit(_gradient(f"sample_loss of sample {sample_id}", sample_loss(model, k), parameters))
            for name in validation:
                scores[name][k] = float(_dot(g, g_val[name]))
    return scores


def _gradient(what: str, loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Return the gradient of a loss; zeros for what it does not depend on."""
    import torch

    if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ValidationError(f"{what} returned {shown}; it must return a scalar loss that depends on the model's parameters")
    return list(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))


def _dot(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """Return ⟨a, b⟩ over all parameters, in float64."""
    import torch

    return torch.stack([(x.double() * y.double()).sum().cpu() for x, y in zip(a, b, strict=True)]).sum()


def _unit(gradient: list[Tensor]) -> list[Tensor]:
    """Return a gradient of length 1, in float64; one of length 0 stays."""
    length = float(_dot(gradient, gradient).sqrt())
    return [g.double() / (length or 1.0) for g in gradient]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode for the time of a block; every module goes back to its own."""
    import torch

    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, training in before:
            module.training = training

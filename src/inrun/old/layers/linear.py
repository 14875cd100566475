"""Linear layers: ``torch.nn.Linear`` and the transposed ``Conv1D`` of transformers.

a: layer input ``[n, t, i]``, b: gradient at the layer output ``[n, t, o]``, v: direction ``[k, o, i]``.
The gradient of sample n is g_n = Σ_t b_nt a_ntᵀ.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from inrun.old.layers.forms import Contraction
from inrun.old.layers.layout import by_sample, sum_positions
from inrun.old.layers.registry import LayerRule, Owner, register, register_finder
from inrun.old.layers.shapes import Formed, GradientShape, Outer, Parts


@functools.cache
def shared_is_cheaper(t: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Choose the form of one layer whose direction is known: n, p and q are factors of both costs (``forms.py``)."""
    return Contraction(1, t, 1, 1).cheapest(("shared", "project"), dtype, device.type) == "shared"


def positions(a: Tensor, n: int) -> int:
    """Return how many positions each sample has in an input ``[..., i]``."""
    return a.numel() // max(a.shape[-1] * n, 1)


class LinearOwner(Owner):
    """The layer as the framework computes it; ``constants`` tells whether the weight is stored ``[i, o]``."""

    def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Multiply."""
        matrix = weight if constants else weight.t()
        # Not F.linear: its output is a view for inputs of three dimensions, and an in-place activation may follow.
        out = x.new_empty(*x.shape[:-1], matrix.shape[1])
        rows, flat = out.view(-1, matrix.shape[1]), x.reshape(-1, x.shape[-1])
        if bias is None:
            torch.mm(flat, matrix, out=rows)
        else:
            torch.addmm(bias, flat, matrix, out=rows)
        return out, (x,)

    def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
        """Multiply back."""
        flat = b.reshape(-1, b.shape[-1])
        return (flat @ (weight.t() if constants else weight)).view(saved[0].shape)


@register(nn.Linear)
class LinearRule(LayerRule):
    """``y = a Wᵀ + bias`` with ``weight`` of shape ``[o, i]``."""

    label = "linear"
    names = ("weight", "bias")
    positionwise = True
    owner = LinearOwner()
    turns = True
    #: Whether the weight is stored ``[i, o]`` instead of ``[o, i]``; the rule's only constant.
    transposed = False

    def constants(self, module: nn.Module) -> bool:
        """Return whether the weight is stored ``[i, o]``."""
        return self.transposed

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nt a_ntᵀ for the weight, Σ_t b_nt for the bias."""
        a, b = by_sample(inputs[0], n, 1), by_sample(b, n, 1)
        found: dict[str, GradientShape] = {}
        if "weight" in names:
            found["weight"] = Outer(a, b) if constants else Outer(b, a)
        if "bias" in names:
            found["bias"] = Formed(sum_positions(b))
        return found

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """The smaller of factors and formed gradients."""
        if name == "bias":
            return super().kept_as(constants, name, parameter, inputs, dtype, n)
        (p, q), a = parameter.shape, inputs[0]
        dtypes = (a.dtype, dtype) if self.transposed else (dtype, a.dtype)
        return Outer.kept_as(n, positions(a, n), p, q, dtypes)

    def grams(self, name: str) -> bool:
        """The weight's gradients are outer products."""
        return name == "weight"

    def rows_are_classes(self, name: str, parameter: Tensor) -> bool:
        """A weight with more than four outputs per input is taken for an output vocabulary."""
        return name == "weight" and not self.transposed and parameter.shape[0] > 4 * parameter.shape[1]

    def owns(self, module: nn.Module, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """In full precision, where the cost model prefers it."""
        a, weight = inputs[0], module.weight
        assert isinstance(weight, Tensor)
        if not weight.requires_grad or a.dtype != weight.dtype or a.dtype not in (torch.float32, torch.float64):
            return False
        return forced or shared_is_cheaper(positions(a, n), a.dtype, a.device)


class Conv1DRule(LinearRule):
    """The ``Conv1D`` of transformers: a linear layer with ``weight`` of shape ``[i, o]``."""

    label = "linear (Conv1D)"
    transposed = True


_conv1d = Conv1DRule()


@register_finder
def find_conv1d(module: nn.Module) -> LayerRule | None:
    """Recognise transformers' Conv1D by where it is defined, without importing transformers."""
    cls = type(module)
    defined = any(
        b.__name__ == "Conv1D" and b.__module__ == "transformers.pytorch_utils" and getattr(b, "forward", None) is cls.forward
        for b in cls.__mro__
    )
    return _conv1d if defined else None

"""Bilinear layers: y_o = xᵀ W_o z + bias_o.

The gradient of sample n is Σ_t b_nto x_nti z_ntj at the weight and Σ_t b_nt at the bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inrun.old.layers.layout import by_sample, sum_positions
from inrun.old.layers.registry import LayerRule, register
from inrun.old.layers.shapes import Formed, GradientShape


@register(nn.Bilinear)
class BilinearRule(LayerRule):
    """``torch.nn.Bilinear``."""

    label = "bilinear"
    names = ("weight", "bias")

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Both inputs."""
        return tuple({"input1": None, "input2": None, **dict(zip(("input1", "input2"), args, strict=False)), **kwargs}.values())

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Form both: the weight's in one batched product."""
        dtype = torch.promote_types(b.dtype, torch.float32)
        b, (x, z) = by_sample(b.to(dtype), n, 1), (by_sample(part.to(dtype), n, 1) for part in inputs)
        found: dict[str, GradientShape] = {}
        if "weight" in names:
            pairs = (x.unsqueeze(-1) * z.unsqueeze(-2)).flatten(2)
            formed = torch.bmm(b.transpose(1, 2), pairs)
            found["weight"] = Formed(formed.view(n, b.shape[2], x.shape[2], z.shape[2]))
        if "bias" in names:
            found["bias"] = Formed(sum_positions(b))
        return found

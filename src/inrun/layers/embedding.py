"""Embedding tables. The gradient of sample n at row w is Σ_t [token_nt = w] b_nt; row ``padding_idx`` has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inrun.layers.layout import by_sample
from inrun.layers.registry import LayerRule, register
from inrun.layers.shapes import GradientShape, LookUp, Parts
from inrun.layers.sketch import SketchPlan


@register(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table look-up. The layer's own backward stays the framework's; the contraction is n·t·d and needs no GEMM."""

    label = "embedding"
    names = ("weight",)
    sparse = True

    def refusal(self, module: nn.Module) -> str | None:
        """Refuse options under which the table's gradient is not the sum over its uses."""
        options = ("scale_grad_by_freq", "sparse", "max_norm")
        used = [option for option in options if getattr(module, option)]
        return f"nn.Embedding with {', '.join(used)} has another gradient than the sum over tokens" if used else None

    def constants(self, module: Any) -> tuple[int, int | None]:
        """Return the number of rows and the row of the padding."""
        return (module.weight.shape[0], module.padding_idx)

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """One look-up."""
        return {"weight": LookUp(inputs[0].reshape(n, -1), by_sample(b, n, 1), *constants)}

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """Output gradients and tokens."""
        t = inputs[0].numel() // max(n, 1)
        return LookUp, (((n, t, parameter.shape[1]), dtype), ((n, t), torch.float64))

    def sketched_as(self, plan: SketchPlan, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int) -> Parts:
        """Touched rows and tokens."""
        return LookUp.sketch_parts(plan, n, inputs, dtype)

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Put rows and padding back."""
        return LookUp.of(parts, *constants)

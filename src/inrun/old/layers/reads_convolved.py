"""Convolutions with a weight that was read (Mamba's): as ``reads.py``, with the gradients of ``convolution.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from inrun.old.layers.convolution import ConvolutionRule, Geometry
from inrun.old.layers.read_gradients import Through
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.shapes import GradientShape

_convolution = ConvolutionRule()


def geometry_of(weight: Tensor, options: dict[str, Any]) -> Geometry | None:
    """Return how ``torch.nn.functional.conv*d`` slides with these options; None for padding that is not in numbers."""
    kernel = tuple(weight.shape[2:])

    def each(name: str, usual: int) -> tuple[int, ...]:
        value = options.get(name, usual)
        sizes = (value,) if isinstance(value, int) else tuple(value)
        return sizes * len(kernel) if len(sizes) == 1 else sizes

    if isinstance(options.get("padding"), str):
        return None
    padding = tuple((size, size) for size in each("padding", 0))
    return Geometry(kernel, each("stride", 1), each("dilation", 1), options.get("groups", 1), padding)


class ConvolutionReadRule(LayerRule):
    """A convolution with a weight that was read; ``constants`` are (geometry, the ways of weight and bias)."""

    label = "read"

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Those of a convolution, brought from the weight to the parameter it was made of."""
        geometry, ways = constants
        found: dict[str, GradientShape] = {}
        for name in names:
            kind, way = ways[name]
            inner = _convolution.gradients(geometry, inputs, b, n, (kind,))[kind]
            found[name] = inner if way.function is None else Through(inner, way)
        return found

"""Convolutions: the gradient of sample n is Σ_t b_nt p_ntᵀ, p the patch of the input that output position t sees.

A transposed convolution exchanges input and output: its patches are those of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inrun.layers.gradients import CHUNK, CHUNK_ELSEWHERE, Formed, PerSample, work_dtype
from inrun.layers.tap import Tap
from inrun.layers.tape import Tape, rule_for

#: Multiplications of one sample from which a CPU is faster without patches, one sample at a time.
LARGE = 1 << 20

_ARGUMENTS = ("stride", "padding", "dilation", "groups")
_TRANSPOSED = ("stride", "padding", "output_padding", "groups", "dilation")


class Geometry:
    """Strides, paddings ``[(before, after)]``, dilations and groups of a convolution with weight ``[o, i / groups, *kernel]``."""

    def __init__(self, weight: Tensor, transposed: bool, given: dict[str, Any]) -> None:
        dims = weight.dim() - 2
        self.kernel, self.transposed = weight.shape[2:], transposed
        self.stride, self.dilation = (_per_dimension(given.get(name, 1), dims) for name in ("stride", "dilation"))
        self.groups: int = given.get("groups", 1)
        padding = given.get("padding", 0)
        if padding == "same":
            spans = [d * (k - 1) for d, k in zip(self.dilation, self.kernel, strict=True)]
            self.padding = [(span // 2, span - span // 2) for span in spans]
        else:
            self.padding = [(p, p) for p in _per_dimension(0 if padding == "valid" else padding, dims)]

    def padded(self, x: Tensor) -> Tensor:
        """Return a padded input."""
        pads = [side for pair in reversed(self.padding) for side in pair]
        return F.pad(x, pads) if any(pads) else x

    def patches(self, x: Tensor, space: torch.Size) -> Tensor:
        """Return what each of the output's positions sees of ``x`` ``[m, i, *in]``, ``[m, i, *kernel, *out]``."""
        x = self.padded(x)
        strides = x.stride()[2:]
        along_kernel = [s * d for s, d in zip(strides, self.dilation, strict=True)]
        along_output = [s * step for s, step in zip(strides, self.stride, strict=True)]
        return x.as_strided((*x.shape[:2], *self.kernel, *space), (*x.stride()[:2], *along_kernel, *along_output))

    def of_one(self, b: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the weight gradient that the framework's own kernel forms, ``[o, i / groups, *kernel]``."""
        padding = [before for before, _ in self.padding]
        if any(before != after for before, after in self.padding):
            x, padding = self.padded(x), [0] * len(padding)
        none = [0] * len(padding)
        return torch.ops.aten.convolution_backward(
            b, x, weight, None, self.stride, padding, self.dilation, False, none, self.groups, [False, True, False]
        )[1]


def _per_dimension(value: Any, dims: int) -> list[int]:
    found = [value] if isinstance(value, int) else list(value)
    return found * dims if len(found) == 1 else found


class Convolved(PerSample):
    """Weight gradients of a convolution with r images per sample.

    Args:
        b: Gradients at the output, ``[n, r, o, *out]``.
        x: Inputs, ``[n, r, i, *in]``.
        weight: The weight, of which only shape and device count.
        geometry: Strides, paddings, dilations, groups.
    """

    def __init__(self, b: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
        self.dtype = work_dtype(torch.promote_types(b.dtype, x.dtype))
        self.n, self.shape, self.device = len(b), weight.shape, b.device
        self.geometry, self.weight = geometry, weight
        # A transposed convolution is the other one with input and output exchanged.
        self.b, self.x = (x, b) if geometry.transposed else (b, x)

    def chunks(self, budget: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield samples one by one where they are large; else so many that gradients and patches fit the budget."""
        budget = budget or CHUNK.get(self.device.type, CHUNK_ELSEWHERE)
        positions = self.b.shape[1] * self.b.shape[3:].numel()
        patches = self.x.shape[2] * self.geometry.kernel.numel() * positions
        size = max(1, budget // (max(1, self.shape.numel(), patches) * self.dtype.itemsize))
        if self.device.type == "cpu" and self.shape.numel() * positions >= LARGE:
            size = 1
        for low in range(0, self.n, size):
            high = min(low + size, self.n)
            yield low, high, self.chunk(low, high)

    def chunk(self, low: int, high: int) -> Tensor:
        """Form some gradients: one by the framework's own kernel, several by one batched product with patches."""
        b, x, at = self.b[low:high].to(self.dtype), self.x[low:high].to(self.dtype), self.geometry
        m, r, g = high - low, b.shape[1], at.groups
        if m == 1:
            return at.of_one(b[0], x[0], self.weight.to(self.dtype)).unsqueeze(0)
        patches = at.patches(x.flatten(0, 1), b.shape[3:]).reshape(m, r, g, x.shape[2] // g * at.kernel.numel(), -1)
        rows = b.reshape(m, r, g, b.shape[2] // g, -1)
        if r > 1:
            found = torch.einsum("mrgot,mrgit->mgoi", rows, patches)
        else:
            found = torch.matmul(rows[:, 0], patches[:, 0].transpose(2, 3))
        return found.reshape(m, *self.shape)


def rule_of_convolution(tap: Tap, b: Tensor, saved: tuple[Tensor, ...]) -> list[PerSample]:
    """Return the gradients of weight and bias; ``constants`` are the geometry and which of the two are wanted."""
    geometry, (has_weight, has_bias) = tap.constants
    x, weight = saved[0].to(b.dtype), saved[1]  # as autocast rounded it
    layout = tap.layout
    assert layout is not None, tap.name
    if layout.kind in ("first", "all", "inside") or (layout.kind == "index" and layout.lead == 1):
        rows, images = tap.split(b, b.dim() - 1), tap.split(x, x.dim() - 1)
    else:  # samples lie along channels or positions: a masked copy of all for each
        samples = torch.arange(layout.n, device=b.device).view(-1, *[1] * b.dim())
        rows = b * (layout.owners(b.shape).to(b.device) == samples)
        images = x.expand(layout.n, *x.shape)
    found: list[PerSample] = []
    if has_weight:
        found.append(Convolved(rows, images, weight, geometry))
    if has_bias:
        summed = rows.flatten(3)
        found.append(Formed(summed.sum((1, 3), dtype=work_dtype(b.dtype)), lambda: summed.movedim(2, 3).flatten(1, 2)))
    return found


def _tap(tape: Tape, func: Any, transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None, given: dict[str, Any]) -> Any:
    of_weight, of_bias = tape.tensors.source(weight), tape.tensors.source(bias)
    if tape.tensors.source(x) or not isinstance(x, Tensor) or not tape.tensors.is_data(x) or x.dim() != weight.dim():
        return NotImplemented
    wanted = (of_weight is not None and of_weight.scored, of_bias is not None and of_bias.scored)
    targets = [s for s, w in ((of_weight, wanted[0]), (of_bias, wanted[1])) if s is not None and w]
    constants = (Geometry(weight, transposed, given), wanted)
    if not wanted[0] or not tape.owns(weight):
        out, owned = func(x, weight, bias, **given), list[Tensor]()
    else:
        own_bias = bias if wanted[1] else None
        owned = [weight] if own_bias is None else [weight, own_bias]
        out = func(x, weight.detach(), bias if own_bias is None else own_bias.detach(), **given)
    return tape.observe(func, out, rule_of_convolution, targets, (x, weight), (x, weight.detach()), constants, tuple(owned))


@rule_for(F.conv1d, F.conv2d, F.conv3d)
def tap_convolution(
    tape: Tape, met: bool, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Tap a convolution of data."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    return _tap(tape, func, False, input, weight, bias, given) if met else NotImplemented


@rule_for(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def tap_transposed(
    tape: Tape, met: bool, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Tap a transposed convolution of data."""
    given = dict(zip(_TRANSPOSED, args, strict=False)) | kwargs
    return _tap(tape, func, True, input, weight, bias, given) if met else NotImplemented

"""Convolutions of one, two and three dimensions, plain and transposed.

x: images ``[m, c, *space]``, b: gradients at the output ``[m, o, *places]``, v: directions ``[k, o, c/groups, *kernel]``. With
conv(x; w) the layer without its bias, linear in w, the gradient of sample n has ⟨g_n, v⟩ = ⟨b_n, conv(x_n; v)⟩: one convolution
of the whole batch for each direction. With the patches of x unfolded, p_nt, it is g_n = Σ_t b_nt p_ntᵀ as in a linear layer.
A transposed convolution is the adjoint: the same with inputs and output gradients exchanged.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.old.layers.layout import SCRATCH_BYTES, row_dots, scratch_like
from inrun.old.layers.registry import LayerRule, Owner, nbytes_of, register
from inrun.old.layers.running import shared_outer
from inrun.old.layers.shapes import Formed, GradientShape, Parts
from inrun.old.layers.sketch import SketchPlan

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
#: Positions from which unfolding for the weight gradient costs less than a convolution with the direction.
SHARED_POSITIONS = 48


@dataclass(frozen=True)
class Geometry:
    """How a convolution slides: all but the weight."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    #: Before and after each dimension, first dimension first.
    padding: tuple[tuple[int, int], ...]
    mode: str = "zeros"

    @property
    def dims(self) -> int:
        """Return how many dimensions it slides over."""
        return len(self.kernel)

    @property
    def symmetric(self) -> bool:
        """Whether the framework's own padding does: zeros, as many on both sides."""
        return self.mode == "zeros" and all(before == after for before, after in self.padding)

    def places(self, space: tuple[int, ...]) -> tuple[int, ...]:
        """Return the size of the output."""
        every = zip(space, self.padding, self.kernel, self.dilation, self.stride, strict=True)
        return tuple((size + sum(pads) - d * (k - 1) - 1) // step + 1 for size, pads, k, d, step in every)

    def padded(self, x: Tensor) -> Tensor:
        """Return ``x`` with its padding."""
        if not any(itertools.chain(*self.padding)):
            return x
        mode = "constant" if self.mode == "zeros" else self.mode
        return F.pad(x, [size for pair in reversed(self.padding) for size in pair], mode=mode)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return conv(x; weight) + bias."""
        padding = tuple(before for before, _ in self.padding) if self.symmetric else (0,) * self.dims
        x = x if self.symmetric else self.padded(x)
        out: Tensor = _CONVOLVE[self.dims](x, weight, bias, self.stride, padding, self.dilation, self.groups)
        return out

    def patches(self, x: Tensor, places: tuple[int, ...]) -> Tensor:
        """Unfold ``x`` ``[m, c, *space]`` into ``[m, c · kernel, places]``, in memory that is reused."""
        x = self.padded(x)
        kernel = [stride * dilation for stride, dilation in zip(x.stride()[2:], self.dilation, strict=True)]
        slide = [stride * step for stride, step in zip(x.stride()[2:], self.stride, strict=True)]
        window = x.as_strided((*x.shape[:2], *self.kernel, *places), (*x.stride()[:2], *kernel, *slide))
        if all(size == 1 for size in self.kernel) and window.is_contiguous():
            return window.reshape(len(x), x.shape[1], -1)
        columns = scratch_like(x, tuple(window.shape), "columns")
        return columns.copy_(window).view(len(x), x.shape[1] * math.prod(self.kernel), math.prod(places))


class Patches:
    """The unfolded images as ``[m, places, c · kernel]``, made some at a time: together they may not fit the memory."""

    def __init__(self, x: Tensor, geometry: Geometry, places: tuple[int, ...]) -> None:
        """Hold the images."""
        self.x, self.geometry, self.places = x, geometry, places
        self.shape = (len(x), math.prod(places), x.shape[1] * math.prod(geometry.kernel))

    @property
    def most(self) -> int:
        """Return how many images fit the cache unfolded."""
        return max(1, SCRATCH_BYTES // max(math.prod(self.shape[1:]) * self.x.element_size(), 1))

    def __getitem__(self, some: slice) -> Tensor:
        """Unfold some; what was unfolded before is overwritten."""
        return self.geometry.patches(self.x[some], self.places).transpose(1, 2)


class Convolved(GradientShape):
    """The gradients of a convolution's weight; each sample has the same number of images."""

    def __init__(self, x: Tensor, b: Tensor, n: int, geometry: Geometry) -> None:
        """Hold images ``[m, c, *space]`` and output gradients ``[m, o, *places]``; m is a multiple of ``n``."""
        self.x, self.b, self.n, self.geometry = x, b, n, geometry

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the weight."""
        return (self.b.shape[1], self.x.shape[1] // self.geometry.groups, *self.geometry.kernel)

    def _by_sample(self, z: Tensor) -> Tensor:
        """Add up over the images of each sample."""
        return z if len(z) == self.n else z.reshape(self.n, -1, *z.shape[1:]).sum(1)

    def samples(self, first: int, end: int) -> GradientShape:
        """The images of some samples."""
        each = len(self.x) // max(self.n, 1)
        some = slice(first * each, end * each)
        return Convolved(self.x[some], self.b[some], end - first, self.geometry)

    def contract(self, v: Tensor) -> Tensor:
        """*Project*: ⟨b_n, conv(x_n; v)⟩."""
        x, b = self.x.to(v.dtype), self.b.to(v.dtype).reshape(self.n, -1)
        places = self.b.shape[2:]
        found = []
        for direction in v:
            out = self.geometry.convolve(x, direction)
            for dim, size in enumerate(places, 2):
                out = out.narrow(dim, 0, size)
            found.append(row_dots(b, out.reshape(self.n, -1)))
        return torch.stack(found, dim=1)

    def _wide(self) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(torch.promote_types(self.x.dtype, self.b.dtype), torch.float32)
        return self.x.to(dtype), self.b.to(dtype)

    def form(self) -> Tensor:
        """Unfold and multiply, group by group."""
        x, b = self._wide()
        m, groups, places = len(x), self.geometry.groups, math.prod(b.shape[2:])
        g = x.new_empty(m * groups, b.shape[1] // groups, x.shape[1] // groups * math.prod(self.geometry.kernel))
        patches = Patches(x, self.geometry, tuple(b.shape[2:]))
        for first in range(0, m, patches.most):
            last = min(first + patches.most, m)
            right = patches[first:last].transpose(1, 2).reshape((last - first) * groups, -1, places)
            left = b[first:last].reshape((last - first) * groups, -1, places)
            torch.bmm(left, right.transpose(1, 2), out=g[first * groups : last * groups])
        return self._by_sample(g.view(m, *self.shape))

    def total(self) -> Tensor:
        """Let the framework make the weight gradient, where it can."""
        x, b = self._wide()
        geometry = self.geometry
        if not geometry.symmetric:
            x = geometry.padded(x)
        padding = [before for before, _ in geometry.padding] if geometry.symmetric else [0] * geometry.dims
        like = x.new_empty(()).expand(self.shape)
        return _backward(b, x, like, geometry, padding, [False, True, False])[1]

    def _shared(self, v: Tensor | None, signs: Tensor | None, segment: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return weight gradient, contractions and segment sums from the same products; one group, one image per product."""
        x, b = self._wide()
        patches = Patches(x, self.geometry, tuple(b.shape[2:]))
        none = x.new_empty(0, *self.shape) if v is None else v
        left = b.flatten(2).transpose(1, 2)
        total, c, z = shared_outer(left, patches, none.reshape(len(none), len(b[0]), -1), False, signs, segment, patches.most)
        return total.view(self.shape), None if v is None else self._by_sample(c), None if z is None else self._by_sample(z)

    def total_and_contract(self, v: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
        """*Shared*, unless the channels are in groups, whose weights are small."""
        if self.geometry.groups > 1:
            g = Formed(self.form())
            return g.total(), g.contract(v)
        total, c, _ = self._shared(v, None, 1)
        assert c is not None
        return total, c

    def segment_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Form some gradients at a time."""
        each = len(self.x) // max(self.n, 1)
        piece = max(1, SCRATCH_BYTES // max(signs.nbytes, 1))
        some = [(slice(i * each, (i + piece) * each), min(piece, self.n - i)) for i in range(0, self.n, piece)]
        parts = [Formed(Convolved(self.x[s], self.b[s], n, self.geometry).form()).segment_sums(signs, plan) for s, n in some]
        return torch.cat(parts) if parts else signs.new_zeros(0, plan.segments)

    def total_and_sketch(
        self, v: Tensor | None, signs: Tensor, weights: Tensor, plan: SketchPlan
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """*Shared*: weight gradient, contractions and sketch come out of the same products."""
        if self.geometry.groups > 1 or v is None:
            g = Formed(self.form())
            return g.total(), None if v is None else g.contract(v), g.sketch(signs, weights, plan)
        total, c, z = self._shared(v, signs, plan.segment)
        assert z is not None
        return total, c, self.bucketed(z, signs, weights, plan)

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Form the gradients where they are to be kept formed."""
        return Formed(self.form()) if kind is Formed else super().keep(kind)

    def parts(self) -> tuple[Tensor, ...]:
        """Images and output gradients, sample by sample."""
        return tuple(z.reshape(self.n, -1, *z.shape[1:]) for z in (self.x, self.b))

    @staticmethod
    def of(parts: tuple[Tensor, ...], geometry: Geometry) -> Convolved:
        """Undo ``parts``."""
        x, b = parts
        return Convolved(x.flatten(0, 1), b.flatten(0, 1), len(x), geometry)


def _backward(b: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, padding: list[int], mask: list[bool]) -> Any:
    dims = geometry.dims
    return torch.ops.aten.convolution_backward(
        b, x, weight, None, geometry.stride, padding, geometry.dilation, False, [0] * dims, geometry.groups, mask
    )


class ConvolutionOwner(Owner):
    """The layer as the framework computes it, without its weight gradient."""

    def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Convolve."""
        return constants.convolve(x, weight, bias), (x,)

    def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
        """Convolve back."""
        padding = [before for before, _ in constants.padding]
        return _backward(b, saved[0], weight, constants, padding, [True, False, False])[0]


def images(x: Tensor, dims: int) -> Tensor:
    """Return ``x`` with a dimension for the images, which a single image may lack."""
    return x if x.dim() == dims + 2 else x.unsqueeze(0)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvolutionRule(LayerRule):
    """``torch.nn.Conv1d``, ``Conv2d`` and ``Conv3d``."""

    label = "convolution"
    names = ("weight", "bias")
    owner = ConvolutionOwner()

    def constants(self, module: Any) -> Geometry:
        """Return how it slides."""
        kernel, dilation = tuple(module.kernel_size), tuple(module.dilation)
        if module.padding == "same":
            whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
            padding = tuple((size // 2, size - size // 2) for size in whole)
        else:
            padding = tuple((size, size) for size in ((0,) * len(kernel) if module.padding == "valid" else module.padding))
        return Geometry(kernel, tuple(module.stride), dilation, module.groups, padding, module.padding_mode)

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """⟨b_n, conv(x_n; ·)⟩ for the weight, Σ_t b_nt for the bias."""
        x, b = images(inputs[0], constants.dims), images(b, constants.dims)
        found: dict[str, GradientShape] = {}
        if "weight" in names:
            found["weight"] = self._weight(x, b, n, constants)
        if "bias" in names:
            wide = torch.promote_types(b.dtype, torch.float32)
            found["bias"] = Formed(b.reshape(n, -1, b.shape[1], math.prod(b.shape[2:])).sum((1, 3), dtype=wide))
        return found

    def _weight(self, x: Tensor, b: Tensor, n: int, geometry: Geometry) -> GradientShape:
        return Convolved(x, b, n, geometry)

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """The smaller of images and formed gradients."""
        formed = super().kept_as(constants, name, parameter, inputs, dtype, n)
        x = images(inputs[0], constants.dims)
        if name == "bias" or n == 0:
            return formed
        parts = self._parts(constants, parameter, x, dtype, n)
        return (Convolved, parts) if nbytes_of(parts) < nbytes_of(formed[1]) else formed

    def _parts(self, geometry: Geometry, parameter: Tensor, x: Tensor, dtype: torch.dtype, n: int) -> Parts:
        """Return what images and output gradients are kept as."""
        places = geometry.places(tuple(x.shape[2:]))
        return ((n, len(x) // n, *x.shape[1:]), x.dtype), ((n, len(x) // n, parameter.shape[0], *places), dtype)

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Put the geometry back."""
        return Formed(*parts) if kind is Formed else Convolved.of(parts, constants)

    def owns(self, module: Any, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """In full precision, with padding of the framework's own kind, where there are many positions."""
        x, weight, geometry = inputs[0], module.weight, self.constants(module)
        if not (weight.requires_grad and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)):
            return False
        if not geometry.symmetric or x.dim() != geometry.dims + 2:
            return False
        return forced or math.prod(x.shape[2:]) // math.prod(geometry.stride) > SHARED_POSITIONS


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class TransposedConvolutionRule(ConvolutionRule):
    """The adjoint: ⟨b_n, convᵀ(x_n; v)⟩ = ⟨conv(b_n; v), x_n⟩."""

    label = "transposed convolution"

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The image; the size that the output should have shows in the output."""
        named = {"input": args[0]} if args else kwargs
        return super().inputs(module, (named["input"],), {})

    def _weight(self, x: Tensor, b: Tensor, n: int, geometry: Geometry) -> GradientShape:
        return Convolved(b, x, n, geometry)

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """Formed: the size of the output is not known before there is one."""
        return LayerRule.kept_as(self, constants, name, parameter, inputs, dtype, n)

    def owns(self, module: Any, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """The framework's backward serves."""
        return False

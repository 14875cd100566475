"""Layers with one number per channel: GroupNorm, InstanceNorm, BatchNorm and PReLU.

x: ``[m, c, *space]``. With x̂ the normalised input, the gradient of sample n is Σ_t b_nct x̂_nct at the weight and Σ_t b_nct at
the bias, over the sample's images and places t. PReLU's is Σ_t b_nct min(x_nct, 0).

Batch norm in training mode takes its statistics from the whole batch. What a sample's own rows contribute to the gradient of
weight and bias is well-defined all the same: its *share*; the shares sum to the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.old.layers.layout import SCRATCH_BYTES, scratch_like
from inrun.old.layers.registry import LayerRule, Owner, register
from inrun.old.layers.shapes import Formed, GradientShape


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _spread(x: Tensor) -> Tensor:
    """View ``[m, c, *space]`` as ``[m, c, places]``."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:]))


def sum_products(x: Tensor, mean: Tensor, rstd: Tensor, b: Tensor) -> Tensor:
    """Return r_mc Σ_t b_mct (x_mct − μ_mc), ``[m, c]``, for ``x`` and ``b`` ``[m, c, t]``; one reused temporary.

    Centring comes first, since b · x and μ b · 1 nearly cancel where the mean is large.
    """
    piece = max(1, SCRATCH_BYTES * len(x) // max(x.nbytes, 1))
    parts = []
    for first in range(0, len(x), piece):
        some = slice(first, first + piece)
        centred = torch.sub(x[some], mean[some].unsqueeze(-1), out=scratch_like(x[some]))
        parts.append(torch.linalg.vecdot(centred, b[some]))
    return torch.cat(parts) * rstd if parts else rstd


def by_samples(z: Tensor, n: int) -> Tensor:
    """Add up ``[m, c]`` over the images of each sample."""
    return z if len(z) == n else z.reshape(n, -1, *z.shape[1:]).sum(1)


@dataclass(frozen=True)
class ChannelNorm:
    """What is normalised together: ``groups`` of channels of one image, a channel of the whole batch, or nothing."""

    eps: float
    #: 0 for one statistic per channel of the whole batch.
    groups: int
    #: Mean and variance are given.
    known: bool = False

    def statistics(self, x: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return μ and 1/deviation, ``[m, c]``, for ``x`` ``[m, c, t]``."""
        m, c = x.shape[:2]
        if self.known:
            mean, variance = (z.to(x.dtype) for z in given)
        elif x.numel() == 0:
            return x.new_zeros(m, c), x.new_zeros(m, c)
        elif self.groups in (0, c):
            mean, rstd = self._of_the_kernel(x if self.groups == 0 else x.reshape(1, m * c, -1))
            return mean.view(-1, c).expand(m, c), rstd.view(-1, c).expand(m, c)
        else:
            variance, mean = torch.var_mean(x.reshape(m, self.groups, -1), 2, correction=0)
            each = c // self.groups
            variance, mean = variance.repeat_interleave(each, 1), mean.repeat_interleave(each, 1)
        return mean.expand(m, c), torch.rsqrt(variance + self.eps).expand(m, c)

    def _of_the_kernel(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return μ and 1/deviation of every channel of ``x`` ``[m, c, t]``, to the last bit as torch's own norms have them.

        Of few places that are nearly equal, x − μ is all rounding of μ: another sum than theirs would not add up to their gradient.
        """
        _, mean, rstd = torch.native_batch_norm(x, None, None, None, None, True, 0.0, self.eps)
        return mean, rstd


class GroupNormOwner(Owner):
    """The framework's kernels, whose statistics the mapping uses again."""

    def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise and scale; keep the statistics ``[m, groups]``."""
        size = (len(x), x.shape[1], math.prod(x.shape[2:]), constants.groups, constants.eps)
        out, mean, rstd = torch.native_group_norm(x, weight, bias, *size)
        return out, (x, mean, rstd)

    def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
        """Let the framework's kernel do it."""
        x, mean, rstd = saved
        size = (len(x), x.shape[1], math.prod(x.shape[2:]), constants.groups)
        return torch.ops.aten.native_group_norm_backward(b, x, mean, rstd, weight, *size, [True, False, False])[0]


class ChannelNormRule(LayerRule):
    """A normalisation with one weight and bias per channel."""

    names = ("weight", "bias")

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nct x̂_nct for the weight, Σ_t b_nct for the bias."""
        dtype = _wide(b.dtype)
        b = _spread(b).to(dtype)
        found: dict[str, GradientShape] = {}
        if "weight" in names:
            x = _spread(inputs[0]).to(dtype)
            mean, rstd = self.statistics(constants, x, inputs[1:])
            found["weight"] = Formed(by_samples(sum_products(x, mean, rstd, b), n))
        if "bias" in names:
            found["bias"] = Formed(by_samples(b.sum(2), n))
        return found

    def statistics(self, constants: Any, x: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return μ and 1/deviation, ``[m, c]``."""
        found: tuple[Tensor, Tensor] = constants.statistics(x, given)
        return found


@register(nn.GroupNorm)
class GroupNormRule(ChannelNormRule):
    """``torch.nn.GroupNorm``."""

    label = "group norm"
    owner = GroupNormOwner()

    def constants(self, module: Any) -> ChannelNorm:
        """Over groups of channels."""
        return ChannelNorm(module.eps, module.num_groups)

    def statistics(self, constants: Any, x: Tensor, given: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Take what the forward kept, where it was ours."""
        if not given:
            return super().statistics(constants, x, given)
        each = x.shape[1] // constants.groups
        return given[0].repeat_interleave(each, 1), given[1].repeat_interleave(each, 1)

    def owns(self, module: Any, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """In full precision; channels that come last are left to the framework, as is the output's format."""
        x, weight = inputs[0], module.weight
        return x.is_contiguous() and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)


def _batched(module: Any, x: Tensor, dims: int) -> Tensor:
    return x if x.dim() == dims else x.unsqueeze(0)


class RunningNormRule(ChannelNormRule):
    """A norm that may have running statistics, and uses them in eval mode."""

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """The images and, where they are used, the running statistics."""
        found = super().inputs(module, args, kwargs)
        constants: Any = self.constants(module)
        return (*found, module.running_mean, module.running_var) if constants.known else found


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNormRule(RunningNormRule):
    """``torch.nn.InstanceNorm``: every channel of every image."""

    label = "instance norm"

    def constants(self, module: Any) -> ChannelNorm:
        """Its own statistics, or running ones."""
        return ChannelNorm(module.eps, module.num_features, known=not module.training and module.track_running_stats)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(RunningNormRule):
    """``torch.nn.BatchNorm``: shares of rows in training mode, gradients of samples in eval mode."""

    label = "batch norm"

    def constants(self, module: Any) -> ChannelNorm:
        """The batch's statistics, or running ones."""
        return ChannelNorm(module.eps, 0, known=not module.training and module.running_mean is not None)


@register(nn.PReLU)
class PReLURule(LayerRule):
    """``torch.nn.PReLU``: max(x, 0) + weight ∘ min(x, 0), one weight for all or one per channel."""

    label = "PReLU"
    names = ("weight",)

    def constants(self, module: Any) -> int:
        """Return the number of weights."""
        count: int = module.num_parameters
        return count

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nct min(x_nct, 0)."""
        dtype = _wide(b.dtype)
        inner = F.relu(-inputs[0]).to(dtype).mul_(b).neg_()
        each = inner.reshape(n, 1, -1) if constants == 1 else _spread(inner)
        return {"weight": Formed(by_samples(each.sum(2), n))}

"""Which rows of a tensor belong to which sample, and sums over them that stay in the cache.

Rules see every tensor in one normal form, ``[n, t, features]``: n samples, t positions. How the leading
dimensions of a module's tensors map to samples is its *layout*:

``rows``  the leading dimension is the sample, ``[n, ...]``
``flat``  samples are laid end to end in the leading dimension, ``[n·t, ...]``
``free``  the tensor has no sample dimension (position embeddings), or stands for a batch of one: every sample shares it
``bare``  the same, where a leading dimension of 1 is not a batch of one (position embeddings of a single position)
``apart`` the same, where the output is worked on before it meets the samples (T5's table of relative positions)

Two more are *turned* into the normal form, by layers that treat all positions alike:

``second``  the sample is the second dimension, ``[t, n, ...]`` (sequence-first)
``cycled``  such a tensor with both laid end to end, ``[t·n, ...]``: the rows of a sample are n apart
"""

from __future__ import annotations

import math
import threading
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Layout = Literal["rows", "flat", "free", "bare", "apart", "second", "cycled"]
Pattern = tuple[Any, ...]
#: Every sample shares the tensor.
SHARED: tuple[Layout, ...] = ("free", "bare", "apart")
TURNED = ("second", "cycled")


def pattern_of(shape: torch.Size, n: int) -> Pattern:
    """Reduce a shape to what matters for ownership: which dimensions equal n or 1, and whether n divides the first."""
    kinds = tuple("n" if size == n else "1" if size == 1 else "*" for size in shape)
    return (kinds, len(shape) > 0 and shape[0] % n == 0)


def turned(x: Tensor, n: int, layout: str) -> Tensor:
    """Return ``x`` with the sample first."""
    return (x if layout == "second" else x.unflatten(0, (-1, n))).transpose(0, 1)


def by_sample(x: Tensor, n: int, feature_dims: int) -> Tensor:
    """View ``x`` as ``[n, t, *features]``; the last ``feature_dims`` dimensions are features.

    Works for the layouts ``rows`` and ``flat`` alike, since both keep a sample's entries together.
    """
    features = x.shape[x.dim() - feature_dims :]
    return x.reshape(n, -1, *features)


def sum_positions(b: Tensor) -> Tensor:
    """Sum ``[n, t, o]`` over t; where rows are wide or apart, as a product with ones, which is faster than the reduction.

    The ones are real ones: with copies of one number the batched product takes a path that is ten times as slow.
    """
    if b.shape[2] <= 256 and b.is_contiguous():
        return b.sum(1)
    return torch.bmm(b.new_ones(b.shape[0], 1, b.shape[1]), b)[:, 0]


def row_dots(x: Tensor, y: Tensor) -> Tensor:
    """Return one inner product per row of two ``[n, m]`` tensors, without a temporary where the device allows.

    Of few numbers with one: calls would take longer than the products do.
    """
    if x.device.type == "cpu" and x.shape[0] <= 256 and x.nbytes > FEW_BYTES:
        return torch.stack([torch.dot(p, q) for p, q in zip(x.unbind(0), y.unbind(0), strict=True)])
    return (x * y).sum(1)


_scratch = threading.local()

#: Bytes that a temporary may take; what needs more is done in pieces.
SCRATCH_BYTES = 4 << 20
#: Bytes of which one pass takes less time than a few calls.
FEW_BYTES = 512 << 10
#: Directions of which one matrix product takes less time than a product with each.
MANY = 8
#: Bytes that are read and written again and again at the speed of a core's own cache.
CACHE_BYTES = 1 << 20


def scratch_like(x: Tensor, shape: tuple[int, ...] | None = None, use: str = "") -> Tensor:
    """Return a reused buffer of the dtype and device of ``x``, of its shape or another.

    Fresh pages at every call would cost more than the sums do. The content holds until the next call for the same ``use``.
    """
    shape = tuple(x.shape) if shape is None else shape
    count = math.prod(shape)
    buffers: dict[Any, Tensor] = _scratch.__dict__.setdefault("buffers", {})
    key = (x.dtype, x.device, use)
    if key not in buffers or buffers[key].numel() < count:
        buffers[key] = torch.empty(count, dtype=x.dtype, device=x.device)
    return buffers[key][:count].view(shape)


def dot_each(g: Tensor, v: Tensor) -> Tensor:
    """Contract formed per-sample gradients ``g`` ``[n, *shape]`` with ``v`` ``[k, *shape]``, giving ``[n, k]``."""
    if g.dim() == 2 and g.dtype == v.dtype and g.nbytes <= FEW_BYTES:
        return F.linear(g, v)
    flat = g.reshape(g.shape[0], -1).to(v.dtype)
    if v.shape[0] == 1:
        return torch.mv(flat, v.reshape(-1)).unsqueeze(1)
    if v.shape[0] >= MANY:
        return flat @ v.reshape(v.shape[0], -1).t()
    # Matrix-vector products read g at the speed of memory; one product with the few columns of vᵀ does not.
    return torch.stack([torch.mv(flat, d) for d in v.reshape(v.shape[0], -1).unbind(0)], dim=1)


def scratch_bytes() -> int:
    """Return the memory held by the reused buffers of this thread."""
    return sum(b.nbytes for b in _scratch.__dict__.get("buffers", {}).values())

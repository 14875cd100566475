"""Per-sample gradients of one operation, formed a few samples at a time.

Letters: n samples, m samples of a chunk, t positions, i/o input and output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

#: Bytes of per-sample gradients that are formed at a time. On a CPU a chunk should stay in the caches.
CHUNK = {"cpu": 1 << 22}
CHUNK_ELSEWHERE = 1 << 28


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of a dtype are added up: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class PerSample:
    """The gradients of n samples for one tensor of ``shape``."""

    n: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def chunk(self, low: int, high: int) -> Tensor:
        """Return the gradients of some samples, ``[m, *shape]``. The caller may overwrite them."""
        raise NotImplementedError

    def chunks(self, budget: int | None = None) -> Iterator[tuple[int, int, Tensor]]:
        """Yield all samples in chunks of at most ``budget`` bytes, with their range."""
        budget = budget or CHUNK.get(self.device.type, CHUNK_ELSEWHERE)
        size = max(1, budget // max(1, self.shape.numel() * self.dtype.itemsize))
        for low in range(0, self.n, size):
            high = min(low + size, self.n)
            yield low, high, self.chunk(low, high)

    def sizes(self) -> Tensor | None:
        """Return Σ|terms| of every entry over all samples and positions, ``[*shape]``, where it is cheap; None elsewhere."""
        return None

    def total(self) -> Tensor:
        """Return the sum over samples, ``[*shape]``."""
        parts = [part.sum(0) for _, _, part in self.chunks()]
        if not parts:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


class Formed(PerSample):
    """Gradients at hand, ``[n, *shape]``."""

    def __init__(self, g: Tensor, terms: Callable[[], Tensor] | None = None) -> None:
        """``terms`` returns what was added up, ``[n, t, *shape]``."""
        self.g, self.n, self.shape, self.device, self._terms = g, len(g), g.shape[1:], g.device, terms
        self.dtype = work_dtype(g.dtype)

    def sizes(self) -> Tensor | None:
        """Return Σ|terms|."""
        return None if self._terms is None else self._terms().abs().sum((0, 1), dtype=self.dtype)

    def chunk(self, low: int, high: int) -> Tensor:
        """Return a copy only where the dtype changes: nobody else holds ``g``."""
        return self.g[low:high].to(self.dtype)


class Outer(PerSample):
    """Sums of outer products, g_n = Σ_t b_nt a_ntᵀ, viewed as ``shape``.

    Args:
        b: Gradients at the output, ``[n, t, o]``.
        a: Inputs, ``[n, t, i]``.
        shape: The shape of the tensor, with o·i entries; ``[o, i]`` if not given.
    """

    def __init__(self, b: Tensor, a: Tensor, shape: torch.Size | None = None) -> None:
        self.dtype = work_dtype(torch.promote_types(a.dtype, b.dtype))
        self.b, self.a, self.n, self.device = b.to(self.dtype), a.to(self.dtype), len(b), b.device
        self.shape = shape or torch.Size((b.shape[2], a.shape[2]))

    def chunk(self, low: int, high: int) -> Tensor:
        """Form some gradients by one batched product."""
        product = torch.bmm(self.b[low:high].transpose(1, 2), self.a[low:high])
        return product.view(high - low, *self.shape)


class Grouped(PerSample):
    """Outer products within groups: ``b`` ``[n, g, t, o]`` and ``a`` ``[n, g, t, i]`` make ``[n, g·o, i]``, seen as ``shape``."""

    def __init__(self, b: Tensor, a: Tensor, shape: torch.Size) -> None:
        self.dtype = work_dtype(torch.promote_types(a.dtype, b.dtype))
        self.b, self.a = b.to(self.dtype), a.to(self.dtype)
        self.n, self.shape, self.device = len(b), shape, b.device

    def chunk(self, low: int, high: int) -> Tensor:
        """Form some gradients by one batched product."""
        product = torch.matmul(self.b[low:high].transpose(2, 3), self.a[low:high])
        return product.reshape(high - low, *self.shape)


class LookUp(PerSample):
    """Rows of a table: g_n has Σ_t [token_nt = w] b_nt in row w.

    Args:
        tokens: Row numbers, ``[n, t]``.
        b: Gradients at the rows that were read, ``[n, t, d]``; 0 at padding.
        rows: The number of rows of the table.
    """

    def __init__(self, tokens: Tensor, b: Tensor, rows: int) -> None:
        self.dtype = work_dtype(b.dtype)
        self.tokens, self.b, self.n, self.device = tokens, b.to(self.dtype), len(b), b.device
        self.shape = torch.Size((rows, b.shape[2]))

    def chunk(self, low: int, high: int) -> Tensor:
        """Scatter the rows into one table per sample."""
        index = self.tokens[low:high].unsqueeze(-1).expand(-1, -1, self.shape[1])
        table = self.b.new_zeros(high - low, *self.shape)
        return table.scatter_add_(1, index, self.b[low:high])

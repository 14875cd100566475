"""A random projection of gradients to few numbers, seeded, that keeps inner products on average."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inrun.baselines.checks import at_least

if TYPE_CHECKING:
    from torch import Tensor


class Projection:
    """Project ``[m, P]`` to ``[m, dimension]``: every coordinate is added, with a random sign, to one random place.

    ⟨Sa, Sb⟩ has the mean ⟨a, b⟩ and the variance (|a|²|b|² + ⟨a, b⟩² − 2 Σᵢ aᵢ²bᵢ²) / dimension: the same as that of a dense
    matrix of random signs, which would cost 2 · dimension operations per number instead of one, and P · dimension numbers
    of memory. Where P is no more than the dimension, nothing is projected.
    """

    def __init__(self, size: int, dimension: int = 2048, seed: int = 0) -> None:
        """Draw places and signs, ``[P]`` each, for P = ``size``."""
        import torch

        at_least("projection", 1, dimension=dimension)
        generator = torch.Generator().manual_seed(seed)
        self.dimension = min(size, dimension)
        self._exact = size <= dimension
        self._places = torch.randint(0, self.dimension, (size,), generator=generator)
        self._signs = torch.randint(0, 2, (size,), generator=generator) * 2 - 1

    def __call__(self, vectors: Tensor) -> Tensor:
        """Project rows, ``[m, P]`` to ``[m, dimension]``."""
        if self._exact:
            return vectors
        out = vectors.new_zeros(len(vectors), self.dimension)
        return out.index_add_(1, self._places.to(vectors.device), vectors * self._signs.to(vectors))

"""The Fisher matrix of single-sample gradients, diagonal in an eigenbasis of Kronecker factors (after EK-FAC, George et al. 2018).

For a parameter of shape ``[o, i]`` (further dimensions join i; a vector is ``[1, i]``) and sample gradients G_n:

    L = Σ_n G_n G_nᵀ = U_L D U_Lᵀ,   R = Σ_n G_nᵀ G_n = U_R E U_Rᵀ,   Λ = (1/n) Σ_n (U_Lᵀ G_n U_R)²,

and (F + λ I)⁻¹ V = U_L ((U_Lᵀ V U_R) / (Λ + λ)) U_Rᵀ. Parameters are taken as independent
of each other. Exact within a parameter for vectors and for weights with one output. Only gradients are asked for, so every
layer is served alike: linear, convolution, embedding, norm; the factors of K-FAC itself need the inputs and outputs of
layers it knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from inrun.baselines.gradients import Look

#: A side of more features keeps its own basis: the eigenvectors of a vocabulary of tens of thousands cost more than they say.
LONGEST_SIDE = 1024


class KroneckerFisher:
    """The Fisher matrix of a model at the weights it has. Two passes over the samples; memory of a few times P."""

    def __init__(self, look: Look) -> None:
        """Find bases from one pass over the samples, and eigenvalues from another."""
        self._look = look
        self._bases = {name: (_eigenvectors(a), _eigenvectors(b)) for name, (a, b) in _factors(look).items()}
        n = len(look.ids)
        #: Mean squares in the eigenbasis, ``[o, i]`` by parameter.
        self.eigenvalues = {name: matrix.new_zeros(matrix.shape[1:]) for name, matrix in _matrices(look, look.like(1)).items()}
        for matrices in _blocks(look):
            for name, matrix in matrices.items():
                self.eigenvalues[name] += _turn(matrix, *self._bases[name]).square().sum(0) / n

    def solve(self, vectors: Tensor, damping: float | None = None) -> Tensor:
        """Return (F + λ I)⁻¹ V for rows ``[sets, P]``.

        Args:
            vectors: The rows.
            damping: λ for all parameters; None: a tenth of the mean eigenvalue of every parameter, as Grosse et al. (2023) do.
        """
        import torch

        parts = []
        for name, matrix in _matrices(self._look, vectors).items():
            values, (left, right) = self.eigenvalues[name], self._bases[name]
            damp = values.mean() / 10 if damping is None else damping
            # Where no sample moves a parameter there is no curvature; without damping nothing can be said along it. What is left of
            # such an eigenvalue is the square of a rounding error.
            nothing = values.max() * (64 * torch.finfo(values.dtype).eps) ** 2
            turned = (_turn(matrix, left, right) / (values + damp)).where(values + damp > nothing, 0.0)
            parts.append(_turn(turned, _back(left), _back(right)).flatten(1))
        return torch.cat(parts, dim=1)


def _matrices(look: Look, flat: Tensor) -> dict[str, Tensor]:
    """Give ``[m, P]`` by parameter as ``[m, o, i]``."""
    return {name: part.reshape(len(part), 1, -1) if part.dim() < 3 else part.flatten(2) for name, part in look.split(flat).items()}


def _blocks(look: Look) -> Iterator[Mapping[str, Tensor]]:
    for _, g in look.blocks():
        yield _matrices(look, g)


def _factors(look: Look) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Return L ``[o, o]`` and R ``[i, i]`` of every parameter; None for a side that is too long, or one."""
    found: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    for matrices in _blocks(look):
        for name, g in matrices.items():
            old = found.get(name, (None, None))
            found[name] = (_added(old[0], g), _added(old[1], g.transpose(1, 2)))
    return found


def _added(old: Tensor | None, g: Tensor) -> Tensor | None:
    """Add Σ_n G_n G_nᵀ, ``[o, o]``, in double precision from block to block."""
    if not 1 < g.shape[1] <= LONGEST_SIDE:
        return None
    rows = g.transpose(0, 1).flatten(1)
    new = (rows @ rows.T).double()
    return new if old is None else old + new


def _eigenvectors(factor: Tensor | None) -> Tensor | None:
    import torch

    return None if factor is None else torch.linalg.eigh(factor).eigenvectors


def _back(basis: Tensor | None) -> Tensor | None:
    return None if basis is None else basis.T


def _turn(matrix: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return Lᵀ M R for ``[m, o, i]``; None is the identity."""
    if right is not None:
        matrix = matrix @ right.to(matrix)
    return matrix if left is None else left.to(matrix).T @ matrix

"""Section 4.2 and Appendix D.1: inner products of per-sample gradients that are never formed.

The gradient of a matrix from one sample is a sum of outer products over its positions,

    gₙ = Σₜ leftₙₜ ⊗ rightₙₜ                                    left [n, t, p], right [n, t, q]

(for a linear layer, left is the gradient b at the output and right the input a), and the inner
product of two of them is the ghost dot product

    ⟨gₙ, gₘ⟩ = Σₜₛ (leftₙₜ · leftₘₛ) (rightₙₜ · rightₘₛ)                       *gram* form

which needs two matrices of t × s numbers instead of p × q. The paper takes it where 2T² < d₁d₂.
Otherwise the direction v = Σₘ gₘ of the validation rows is formed once, and

    ⟨gₙ, v⟩ = Σₜ leftₙₜᵀ v rightₙₜ                                           *formed* form

Letters: n training rows, m validation rows, t and s their positions, [p, q] the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FORMS = ("auto", "gram", "formed")


@dataclass(frozen=True)
class Outer:
    """Per-row gradients Σₜ left ⊗ right of a matrix ``[p, q]``.

    Attributes:
        left: ``[n, t, p]``; or integers ``[n, t]``, the places of the 1 in unit vectors (look-ups).
        right: ``[n, t, q]``.
        shape: That of the parameter; ``[p, q]`` when flattened behind the first dimension.
    """

    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def looks_up(self) -> bool:
        """Whether ``left`` are places of unit vectors."""
        return not self.left.is_floating_point()

    def total(self) -> Tensor:
        """Return Σₙ gₙ, in the shape of the parameter."""
        right = self.right.flatten(0, 1)
        if self.looks_up:
            return right.new_zeros(self.shape).index_add(0, self.left.flatten(), right)
        return (self.left.flatten(0, 1).T @ right).view(self.shape)

    def project(self, v: Tensor) -> Tensor:
        """Return ⟨gₙ, v⟩ for a formed direction in the shape of the parameter, ``[n]``."""
        matrix = v.flatten(1)
        projected = matrix[self.left] if self.looks_up else self.left @ matrix
        return (projected * self.right).sum((1, 2))


@dataclass(frozen=True)
class Formed:
    """Per-row gradients of a small parameter (biases, norms), formed: ``[n, *shape]``."""

    values: Tensor

    def total(self) -> Tensor:
        """Return Σₙ gₙ, in the shape of the parameter."""
        return self.values.sum(0)

    def project(self, v: Tensor) -> Tensor:
        """Return ⟨gₙ, v⟩, ``[n]``."""
        return (self.values * v).flatten(1).sum(1)


#: What one use of a parameter adds to its per-row gradients.
Term = Outer | Formed


def gram(samples: Outer, validation: Outer) -> Tensor:
    """Return Σₘ ⟨gₙ, gₘ⟩ from products of positions with positions, ``[n]``."""
    left, right = _pairs(samples.left, validation.left), _pairs(samples.right, validation.right)
    return (left * right).sum((1, 2))


def _pairs(x: Tensor, y: Tensor) -> Tensor:
    """Return xₙₜ · yₘₛ for all pairs of positions, ``[n, t, m·s]``; integers are unit vectors."""
    y = y.flatten(0, 1)
    if x.is_floating_point() and y.is_floating_point():
        return x @ y.T
    if x.is_floating_point():
        return x[:, :, y]
    return y.T[x] if y.is_floating_point() else x.unsqueeze(2) == y


def choose_form(samples: Sequence[Term], validation: Sequence[Term], form: str) -> str:
    """Return "gram" or "formed" for one parameter: by cost, unless ``form`` names one of them.

    Two samples of T positions cost 2T² numbers in gram form and d₁d₂ in formed form. Against m
    validation rows, and with several uses of a tied weight, all pairs of positions count.
    """
    outers = _outer_pairs(samples, validation)
    if len(outers) < len(samples) * len(validation):
        return "formed"  # small parameters have no gram form
    if form != "auto":
        return form
    pairs = sum(s.right.shape[1] * v.right.shape[:2].numel() for s, v in outers)
    return "gram" if 2 * pairs < math.prod(outers[0][0].shape) else "formed"


def contract(samples: Sequence[Term], validation: Sequence[Term], form: str) -> Tensor:
    """Return ⟨gₙ, Σₘ gₘ⟩ for one parameter, ``[n]``.

    Gradients add up over the uses of a parameter, so every pair of uses of a tied weight counts.

    Args:
        samples: Terms of the training rows, one per use.
        validation: Terms of the validation rows.
        form: "gram" or "formed", see :func:`choose_form`.
    """
    if form == "gram":
        return torch.stack([gram(s, v) for s, v in _outer_pairs(samples, validation)]).sum(0)
    direction = torch.stack([v.total() for v in validation]).sum(0)
    return torch.stack([s.project(direction) for s in samples]).sum(0)


def _outer_pairs(xs: Sequence[Term], ys: Sequence[Term]) -> list[tuple[Outer, Outer]]:
    return [(x, y) for x in xs if isinstance(x, Outer) for y in ys if isinstance(y, Outer)]

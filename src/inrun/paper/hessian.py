"""Appendix D.2: the ghost gradient-Hessian-gradient product, by one more backpropagation.

Wanted is ⟨gₙ, H ηG⟩ for every sample, H the Hessian of the validation loss and ηG the update of
the batch. H ηG is the gradient of Q = ⟨∇ℓ, ηG⟩ with G held constant. Q is a sum of ghost products
c_j d_j over the layers j, and known already: it is the sum of the first-order values.

A weight enters the graph of Q in two places. The forward computes s = W a, and the backward
computes Wᵀb, the gradient that the layer passes on to its input. Of the validation rows, therefore,

    H ηG for W  =  Σ h ⊗ a + b ⊗ f              h = ∂Q/∂s,  f = ∂Q/∂(Wᵀb)

which are the terms ① and ② of the appendix. They are outer products again, so that gₙ is
contracted with them as with the validation gradient, in gram or formed form. Where a layer is not
linear, a = features(x), and f is the derivative of the features at x along ∂Q/∂(gradient at x).

Two things differ from the paper as printed. Its term ② lacks the factor c_j, without which the
product is wrong. And it keeps one g(i, j) for every pair of layers; g is linear in what enters at
each layer, so that one backpropagation of the sum Q gives f for all j at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from inrun.paper.capture import Call
from inrun.paper.ghost import Term


@dataclass(frozen=True)
class Passed:
    """What the first backpropagation left at a call.

    Attributes:
        call: The call.
        b: Gradient at its output, ``[n + m, ...]``.
        onward: The gradient that it passes on to its input, as a place in the graph of the first
            backpropagation; None where there is none, and in first order. Other uses of the input
            may have added theirs: by a sum, Q has the same derivative as by its parts.
    """

    call: Call
    b: Tensor
    onward: GradientEdge | None


def hessian_terms(
    every: Sequence[Passed],
    q: Tensor,
    n: int,
) -> Iterator[dict[nn.Parameter, Term]]:
    """Run the second backpropagation and yield H ηG, as terms of the validation rows.

    Args:
        every: What the first backpropagation left at the calls.
        q: Q = ⟨∇ℓ, ηG⟩, a scalar in the graph of the first backpropagation.
        n: Training rows; the validation rows follow them.
    """
    if not q.requires_grad:  # ∇ℓ does not depend on the weights: the Hessian is 0
        return
    at = [edge for p in every for edge in (p.call.output, p.onward) if edge is not None]
    arrived = iter(torch.autograd.grad(q, at, allow_unused=True))
    for p in every:
        layer, x, b = p.call.layer, p.call.x[n:].detach(), p.b[n:].detach()
        h, f = next(arrived), None if p.onward is None else next(arrived)
        if h is not None:
            yield layer.terms(x, h[n:])
        if f is not None:
            along = torch.func.jvp(layer.features, (x,), (f[n:],))[1]
            yield layer.weight_terms(along, b)

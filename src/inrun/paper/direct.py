"""Section 4.2, the direct computation, and the rows "direct" of Table 1: form every gₙ.

One backpropagation per sample gives its gradient; the inner products of Theorems 1 and 2 follow
literally. It works for every layer and needs no hooks. The cost is n backpropagations a step, and
in second order also the memory of n gradients: G = Σₙ gₙ is not known before all of them are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from inrun.paper.theorems import Gradients, Products, Rates


def direct_products(
    losses: Tensor,
    validation_loss: Tensor,
    rates: Rates,
    order: int,
    parameters: Sequence[nn.Parameter],
) -> tuple[Products, Gradients]:
    """Return the inner products of one step, and its gradient, from per-sample gradients.

    Args:
        losses: Every sample's share of the training loss, ``[n]``; they add up to it. For a mean
            over the batch: the samples' losses divided by n.
        validation_loss: A scalar.
        rates: Learning rates by parameter.
        order: 1 or 2.
        parameters: All trainable parameters; those without a rate get their gradient only.
    """
    second = order == 2
    towards = _gradients(validation_loss, parameters, create_graph=second)
    direction = {p: rates[p] * v.detach() for p, v in towards.items() if p in rates}
    with torch.enable_grad():
        shares = losses.unbind()
    total: Gradients = {}
    first: list[Tensor] = []
    kept: list[Gradients] = []
    for share in shares:
        gradient = _gradients(share, parameters)
        total |= {p: g + total[p] if p in total else g for p, g in gradient.items()}
        first.append(_inner(gradient, direction, share))
        if second:
            kept.append(gradient)
    interaction = None
    if second:
        with torch.enable_grad():
            update = {p: rates[p] * g for p, g in total.items() if p in rates}
            q = _inner(towards, update, validation_loss)
        curved = {p: rates[p] * h for p, h in _gradients(q, parameters).items() if p in rates}
        interaction = torch.stack([_inner(gradient, curved, q) for gradient in kept])
    return Products(torch.stack(first), interaction), total


def _gradients(
    loss: Tensor,
    parameters: Sequence[nn.Parameter],
    create_graph: bool = False,
) -> Gradients:
    """Return the gradient of a scalar by the parameters that it depends on."""
    if not loss.requires_grad:
        return {}
    found = torch.autograd.grad(
        loss,
        parameters,
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return {p: g for p, g in zip(parameters, found, strict=True) if g is not None}


def _inner(x: Gradients, y: Gradients, like: Tensor) -> Tensor:
    """Return the inner product of two gradients, a scalar; both are 0 elsewhere."""
    return sum(((x[p] * y[p]).sum() for p in x if p in y), start=torch.zeros_like(like))

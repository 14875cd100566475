"""Section 4.2 and Appendix D.3: one backpropagation over training and validation rows together.

The batch holds n training rows and then m validation rows. The loss is a sum of two, each over its
own rows only and with its own mean, so that b = ∂loss/∂s carries 1/n in the training rows and 1/m
in the validation rows and nothing has to be scaled afterwards:

    loss = mean of the training rows' losses + mean of the validation rows' losses

One backpropagation of it gives b in all rows, because no row's loss depends on another row. Then:

- gₙ and ∇ℓ are the outer products of the first n and the last m rows, contracted by ``ghost``;
- the gradient of the update is Σₙ bₙ ⊗ aₙ over the *training* rows alone, formed from the b that
  are there already (the book-keeping trick). Autograd has not formed it: see ``capture``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from inrun.errors import CoverageError, RowOwnershipError
from inrun.paper.capture import Call
from inrun.paper.ghost import Term, choose_form, contract
from inrun.paper.hessian import Passed, hessian_terms
from inrun.paper.theorems import Gradients, Products, Rates

#: Per-row gradients by parameter, one term for each of its uses.
Terms = dict[nn.Parameter, list[Term]]


@dataclass(frozen=True)
class MergedLoss:
    """The loss of a merged batch.

    Attributes:
        training: A scalar, or the samples' shares of it, ``[n]``.
        validation: A scalar.
        total: Their sum, a scalar in the graph of both.
        n: Training rows; the validation rows follow them.
    """

    training: Tensor
    validation: Tensor
    total: Tensor
    n: int

    def check_rows(self, calls: Sequence[Call]) -> None:
        """Raise unless each loss depends on its own rows only. Costs two backpropagations."""
        outputs = [call.output for call in calls]
        for name, others in (("training", slice(self.n, None)), ("validation", slice(self.n))):
            loss = getattr(self, name)
            one = torch.ones_like(loss)
            found = torch.autograd.grad(loss, outputs, one, retain_graph=True, allow_unused=True)
            for call, b in zip(calls, found, strict=True):
                if b is not None and b[others].any():
                    raise RowOwnershipError(
                        f"the {name} loss depends on rows of the other kind at layer "
                        f"'{call.layer.name}'. The batch holds {self.n} training rows (one per id) "
                        "and then the validation rows; take each loss of its own rows, "
                        "losses[:n].mean() and losses[n:].mean(), in a model that keeps rows apart"
                    )


def ghost_products(
    calls: Sequence[Call],
    loss: MergedLoss,
    rates: Rates,
    form: str,
    order: int,
    parameters: Mapping[str, nn.Parameter],
) -> tuple[Products, Gradients]:
    """Return the inner products of one step and its gradient, from one backpropagation.

    In second order, from two.

    Args:
        calls: What the layers left in the forward.
        loss: The losses of both kinds of rows.
        rates: Learning rates by parameter.
        form: "gram", "formed", or "auto" (by cost, for each parameter).
        order: 1 or 2.
        parameters: All trainable parameters by name, to see whether one is used outside its layer.
    """
    n, second = loss.n, order == 2
    every = _backpropagate(calls, loss.total, second, parameters)
    zeros = every[0].b.new_zeros(n)
    training = _collect(p.call.layer.terms(p.call.x[:n].detach(), p.b[:n].detach()) for p in every)
    with torch.set_grad_enabled(second):  # Q is differentiated by the validation rows
        validation = _collect(p.call.layer.terms(p.call.x[n:], p.b[n:]) for p in every)
        first, forms = _values(training, validation, rates, form, zeros)
        q = first.sum()
    interaction = None
    if second:
        curved = _collect(hessian_terms(every, q, n))
        interaction, _ = _values(training, curved, rates, form, zeros)
    gradients = {p: torch.stack([t.total() for t in terms]).sum(0) for p, terms in training.items()}
    return Products(first.detach(), interaction, forms), gradients


def _backpropagate(
    calls: Sequence[Call],
    loss: Tensor,
    again: bool,
    parameters: Mapping[str, nn.Parameter],
) -> list[Passed]:
    """Run the one backpropagation; return what arrives at the calls that the loss depends on.

    Args:
        calls: What the layers left in the forward.
        loss: A scalar.
        again: Keep a graph of this backpropagation, for the second one.
        parameters: All trainable parameters by name.
    """
    for call in calls:
        call.check_input()
    at = [edge for c in calls for edge in (c.output, c.input) if edge is not None]
    at += [get_gradient_edge(p) for p in parameters.values()]
    arrived = iter(torch.autograd.grad(loss, at, create_graph=again, allow_unused=True))
    every: list[Passed] = []
    for call in calls:
        b, passed = next(arrived), None if call.input is None else next(arrived)
        onward = None
        if passed is not None and passed.requires_grad:
            onward = get_gradient_edge(passed)
        if b is not None:
            every.append(Passed(call, b, onward))
    outside = [name for name, b in zip(parameters, arrived, strict=True) if b is not None]
    if outside:
        raise CoverageError(
            f"parameter '{outside[0]}' is used outside the forward of its layer, where it has no "
            'ghost product. Call the layer, freeze the parameter, or take form="direct"'
        )
    if not every:
        raise CoverageError("the loss depends on no layer with trainable parameters")
    return every


def _collect(parts: Iterable[Mapping[nn.Parameter, Term]]) -> Terms:
    """Return the terms of all calls by parameter."""
    collected: Terms = {}
    for part in parts:
        for parameter, term in part.items():
            collected.setdefault(parameter, []).append(term)
    return collected


def _values(
    training: Terms,
    direction: Terms,
    rates: Rates,
    form: str,
    total: Tensor,
) -> tuple[Tensor, dict[nn.Parameter, str]]:
    """Return Σ_p η_p ⟨gₙ, v⟩ over the parameters that the optimizer moves, ``[n]``, and forms."""
    forms: dict[nn.Parameter, str] = {}
    for p, terms in direction.items():
        if p in rates:
            forms[p] = choose_form(training[p], terms, form)
            total = total + rates[p] * contract(training[p], terms, forms[p])
    return total, forms

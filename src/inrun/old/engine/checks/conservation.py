"""Conservation: on audited steps the contributions must sum to ⟨G, v⟩, parameter by parameter.

A difference beyond rounding is gradient that flowed through no observed row: a penalty on the weights, a weight
multiplied outside its module, or gradient left over from before the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.errors import ConservationError
from inrun.old.engine.sites import Scored


@dataclass(frozen=True)
class Summed:
    """Σ_n c_n and Σ_n |c_n|, ``[k]`` each in double precision: samples may cancel, their rounding does not."""

    total: Tensor
    size: Tensor

    @staticmethod
    def of(c: Tensor) -> Summed:
        """Add up contributions ``[n, k]``."""
        c = c.double()
        return Summed(c.sum(0), c.abs().sum(0))

    @staticmethod
    def none(k: int, device: torch.device | str = "cpu") -> Summed:
        """Begin with nothing."""
        return Summed(*torch.zeros(2, k, dtype=torch.float64, device=device))

    def __add__(self, other: Summed) -> Summed:
        """Add those of other samples, or of other uses."""
        return Summed(self.total + other.total, self.size + other.size)

    def times(self, factor: float) -> Summed:
        """Scale the contributions."""
        return Summed(self.total * factor, self.size * abs(factor))


@dataclass
class Balance:
    """Both sides of one parameter's sum, ``[k]`` each, before clipping, and what their rounding is relative to."""

    scored: Scored
    contributed: Summed
    expected: Tensor
    scale: Tensor
    #: ‖G ∘ v‖, what rounding of single entries, each by itself, is relative to.
    entrywise: Tensor


#: Rounding allowed, in units of machine precision times ‖G‖‖v‖; and of each term, times Σ_n |c_n|: samples that cancel (the bias of
#: a head in a balanced batch) leave a sum that is as small as the rounding of its terms.
TOLERANCE, OF_TERMS = 64.0, 8.0
#: The same for gradients of less than single precision, times ‖G ∘ v‖; and which part of a parameter's sum, and of the largest sum
#: of all parameters, may be lost beside it. ‖G‖‖v‖ is so much more than the sum itself that 64 roundings of bfloat16 would hide it.
COARSE, COARSE_PART, SMALL_PART = 64.0, 0.1, 0.02
#: And of each term, times Σ_n |c_n|: in Adam's first step v is as large as G is small, so that samples which cancel in G count for
#: much (up to 0.17 there, seen on small GPTs under autocast).
COARSE_TERMS = 0.5


def inner(gradient: Tensor, v: Tensor) -> Tensor:
    """Return ⟨G, v_k⟩, ``[k]``, in double precision."""
    directions = v.reshape(v.shape[0], -1)
    return (directions @ gradient.detach().reshape(-1).to(directions.dtype)).double()


def _sides(found: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart what :func:`products_with` put together."""
    products, (whole,), squares, entrywise = found.split([k, 1, k, k])
    return products, (whole * squares).sqrt(), entrywise.sqrt()


def products_with(gradient: Tensor, v: Tensor) -> Tensor:
    """Return ⟨G, v_k⟩, ‖G‖², ‖v_k‖² and ‖G ∘ v_k‖², ``[k + 1 + k + k]``, in double precision on the host: sums over entries."""
    flat, directions = gradient.detach().reshape(-1), v.reshape(v.shape[0], -1)
    used = flat.to(directions.dtype)
    squares = [
        torch.linalg.vector_norm(flat).double().square().view(1),
        torch.linalg.vector_norm(directions, dim=1).double().square(),
        torch.stack([torch.linalg.vector_norm(used * d) for d in directions]).double().square(),
    ]
    return torch.cat([(directions @ used).double(), *squares]).cpu()


def balance_of(s: Scored, contributed: Summed, found: Tensor) -> Balance:
    """Return a parameter's balance from what :func:`products_with` found."""
    return Balance(s, contributed, *_sides(found, len(contributed.total)))


def precision_of(s: Scored, coarse: torch.dtype | None) -> float:
    """Return the machine precision in which a parameter's gradient is computed."""
    own = max(torch.finfo(s.parameter.dtype).eps, torch.finfo(coarse).eps if coarse else 0.0)
    exact = all(site.rule.exact for site, _ in s.uses)
    return own if exact else max(own, torch.finfo(torch.float32).eps)


#: What may be behind a difference that nothing else explains.
USUAL_CAUSES = (
    "Usual causes: a penalty on the weights written into the loss (use the optimizer's weight_decay), a weight "
    "multiplied outside its module (call the module), or .grad changed between two microbatches."
)
#: What may be behind it where gradients are coarse.
ROUNDED = (
    " In bfloat16 and float16 the gradient itself may have lost a part, too: sums over many positions stop growing (embeddings, "
    "norms and biases on CPUs). Keep the weights in float32 and take autocast."
)
SECOND_ORDER = (
    "A backward with create_graph=True was itself differentiated (a gradient penalty?): part of the gradient then flows through "
    "the backward of the layers, which no sample's rows tell. Such losses cannot be scored."
)


def check_balances(balances: list[Balance], n: int, step: int, coarse: dict[Any, torch.dtype], causes: str = USUAL_CAUSES) -> None:
    """Raise ConservationError naming the parameters whose contributions do not add up, and ``causes``.

    ``coarse`` tells the parameters whose gradient came through tensors of a lower precision than their own.
    """
    if not balances:
        return
    off = torch.stack([(b.contributed.total - b.expected).abs().max() for b in balances]).cpu()
    eps = torch.tensor([precision_of(b.scored, coarse.get(b.scored.parameter)) for b in balances], dtype=torch.float64)
    scale = torch.stack([b.scale.max() for b in balances]).cpu()
    terms = torch.stack([b.contributed.size.max() for b in balances]).cpu()
    # The floor: a gradient that cancels to rounding noise (key biases in attention) has a scale that is noise too.
    allowed = TOLERANCE * eps * ((n**0.5) * scale + 1e-3 * scale.max()) + OF_TERMS * eps * terms
    sums = torch.stack([b.expected.abs().max() for b in balances]).cpu().double()
    entrywise = torch.stack([b.entrywise.max() for b in balances]).cpu().double()
    rounded = torch.maximum(COARSE * eps * entrywise + COARSE_PART * sums, SMALL_PART * sums.max()) + COARSE_TERMS * eps * terms
    allowed = torch.where(eps > 1e-5, torch.minimum(allowed, rounded), allowed)
    bad = torch.nonzero(~(off <= allowed) & torch.isfinite(scale)).flatten().tolist()
    if bad:
        lines = [
            f"  {balances[i].scored.name}: contributions sum to {balances[i].contributed.total.cpu().tolist()}, "
            f"gradient gives {balances[i].expected.cpu().tolist()}"
            for i in bad[:8]
        ]
        more = f"\n  and {len(bad) - 8} more" if len(bad) > 8 else ""
        causes = causes + (ROUNDED if bool((eps[bad] > 1e-5).all()) else "")
        raise ConservationError(
            f"at step {step} some gradient flows through no sample's rows:\n" + "\n".join(lines) + more + "\n" + causes
        )

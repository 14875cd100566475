"""Conservation: on audited steps the contributions must sum to ⟨G, v⟩, parameter by parameter.

A difference beyond rounding is gradient that flowed through no observed row: a penalty on the weights, a weight
multiplied outside its module, or gradient left over from before the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.engine.sites import Scored
from inrun.errors import ConservationError


@dataclass
class Balance:
    """Both sides of one parameter's sum, ``[k]`` each, before clipping, and what their rounding is relative to."""

    scored: Scored
    contributed: Tensor
    expected: Tensor
    scale: Tensor


#: Rounding allowed, in units of machine precision times ‖G‖‖v‖.
TOLERANCE = 64.0


def inner(gradient: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return ⟨G, v_k⟩ and ‖G‖‖v_k‖, in double precision."""
    flat, directions = gradient.detach().reshape(-1), v.reshape(v.shape[0], -1)
    products = directions @ flat.to(directions.dtype)
    scale = torch.linalg.vector_norm(flat) * torch.linalg.vector_norm(directions, dim=1)
    return products.double(), scale.double()


def products_with(gradient: Tensor, v: Tensor) -> Tensor:
    """Return ⟨G, v_k⟩, ‖G‖² and ‖v_k‖², ``[k + 1 + k]``, in double precision on the host: sums over entries."""
    flat, directions = gradient.detach().reshape(-1), v.reshape(v.shape[0], -1)
    products = directions @ flat.to(directions.dtype)
    squares = [
        torch.linalg.vector_norm(flat).double().square().view(1),
        torch.linalg.vector_norm(directions, dim=1).double().square(),
    ]
    return torch.cat([products.double(), *squares]).cpu()


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
    off = torch.stack([(b.contributed - b.expected).abs().max() for b in balances]).cpu()
    eps = torch.tensor([precision_of(b.scored, coarse.get(b.scored.parameter)) for b in balances], dtype=torch.float64)
    scale = torch.stack([b.scale.max() for b in balances]).cpu()
    # The floor: a gradient that cancels to rounding noise (key biases in attention) has a scale that is noise too.
    allowed = TOLERANCE * eps * ((n**0.5) * scale + 1e-3 * scale.max())
    bad = torch.nonzero(~(off <= allowed) & torch.isfinite(scale)).flatten().tolist()
    if bad:
        lines = [
            f"  {balances[i].scored.name}: contributions sum to {balances[i].contributed.cpu().tolist()}, "
            f"gradient gives {balances[i].expected.cpu().tolist()}"
            for i in bad[:8]
        ]
        more = f"\n  and {len(bad) - 8} more" if len(bad) > 8 else ""
        raise ConservationError(
            f"at step {step} some gradient flows through no sample's rows:\n" + "\n".join(lines) + more + "\n" + causes
        )

"""Conservation: on audited steps the contributions must sum to ⟨G, v⟩, parameter by parameter.

A difference beyond rounding is gradient that flowed through no observed row: a penalty on the weights, a weight
multiplied outside its module, or gradient left over from before the step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
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


def precision_of(s: Scored, coarse: torch.dtype | None) -> float:
    """Return the machine precision in which a parameter's gradient is computed."""
    own = max(torch.finfo(s.parameter.dtype).eps, torch.finfo(coarse).eps if coarse else 0.0)
    exact = all(site.rule.exact for site, _ in s.uses)
    return own if exact else max(own, torch.finfo(torch.float32).eps)


def check_balances(balances: list[Balance], n: int, step: int, coarse: dict[Any, torch.dtype]) -> None:
    """Raise ConservationError naming the parameters whose contributions do not add up.

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
            f"at step {step} some gradient flows through no sample's rows:\n" + "\n".join(lines) + more + "\n"
            "Usual causes: a penalty on the weights written into the loss (use the optimizer's weight_decay), a weight "
            "multiplied outside its module (call the module), gradient left in .grad from before the step (zero_grad), "
            "or .grad changed between two microbatches."
        )


@dataclass
class Schedule:
    """Which steps are audited: every k-th, or as often as costs under one per cent."""

    every: int | None
    next_step: int = 0
    _step_seconds: list[float] = field(default_factory=list)
    _began: float = 0.0
    _spent: float = 0.0

    def due(self, step: int) -> bool:
        """Whether this step is audited."""
        if self.every is None:
            return step >= self.next_step
        return self.every > 0 and step % self.every == 0

    def begin(self) -> None:
        """Start the clock of a step."""
        self._began, self._spent = time.perf_counter(), 0.0

    def spent(self, seconds: float) -> None:
        """Count time that only the audit needed."""
        self._spent += seconds

    def finish(self, step: int, audited: bool) -> None:
        """Plan the next audit so that audits cost at most one per cent of the time."""
        plain = max(time.perf_counter() - self._began - self._spent, 1e-9)
        self._step_seconds = [*self._step_seconds[-9:], plain]
        if audited:
            typical = sorted(self._step_seconds)[len(self._step_seconds) // 2]
            self.next_step = step + max(1, round(100.0 * self._spent / typical))

    def state_dict(self) -> dict[str, Any]:
        """Return the phase."""
        return {"every": self.every, "next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the phase."""
        self.next_step = int(state["next_step"])

"""Watches ``.grad`` from the backward to the optimizer's step: who got gradient, and what was done to it.

Norm clipping, loss scaling and division by accumulation steps multiply the whole gradient by one number, which is
told apart from anything else by the norms of the single tensors: one factor changes all by the same ratio, to rounding.
Conservation (``audit``) compares single directions besides. No gradient is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from inrun.engine.sites import Scored
from inrun.errors import OptimizerError


@dataclass
class Seen:
    """What a gradient looked like right after a backward."""

    gradient: Tensor
    version: int
    norm: Tensor

    def untouched(self, gradient: Tensor | None) -> bool:
        """Whether this very tensor is still there and nobody wrote to it."""
        return gradient is self.gradient and gradient._version == self.version


class GradientWatch:
    """Post-accumulation hooks on the scored parameters."""

    def __init__(self, scored: list[Scored], active: Callable[[], bool]) -> None:
        """Attach; gradients are noted while ``active()``."""
        self.seen: dict[nn.Parameter, Seen] = {}
        self.active = active
        self.handles = [s.parameter.register_post_accumulate_grad_hook(self._note) for s in scored]

    @torch.no_grad()
    def _note(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self.active() or gradient is None:
            return
        assert isinstance(parameter, nn.Parameter)
        self.seen[parameter] = Seen(gradient, gradient._version, torch.linalg.vector_norm(gradient))

    def reset(self) -> None:
        """Forget the step."""
        self.seen = {}

    def close(self) -> None:
        """Detach the hooks."""
        for handle in self.handles:
            handle.remove()

    @torch.no_grad()
    def factor(self, scored: list[Scored]) -> float:
        """Return the one number by which all gradients were multiplied since the backward.

        Raises:
            OptimizerError: The change is not one number for all parameters.
        """
        seen = [(s, self.seen[s.parameter]) for s in scored if s.parameter in self.seen]
        if all(note.untouched(s.parameter.grad) for s, note in seen):
            return 1.0
        gone = [s.name for s, _ in seen if s.parameter.grad is None]
        if gone:
            raise OptimizerError(f"the gradient of {', '.join(gone)} was removed between backward and optimizer.step()")
        before = torch.stack([note.norm.double() for _, note in seen])
        grads = [s.parameter.grad for s, _ in seen if s.parameter.grad is not None]
        after = torch.stack([torch.linalg.vector_norm(g).double() for g in grads])
        b, a = torch.stack([before, after]).cpu()
        total = b.norm()
        if not torch.isfinite(total) or total == 0:
            return 1.0  # non-finite gradients are dealt with by the step; of zeros any factor is true
        c = float(a.norm() / total)
        eps = max(torch.finfo(g.dtype).eps for g in grads)
        off = (a - c * b).abs() > 64 * eps * c * b + 1e-30
        bad = torch.nonzero(off).flatten().tolist()
        if bad:
            names = ", ".join(seen[i][0].name for i in bad[:5])
            raise OptimizerError(
                "between backward and optimizer.step() the gradient was changed by something other than one factor for "
                f"all parameters (seen at {names}). Accepted: norm clipping over all parameters, loss scaling, division "
                "by accumulation steps. Value clipping, per-group clipping and gradient noise cannot be scored with a "
                'direction made before the backward; use update="sgd" without them, or clip by the global norm.'
            )
        return c

"""What the parts of a move were worth, by a validation gradient along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from inrun.engine.processes import Processes
from inrun.engine.scored_step import ScoredStep

if TYPE_CHECKING:
    from inrun.engine.move import Mover


def account_for_step(
    gradients: Tensor, mover: Mover, noise: Sequence[int], processes: Processes
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what the whole move but for decoupled decay was worth, that decay, and the part of tensors that are noise, ``[k]``.

    Args:
        gradients: Validation gradients, ``[k, size]``. They become the directions by which the step pays its own samples.
        mover: The move.
        noise: Places of tensors whose gradient is only rounding.
        processes: Those that hold the parameters.
    """
    decay, moved = decoupled_decay(gradients, mover), mover.moved()
    data, rounding = (gradients @ moved).double() - decay, torch.zeros_like(decay)
    for at in (mover.flat.slices[i] for i in noise):
        rounding += (gradients[:, at] @ moved[at]).double()
    data, decay, rounding = processes.over_shards(torch.stack([data, decay, rounding]))
    mover.to_own_directions_(gradients)
    return data, decay, rounding if noise else None


def account_for_pushes(
    gradients: Tensor, mover: Mover, scored: ScoredStep, noise: Sequence[int], processes: Processes
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return what samples' gradients, weight decay, earlier momentum and tensors that are noise were worth, ``[k]`` each.

    Args:
        gradients: Validation gradients, ``[k, size]``. They become the directions D = A∘∇.
        mover: The move.
        scored: With the parts of q that no sample is paid for.
        noise: Places of tensors whose gradient is only rounding.
        processes: Those that hold the parameters.
    """
    decay = decoupled_decay(gradients, mover)
    mover.to_directions_(gradients)
    data, rounding = torch.zeros_like(decay), torch.zeros_like(decay)
    for g in mover.groups:
        for places, part, q in zip(g.places, g.parts, g.pushed() if g.memories else (), strict=False):
            data += (gradients[:, part] @ q.to(gradients.dtype)).double()
            for at in (mover.flat.slices[i] for i in noise if i in places):
                rounding += (gradients[:, at] @ q[at.start - part.start : at.stop - part.start].to(gradients.dtype)).double()
    if scored.decay is not None:
        coupled = (gradients @ scored.decay).double()
        decay, data = decay + coupled, data - coupled
    inherited = torch.zeros_like(data) if scored.inherited is None else (gradients @ scored.inherited).double()
    parts = torch.stack([data - inherited - rounding, decay, inherited, rounding])
    data, decay, inherited, rounding = processes.over_shards(parts)
    return data, decay, inherited, rounding if noise else None


def decoupled_decay(gradients: Tensor, mover: Mover) -> Tensor:
    """Return what decoupled weight decay did by the gradients, ``[k]``."""
    found = torch.zeros(len(gradients), dtype=torch.float64, device=gradients.device)
    shrunk = [(g.parts, g.shrink) for g in mover.groups if isinstance(g.shrink, Tensor) or g.shrink != 0.0]
    for where, factor in _alike([(part, shrink) for parts, shrink in shrunk for part in parts]):
        found += (gradients[:, where] @ mover.weights_before[where]).double() * factor
    return found


def _alike(spans: Sequence[tuple[slice, Any]]) -> list[tuple[slice, Any]]:
    """Join neighbouring slices with the same number."""
    found: list[tuple[slice, Any]] = []
    for where, x in sorted(spans, key=lambda s: s[0].start):
        if found and found[-1][0].stop == where.start and not isinstance(x, Tensor) and found[-1][1] == x:
            found[-1] = (slice(found[-1][0].start, where.stop), x)
        else:
            found.append((where, x))
    return found

"""The whole move that a step is about to make: w' − w = −pace · gain ∘ q − shrink · w, parameter by parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.errors import OptimizerError
from inrun.old.engine.processes import Processes
from inrun.old.engine.sites import Scored
from inrun.old.engine.update_path import UpdatePath
from inrun.old.optimizers import Realised, Recall, UpdateRule

#: Steps of a parameter whose moves are hardly more than signs: one factor stands for the whole tensor there.
FIRST_STEPS = 3


@dataclass
class ParameterMove:
    """What one parameter is about to do."""

    scored: Scored
    realised: Realised
    recall: Recall
    #: The factor of −w, where decay is beside the update, and λ where it enters the gradient.
    shrink: float
    entering_decay: float
    #: What a sample's gradient is multiplied by when it enters: clipping and loss scale, with the sign of the optimizer, and its
    #: share in the mean over processes.
    factor: float
    #: Whether its gain is one of the first, made of hardly more than this step's own gradient.
    early: bool

    def shift(self, weight: Tensor, fraction: float) -> None:
        """Move a weight by a part of the way."""
        if self.shrink != 0.0:
            weight.mul_(1.0 - fraction * self.shrink)
        gain, q = self.realised.gain, self.realised.q
        if isinstance(gain, Tensor):
            weight.addcmul_(gain.to(weight.dtype), q.to(weight.dtype), value=-fraction * self.realised.pace)
        else:
            weight.add_(q.to(weight.dtype), alpha=-fraction * self.realised.pace * gain)


class WholeMove:
    """The moves of all parameters that are about to step."""

    def __init__(
        self,
        scored: list[Scored],
        rules: list[UpdateRule],
        path: UpdatePath,
        factors: dict[int, float],
        free: Mapping[int, Realised] | None = None,
        processes: Processes | None = None,
    ) -> None:
        """``factors`` are those of the optimizers' gradients (clipping, loss scale); the memory of ``free`` may be taken.

        A sample's gradient counts for its share in that of all ``processes``.
        """
        self.scored, self.path, self.processes = scored, path, processes or Processes()
        share = self.processes.share
        place = {s: i for i, s in enumerate(scored)}
        old = free or {}
        self.moves = {
            place[s]: _move_of(s, rules[s.optimizer], factors[s.optimizer] * share, old.get(place[s])) for s in path.moving()
        }

    @contextlib.contextmanager
    def at(self, fraction: float) -> Iterator[None]:
        """Hold the model at w + fraction · (w' − w).

        A parameter that is frozen and moves on, by its memory (zeros are left in its gradient), gets a validation gradient, too.
        """
        of = {m.scored: m for m in self.moves.values()}
        frozen = [s.parameter for s in of if not s.parameter.requires_grad]
        split = [s.name for s in of if not s.parameter.requires_grad and s.shards is not None]
        if split:
            raise OptimizerError(
                f"{', '.join(split)} is frozen and moves on by the optimizer's memory, since zeros are left in its gradient; under "
                "fully_shard that cannot be scored. Set its gradient to None when you freeze it."
            )
        with self.path.shifted(list(of), lambda s, weight: of[s].shift(weight, fraction)):
            try:
                for p in frozen:
                    p.requires_grad_(True)
                yield
            finally:
                for p in frozen:
                    p.requires_grad_(False)

    def recalls(self) -> list[Recall | None]:
        """Return how every parameter's memory advances; None for those that do not step."""
        return [self.moves[i].recall if i in self.moves else None for i in range(len(self.scored))]

    def worth(self, raw: list[Tensor | None]) -> Tensor:
        """Return −⟨w' − w, ∇ℓ⟩ for validation gradients ``[k, *shape]``: what the whole move is worth by them, ``[k]``."""
        k = len(next(g for g in raw if g is not None))
        total = torch.zeros(k, dtype=torch.float64)
        for i, m in self.moves.items():
            g = raw[i]
            if g is not None:
                way = m.realised.q * m.realised.gain * m.realised.pace
                way = way.add_(m.scored.weight.to(way.dtype), alpha=m.shrink) if m.shrink else way
                total += (g.reshape(k, -1) @ way.reshape(-1).to(g.dtype)).double().cpu()
        return self.processes.joined(total)

    def direction(self, index: int, raw: Tensor) -> Tensor:
        """Turn the averaged validation gradient ``[k, *shape]`` into D = gain ∘ ∇̄, in place."""
        move = self.moves[index]
        gain, q = move.realised.gain, move.realised.q
        d = raw.mul_(gain.to(raw.dtype) if isinstance(gain, Tensor) else gain)
        if not move.early:
            return d
        flat, length = q.reshape(-1).to(d.dtype), torch.linalg.vector_norm(q.double()).square().view(1)
        products = (d.reshape(len(d), -1) @ flat).double()
        products, length = self.processes.joined(torch.cat([products, length.to(products.device)])).split([len(d), 1])
        shares = (products / (float(length) or 1.0)).to(d.dtype)
        return d.copy_(shares.view(-1, *([1] * q.dim())) * q.to(d.dtype))


def _move_of(s: Scored, rule: UpdateRule, factor: float, before: Realised | None) -> ParameterMove:
    weight, group, state = s.weight, s.group, s.state
    recall = rule.recall(group, state)
    if recall is None:
        raise OptimizerError(
            f"the options of the optimizer of {s.name} have no unique shares of earlier gradients; take credit='step'"
        )
    gradient = s.used_gradient
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    realised = rule.realised_again(before, gradient.to(dtype), weight.to(dtype), group, state)
    sign = -1.0 if group.get("maximize", False) or getattr(rule, "maximize", False) else 1.0
    done = float(state.get("step", FIRST_STEPS))
    return ParameterMove(
        scored=s,
        realised=realised,
        recall=recall,
        shrink=rule.decay_beside(weight, group, state),
        entering_decay=rule.entering_decay(group),
        factor=factor * sign,
        early=rule.adaptive and (not state or done < FIRST_STEPS),
    )

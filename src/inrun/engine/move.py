"""What one step did to the weights, read from the optimizers after they stepped: w' − w = −A∘q − shrink·w."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.engine.parameters import Parameters, Scored
from inrun.optimizers import GroupStep, Memory, UpdateRule, agree


@dataclass(eq=False)
class Moved:
    """What one step did to one parameter."""

    scored: Scored
    step: GroupStep
    index: int
    memory: Memory | None
    #: A, learning rate included, and q; the state itself may be q.
    factor: Tensor | float
    q: Tensor
    shrink: float | Tensor
    coupled: float
    early: bool
    entry: Tensor | None


class Mover:
    """Copies weights before a step and describes the move after it."""

    def __init__(self, parameters: Parameters, rules: Sequence[UpdateRule]) -> None:
        self.parameters, self.rules = parameters, list(rules)
        self._buffers: list[Tensor] = []
        self._first: dict[int, bool] = {}
        self._stepping: list[Scored] = []
        self.moved: dict[int, Moved] = {}

    def begin(self) -> None:
        """Begin a step."""
        self.moved, self._stepping = {}, []

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Copy the weights that an optimizer is about to move."""
        if not self._buffers:
            self._buffers = [torch.empty_like(s.parameter, memory_format=torch.preserve_format) for s in self.parameters.scored]
        mine = [s for s in self.parameters.of(index) if s.parameter.grad is not None]
        rule = self.rules[index]
        self._first |= {s.place: rule.remembered(optimizer.state.get(s.parameter, {})) is None for s in mine}
        for group in optimizer.param_groups:
            rule.before_step(
                group, [optimizer.state[s.parameter] for s in mine if s.group is group and s.parameter in optimizer.state]
            )
        if mine:
            torch._foreach_copy_([self._buffers[s.place] for s in mine], [s.parameter.detach() for s in mine])
        self._stepping += mine

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, index: int) -> None:
        """Describe what an optimizer did."""
        rule = self.rules[index]
        for group in optimizer.param_groups:
            mine = [s for s in self._stepping if s.optimizer == index and s.group is group]
            if not mine:
                continue
            step = GroupStep(
                before=[self._buffers[s.place] for s in mine],
                gradients=[s.parameter.grad for s in mine],  # type: ignore[misc]
                group=group,
                states=[optimizer.state.get(s.parameter, {}) for s in mine],
                first=[self._first[s.place] for s in mine],
            )
            memories = rule.memory(step)
            factors: Any = rule.factor(step) if memories is not None else 0.0
            pushed = rule.pushed(step) if memories is not None else step.gradients
            entries, early = rule.entry(step), rule.is_early(step)
            shrink, coupled = rule.shrink(group), rule.coupled(group)
            for j, s in enumerate(mine):
                self.moved[s.place] = Moved(
                    s,
                    step,
                    j,
                    None if memories is None else memories[j],
                    factors if isinstance(factors, float) else factors[j],
                    pushed[j],
                    shrink,
                    coupled,
                    early[j],
                    None if entries is None else entries[j],
                )

    @contextlib.contextmanager
    def at(self, fraction: float) -> Iterator[None]:
        """Hold the model at w + fraction · (w' − w); afterwards the weights are w' again, bit for bit."""
        if fraction == 1.0:
            yield
            return
        some = [m.scored for m in self.moved.values()]
        weights = [s.parameter.detach() for s in some]
        kept = [w.clone() for w in weights]
        with torch.no_grad():
            if fraction == 0.0:
                torch._foreach_copy_(weights, [self._buffers[s.place] for s in some])
            else:
                torch._foreach_lerp_(weights, [self._buffers[s.place] for s in some], 1.0 - fraction)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)

    def before_of(self, place: int) -> Tensor:
        """Return a parameter's weights before the step."""
        return self._buffers[place]

    @torch.no_grad()
    def directions(self, raw: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return D = A∘∇ ``[k, *shape]`` by place, for parameters with a memory; in a tensor's first steps D agrees with q."""
        found: dict[int, Tensor] = {}
        some = [(i, m, g) for i, m in self.moved.items() if (g := raw[i]) is not None and m.memory is not None]
        if not some:
            return found
        factors = [m.factor for _, m, _ in some]
        grads = [g for *_, g in some]
        if all(isinstance(a, Tensor) for a in factors):
            if len(grads[0]) == 1:
                made = torch._foreach_mul([g[0] for g in grads], factors)  # type: ignore[arg-type]
                made = [x.unsqueeze(0) for x in made]
            else:
                made = [g * a for g, a in zip(grads, factors, strict=True)]
        else:
            made = [g * a for g, a in zip(grads, factors, strict=True)]
        for (i, m, _), d in zip(some, made, strict=True):
            found[i] = torch.stack(agree([m.q] * len(d), list(d))) if m.early else d
        return found

    @torch.no_grad()
    def own_directions(self, raw: Sequence[Tensor | None]) -> dict[int, Tensor]:
        """Return the directions by which the step pays its own samples, ``[k, *shape]`` by place."""
        found: dict[int, Tensor] = {}
        by_step: dict[int, list[tuple[int, Moved]]] = {}
        for i, m in self.moved.items():
            by_step.setdefault(id(m.step), []).append((i, m))
        for some in by_step.values():
            step, rule = some[0][1].step, self.rules[some[0][1].scored.optimizer]
            moved = [before - m.scored.parameter.detach() for before, (_, m) in zip(step.before, some, strict=True)]
            sets = max(len(g) for i, _ in some if (g := raw[i]) is not None)
            each = []
            for k in range(sets):
                grads = [
                    torch.zeros_like(before) if (g := raw[i]) is None else g[k]
                    for before, (i, _) in zip(step.before, some, strict=True)
                ]
                each.append(rule.own_direction(grads, moved, step))
            found |= {i: torch.stack([d[j] for d in each]) for j, (i, _) in enumerate(some)}
        return found

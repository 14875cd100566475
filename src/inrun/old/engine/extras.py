"""What a step tells of every sample's gradient beside its contribution, on request: its norm, and its cosine with ∇ℓ.

Both come out of the same backward: one more probe per parameter for ‖g_n‖², one for ⟨g_n, ∇ℓ⟩ (``layers.seam``). A parameter with
more than one use has cross terms: its uses are kept, as factors where that is smaller, and paired when the step is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.errors import ConfigurationError, CoverageError, StepError
from inrun.old.engine.directions import Directions
from inrun.old.engine.microbatch import Kept, Microbatch
from inrun.old.engine.sites import Scored, Site
from inrun.old.layers import Ask, LayerRule, nbytes_of
from inrun.old.layers.squares import squares_of_sum
from inrun.torch_private import current_backward

NAMES = ("norm", "cosine")


def check_extra(extra: Iterable[str], knows_gradient: bool, merges: bool, sites: list[Site]) -> tuple[str, ...]:
    """Return the names of what is asked for beside contributions; raise for what cannot be told."""
    found = (extra,) if isinstance(extra, str) else tuple(extra)
    unknown = [name for name in found if name not in NAMES]
    if unknown:
        raise ConfigurationError(f"extra={unknown[0]!r} is not known; accepted are {', '.join(NAMES)}")
    if found and merges:
        raise ConfigurationError(f"extra={found!r} without validation=: merged steps tell contributions only; give validation=")
    if "cosine" in found and not knows_gradient:
        raise ConfigurationError(
            'extra="cosine" compares gradients with the validation gradient, which must be known before the backward: take '
            'method="first" or method="lookahead" (credit="step")'
        )
    alien = [site.title for site in sites if site.rule.replays or site.rule.reads or site.rule.whole]
    if found and alien:
        raise CoverageError(
            f"extra={found!r}: the gradients of {', '.join(alien[:5])} are contracted without being told apart; leave extra= out, "
            "or freeze its parameters"
        )
    return found


@dataclass
class Told:
    """What one microbatch told: probes by parameter, and uses that are kept."""

    squares: dict[Scored, Tensor] = field(default_factory=dict)
    towards: dict[Scored, Tensor] = field(default_factory=dict)
    uses: dict[Scored, list[Kept]] = field(default_factory=dict)
    called: set[Site] = field(default_factory=set)


class Extras:
    """The extra columns of one step."""

    def __init__(self, names: tuple[str, ...], directions: Directions | None, repeated: set[Site]) -> None:
        """``directions`` hold ∇ℓ, for cosines; ``repeated`` are modules that run more than once in a forward."""
        self.names, self.directions, self.repeated = names, directions, repeated
        self._told: dict[Microbatch, Told] = {}

    def ask(
        self,
        micro: Microbatch,
        site: Site,
        rule: LayerRule,
        name: str,
        constants: object,
        inputs: tuple[Tensor, ...],
        dtype: torch.dtype,
    ) -> tuple[list[Ask], list[Tensor], list[Tensor]]:
        """Return what is asked of one parameter in one call, beside its contraction: asks, directions, probes."""
        told, s = self._told.setdefault(micro, Told()), site.scored[name]
        self._note_call(told, site, name)
        asks: list[Ask] = []
        given: list[Tensor] = []
        probes: list[Tensor] = []
        if len(s.uses) > 1 or site in self.repeated:
            kind, parts = micro.kept_as(rule, constants, name, s.parameter, inputs, dtype)
            micro.allowance.take(nbytes_of(parts))
            leaves = [micro.leaf(*part) for part in parts]
            waiting = Kept(s, site, rule, constants, kind, leaves, micro.documents)
            for place, x in enumerate(leaves):
                micro.watched(x, (s,), waiting, place)
            told.uses.setdefault(s, []).append(waiting)
            asks.append(Ask(name, kept_as=kind, probes=len(leaves), extra=True))
            probes += leaves
        else:
            if s not in told.squares:  # a segment that a backward recomputes has it: what flows arrives there
                told.squares[s] = micro.watched(micro.leaf((micro.n,), micro.dtype), (s,))
            asks.append(Ask(name, contracts=False, extra=True))
            probes.append(told.squares[s])
        raw = None if self.directions is None or "cosine" not in self.names else self.directions.raw.get(s.parameter)
        if raw is not None:
            if s not in told.towards:
                told.towards[s] = micro.watched(micro.leaf((micro.n, micro.columns), micro.dtype), (s,))
            asks.append(Ask(name, extra=True))
            given.append(raw)
            probes.append(told.towards[s])
        return asks, given, probes

    def _note_call(self, told: Told, site: Site, name: str) -> None:
        first = next(other for other, s in site.active().items() if s.parameter.requires_grad)
        if current_backward() != -1 or name != first:
            return
        if site in told.called and site not in self.repeated:
            self.repeated.add(site)
            raise StepError(
                f"{site.title} is used more than once in one forward, which no look at the model had shown; nothing was scored. "
                "It is known now: leave the step, zero_grad(), and run it again."
            )
        told.called.add(site)

    def check_backwards(self) -> None:
        """Raise where squares of several backwards were added up: what they push is one gradient, which has cross terms."""
        several = [s for micro, told in self._told.items() for s in told.squares if len(micro.backwards.get(s.parameter, ())) > 1]
        if several:
            self.repeated |= {site for s in several for site, _ in s.uses}
            raise StepError(
                f"{', '.join(s.name for s in several[:5])} got gradient in several backwards of one forward, whose cross terms "
                "extra= needs and nobody kept; nothing was scored. Add the losses up and run one backward, or leave the step, "
                "zero_grad(), and run it again: it is known now."
            )

    @torch.no_grad()
    def tell(self, microbatches: list[Microbatch], factors: tuple[float, ...]) -> tuple[Tensor, Tensor | None]:
        """Return ‖g_n‖ ``[n]`` and the cosines ``[n, k]`` (None where not asked for).

        ``factors`` are those of the optimizers: what is told is of the gradient that they used, clipped and unscaled.
        """
        norms, cosines = [], []
        for micro in microbatches:
            told = self._told.get(micro, Told())
            total = torch.zeros(micro.n, dtype=torch.float64, device=micro.device)
            for s, leaf in told.squares.items():
                if leaf.grad is not None:
                    total += leaf.grad.double() * factors[s.optimizer] ** 2
            for s, uses in told.uses.items():
                shapes = [shape for kept in uses for shape in kept.shapes()]
                if shapes:
                    total += squares_of_sum(shapes).to(total.device) * factors[s.optimizer] ** 2
            norm = total.clamp_min(0.0).sqrt()
            norms.append(norm)
            if "cosine" in self.names:
                cosines.append(self._cosines(micro, told, norm, factors))
        return torch.cat(norms), torch.cat(cosines) if cosines else None

    def _cosines(self, micro: Microbatch, told: Told, norm: Tensor, factors: tuple[float, ...]) -> Tensor:
        assert self.directions is not None
        inner = torch.zeros(micro.n, micro.columns, dtype=torch.float64, device=micro.device)
        for s, leaf in told.towards.items():
            if leaf.grad is not None:
                inner += leaf.grad.double() * factors[s.optimizer]
        raw = [g.flatten(1).double().square().sum(1).to(micro.device) for g in self.directions.raw.values()]
        lengths = norm.unsqueeze(1) * torch.stack(raw).sum(0).sqrt()
        return torch.where(lengths == 0, 0.0, inner / torch.where(lengths == 0, 1.0, lengths))

    def release(self) -> None:
        """Free everything."""
        for told in self._told.values():
            for kept in (kept for uses in told.uses.values() for kept in uses):
                kept.forget()
        self._told = {}

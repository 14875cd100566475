"""What a method is: which average ∇̄ of the validation gradient it takes, when, and how it describes itself.

A method is one small class in a file of its own, registered by name:

    @register
    class Mine(Method):
        name = "mine"
        summary = "what the report says of it"

        def before(self, look):
            return look.here()

Everything that names methods (the command line, configuration checks, advice in summaries, the report, the benchmark) reads
``METHODS``; nothing keeps a list of its own. This room never imports torch, so that reports can be read where it is absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from inrun.errors import ConfigurationError

#: What a sample's gradient does to the weights, by name, with the words that describe it.
UPDATES = {
    "auto": "frozen for methods that score inside the backward, secant for those that wait for the optimizer",
    "sgd": "as if the optimizer were plain SGD (the paper's proxy)",
    "frozen": "the optimizer's own rule, with its state as it stood before the step",
    "secant": "every sample's share of the move that the optimizer really made",
    "realised": "the factor that the step really applied, this gradient's part of it",
}


#: Updates whose gain is known only when the optimizer is about to step, unless the update is linear.
KNOWN_AT_STEP = ("secant", "realised")
#: Which credit is kept, by name, with the words that describe it.
CREDITS = {
    "auto": "whole where the optimizers allow it and neither method nor update is given, else step",
    "whole": "what a use did over all later steps, through the optimizer's memory",
    "step": "what a use did in its own step",
}


class Look(Protocol):
    """Validation gradients at places around the move of one step (the engine implements it).

    Whatever is returned is handed back to the engine as it is; methods do not look inside.
    """

    def here(self) -> Any:
        """Return ∇ℓ(w)."""
        ...

    def after_zero_move(self) -> Any:
        """Return ∇ℓ(w + δ_∅), before the backward: for the parameters that moved in the last step."""
        ...

    def along(self, points: Sequence[tuple[float, float]]) -> Any:
        """Return Σ_q w_q ∇ℓ(w + δ_∅ + s_q · data's part) for points (s_q, w_q), when the optimizers are about to step."""
        ...

    def bent(self, by_differences: bool) -> Any:
        """Return ∇ℓ(w) + ½H(δ_∅ + Δ), when the optimizers are about to step."""
        ...


@dataclasses.dataclass(frozen=True)
class Method:
    """A choice of the averaged validation gradient ∇̄, with its options.

    A method that knows ∇̄ before the backward overrides ``before``; one that must see the real gradients overrides
    ``at_step`` and sets ``deferred``.
    """

    name: ClassVar[str]
    #: One line for ``--help``, configuration errors and the report.
    summary: ClassVar[str]
    #: Whether ∇̄ is known only when the optimizer is about to step: contractions wait until then.
    deferred: ClassVar[bool] = False
    #: Updates that the method makes no sense with, and why.
    refuses: ClassVar[dict[str, str]] = {}
    #: Updates beside which `inrun bench` times the method; "real" stands for the optimizer's own (secant, or sgd for SGD).
    benchmarked_with: ClassVar[tuple[str, ...]] = ("real",)
    #: Forms of the contraction that `inrun bench` times, each with a line of its own.
    benchmarked_forms: ClassVar[tuple[str, ...]] = ("auto",)
    #: Updates beside which the fidelity study holds the method against the truth, and variants such as ``gauss2`` of its option.
    studied_with: ClassVar[tuple[str, ...]] = ("secant",)
    studied_variants: ClassVar[tuple[str, ...]] = ()

    def before(self, look: Look) -> Any:
        """Return ∇̄ before the backward."""
        raise NotImplementedError(f"{self.name} takes its validation gradient when the optimizer steps")

    def at_step(self, look: Look) -> Any:
        """Return ∇̄ when the optimizers are about to step."""
        raise NotImplementedError(f"{self.name} takes its validation gradient before the backward")

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """Return the places along the move where gradients are taken, with their weights; none where it is not a quadrature."""
        return ()

    @property
    def adaptive(self) -> bool:
        """Whether more points are taken at rough steps."""
        return False

    def advice(self, update: str) -> str:
        """Say what to take instead where the residual is large."""
        if update == "sgd":
            return 'If the optimizer is not plain SGD, take method="midpoint" with update="secant": it shares out the real move.'
        if not self.deferred:
            return 'Take method="midpoint" (third order in the step size), or a smaller learning rate.'
        if update == "frozen":
            return 'Take update="secant": its shares sum to the real move.'
        return self.finer()

    def finer(self) -> str:
        """Say what is finer than this method where it has seen the real gradients."""
        return 'Take method="midpoint" (with quadrature="gauss3" if need be): the loss is not a parabola over such a step.'


METHODS: dict[str, Method] = {}
M = TypeVar("M", bound=type[Method])


def register(method: M) -> M:
    """Register a method under its name, with default options."""
    METHODS[method.name] = method()
    return method


def find_method(name: str, **options: Any) -> Method:
    """Return a method by name with its options (``quadrature``, ``hessian``); None leaves an option at its default."""
    if name not in METHODS:
        raise ConfigurationError(f"unknown method {name!r}; available: {', '.join(METHODS)}")
    method = METHODS[name]
    given = {key: value for key, value in options.items() if value is not None}
    known = {f.name for f in dataclasses.fields(method)}
    for key in given:
        if key not in known:
            owners = [m.name for m in METHODS.values() if key in {f.name for f in dataclasses.fields(m)}]
            belongs = " or ".join(f'method="{owner}"' for owner in owners) or "no method"
            raise ConfigurationError(f"{key}={given[key]!r} belongs to {belongs}; the method is {name!r}")
    return dataclasses.replace(method, **given)


def resolve_update(update: str, method: Method) -> str:
    """Return the update that "auto" stands for: frozen where contractions stream, secant where they wait."""
    if update not in UPDATES:
        raise ConfigurationError(f"unknown update {update!r}; available: {', '.join(UPDATES)}")
    if update in method.refuses:
        raise ConfigurationError(f'method="{method.name}" with update="{update}": {method.refuses[update]}')
    if update == "auto":
        return "secant" if method.deferred else "frozen"
    return update

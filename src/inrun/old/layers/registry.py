"""The rules: one mapping per layer type from (inputs, output gradient) to the shapes of its per-sample gradients.

A rule is one small class in a file of its own, registered by module class:

    @register(MyLayer)
    class MyRule(LayerRule):
        label = "my layer"
        names = ("weight",)

        def gradients(self, constants, inputs, b, n, names):
            return {"weight": Formed(...)}

That is all it takes: contraction, keeping, totals and sketches belong to the shapes (``shapes.py``), and how numbers leave
the backward belongs to the seam (``seam.py``). A rule may also own the layer's forward and backward (``Owner``), so that the
weight gradient and the contraction come out of the same products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from inrun.errors import CoverageError
from inrun.old.layers.layout import Layout
from inrun.old.layers.shapes import Formed, GradientShape, Parts
from inrun.old.layers.sketch import SketchPlan


class Owner:
    """A layer's own forward and backward, on tensors alone."""

    def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the output, and what ``gradients`` and ``input_gradient`` need beside the weight (``x`` first)."""
        raise NotImplementedError

    def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
        """Return the gradient at the input."""
        raise NotImplementedError


class LayerRule:
    """How the per-sample gradients of one layer type come about.

    Letters: n samples, t positions, i/o input and output features, k validation sets; ``b`` is the gradient of the loss at
    the module's output. A rule holds no state: what it needs of a module is in its ``constants``, which are hashable.
    """

    label: ClassVar[str] = "rule"
    names: ClassVar[tuple[str, ...]] = ()
    #: True where most entries of a parameter get no gradient in most steps (embedding tables).
    sparse: ClassVar[bool] = False
    #: False where the module may compute in float32 whatever its dtype, so that sums agree only to that precision.
    exact: ClassVar[bool] = True
    #: Whether the rule runs the module again instead of mapping (modules without a rule of their own).
    replays: ClassVar[bool] = False
    #: Whether outputs at a position depend on inputs at that position alone, with positions first in every tensor that the mapping
    #: takes: then the samples of a batch may be documents packed into its rows.
    positionwise: ClassVar[bool] = False
    #: Whether the module's parameters are scored where its forward reads them (``reads.py``).
    reads: ClassVar[bool] = False
    #: Whether the rule runs whole modules, of many parameters and outputs (``run_scored``).
    whole: ClassVar[bool] = False
    #: Whether such a module may be given the positions of all samples end to end.
    flat: ClassVar[bool] = False
    #: Whether all leading dimensions are alike, so that samples need not be in the first.
    turns: ClassVar[bool] = False
    #: The layer's own forward and backward, where the rule has one.
    owner: ClassVar[Owner | None] = None

    def note_output(self, index: int, layout: Layout) -> bool:
        """Take note of how samples lie in an output of a module that runs again; tell whether that agrees with before."""
        return True

    def by_position(self, module: nn.Module, features: int) -> bool:
        """Whether a call treats every position by itself, where so many dimensions follow the positions."""
        return self.positionwise

    def covers(self, module: nn.Module, names: set[str]) -> bool:
        """Whether the rule knows all these parameters of a module."""
        return names <= set(self.names)

    def run_scored(
        self,
        call: Any,
        buffers: dict[str, Tensor],
        asked: list[Tensor],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
    ) -> Any:
        """Run a call with probes (rules that score modules as a whole); ``made`` is what the module returned, if it ran."""
        raise NotImplementedError(f"{type(self).__name__} does not run its module")

    @property
    def compiles(self) -> bool:
        """Whether calls can be scored inside compiled code; others leave it."""
        return not (self.replays or self.reads or self.whole)

    def refusal(self, module: nn.Module) -> str | None:
        """Say why this module's gradient is not the rule's, or return None."""
        return None

    def constants(self, module: nn.Module) -> Hashable:
        """Return what the mapping needs of the module beside tensors."""
        return ()

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return the tensors of a call that the mapping needs; the one whose rows are samples comes first."""
        given = (*args, *kwargs.values())
        if len(given) != 1 or not isinstance(given[0], Tensor):
            kinds = ", ".join(type(x).__name__ for x in given) or "nothing"
            raise CoverageError(f"a {type(module).__name__} was called with {kinds}; its rule knows calls with one tensor")
        return (given[0],)

    def lead(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the tensor of a call whose rows tell the samples: the first."""
        return next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Map the inputs of a call and its output gradient to one shape for each of ``names``."""
        raise NotImplementedError

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """Tell as which shape and tensors a gradient is kept until the optimizer steps; ``dtype`` is the output's."""
        return Formed, (((n, *parameter.shape), torch.promote_types(parameter.dtype, torch.float32)),)

    def sketched_as(self, plan: SketchPlan, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int) -> Parts:
        """Tell as which tensors the sketch of a gradient leaves the backward."""
        return GradientShape.sketch_parts(plan, n, inputs, dtype)

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Make the shape again from the tensors it was kept as."""
        return kind.of(parts)  # type: ignore[attr-defined]

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a call that is about to happen, to run it again later (rules that replay)."""
        raise NotImplementedError(f"{type(self).__name__} does not run its module again")

    def note_rows(self, argument: int) -> None:
        """Take note that an argument was seen to have one row per sample (rules that replay)."""

    def grams(self, name: str) -> bool:
        """Whether a parameter's gradients are outer products, whose inner products need no gradient (*gram*)."""
        return False

    def rows_are_classes(self, name: str, parameter: Tensor) -> bool:
        """Whether the parameter has one row per class or word, of which a batch touches few (an output vocabulary)."""
        return False

    def owns(self, module: nn.Module, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """Whether ``owner`` should run this call: it can and, unless ``forced``, it costs less than the project form."""
        return False


def nbytes_of(parts: Parts) -> int:
    """Return the memory that parts will take."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


_rules: dict[type[nn.Module], LayerRule] = {}
_finders: list[Callable[[nn.Module], LayerRule | None]] = []
R = TypeVar("R", bound=type[LayerRule])


def register(*module_classes: type[nn.Module]) -> Callable[[R], R]:
    """Register a rule for module classes (and subclasses that keep their ``forward``)."""

    def add(rule: R) -> R:
        for cls in module_classes:
            _rules[cls] = rule()
        return rule

    return add


def register_finder(finder: Callable[[nn.Module], LayerRule | None]) -> Callable[[nn.Module], LayerRule | None]:
    """Register a function from a module to its rule, for classes that cannot be imported here."""
    _finders.append(finder)
    return finder


def registered() -> list[str]:
    """Return the names of the module classes that have a rule, for messages."""
    return sorted(cls.__name__ for cls in _rules)


def find_rule(module: nn.Module) -> LayerRule | None:
    """Return the rule for a module, or None where only the fallback can serve.

    A subclass counts only if it computes the same function: its ``forward`` is the registered class's, and
    its parameters are plain parameters (a parametrised or patched layer is another function).
    """
    cls = type(module)
    if "forward" in module.__dict__ or parametrize.is_parametrized(module):
        return None
    for base in cls.__mro__:
        if base in _rules and cls.forward is base.forward:
            return _rules[base]
    for finder in _finders:
        rule = finder(module)
        if rule is not None:
            return rule
    return None

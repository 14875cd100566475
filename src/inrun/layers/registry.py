"""The rules: how the per-sample gradients of one layer type are contracted with a direction.

The gradient of sample n at one parameter is g_n, the direction is v; a rule returns ⟨g_n, v⟩ without forming
g_n where that is cheaper. A rule is one small class, registered by module class:

    @register(MyLayer)
    class MyRule(Rule):
        names = ("weight",)

        def sample_gradient(self, module, name, saved, b, n): ...

``contract`` follows from ``sample_gradient`` unless there is a cheaper way. A rule may also own the layer's
backward (``shared_forward``), so that the weight gradient and the contraction come out of the same GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from inrun.errors import StepError

if TYPE_CHECKING:
    from inrun.layers.tap import Observer

Saved = tuple[Any, ...]
#: ``take(shape, like)`` gives a reused buffer that lasts until the optimizer's step.
Take = Callable[[tuple[int, ...], Tensor], Tensor]


def flatten_directions(v: Tensor) -> Tensor:
    """View directions ``[k, *shape]`` as ``[k, numel]``."""
    return v.reshape(v.shape[0], -1)


def dot_each(g: Tensor, v: Tensor) -> Tensor:
    """Contract formed per-sample gradients ``g`` ``[n, *shape]`` with ``v`` ``[k, *shape]``, giving ``[n, k]``."""
    flat = g.reshape(g.shape[0], -1).to(v.dtype)
    # Matrix-vector products read g at the speed of memory; one product with the few columns of vᵀ does not.
    return torch.stack([torch.mv(flat, d) for d in flatten_directions(v).unbind(0)], dim=1)


class Rule:
    """How one module class contracts per-sample gradients with directions.

    Letters: n samples, t positions, i/o input and output features, k validation sets. ``saved`` is what
    ``observe`` returned at the forward call, ``b`` the gradient of the loss at the module's output.
    """

    label: ClassVar[str] = "rule"
    names: ClassVar[tuple[str, ...]] = ()
    #: True where most entries of a parameter get no gradient in most steps (embedding tables).
    sparse: ClassVar[bool] = False
    #: False where the module may compute in float32 whatever its dtype, so that sums agree only to that precision.
    exact: ClassVar[bool] = True

    def refusal(self, module: nn.Module) -> str | None:
        """Say why this module's gradient is not the rule's, or return None."""
        return None

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saved:
        """Return the detached tensors that the contraction needs; the layer input comes first."""
        (a,) = (*args, *kwargs.values())
        return (a.detach(),)

    def sample_gradient(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Form the per-sample gradients of one parameter, ``[n, *shape]``."""
        raise NotImplementedError(f"{type(self).__name__} forms no per-sample gradients")

    def contract(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Return ⟨g_n, v⟩ for every sample and direction, ``[n, k]``."""
        return dot_each(self.sample_gradient(module, name, saved, b, n), v)

    def rows_are_classes(self, module: nn.Module, name: str) -> bool:
        """Whether the parameter has one row per class or word, of which a batch touches few (an output vocabulary)."""
        return False

    def contract_rows(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, v: Tensor) -> Tensor:
        """Return ⟨g_n, v⟩ row by row of the parameter, ``[n, k, p]``; asked for where ``rows_are_classes``."""
        raise NotImplementedError(f"{type(self).__name__} does not contract row by row")

    def keep(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int, take: Take) -> Kept:
        """Keep what a later contraction needs: inputs and output gradients, or per-sample gradients if smaller.

        Anything large goes into buffers that ``take`` gives, since fresh pages at every step cost more than filling them.
        """
        return KeptGradients(self.sample_gradient(module, name, saved, b, n))

    def kept_bytes(self, module: nn.Module, name: str, lead: Tensor, n: int) -> int:
        """Return what ``keep`` will hold for a call with input ``lead``, told from its shape before the backward."""
        parameter = module.get_parameter(name)
        return n * parameter.numel() * max(parameter.element_size(), 4)

    def total(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Return Σ_n g_n, ``[*shape]``: what this call gave to the parameter's gradient."""
        return self.sample_gradient(module, name, saved, b, n).sum(0)

    def shared_forward(self, module: nn.Module, args: tuple[Any, ...], observer: Observer, forced: bool) -> Tensor | None:
        """Run the layer with a backward of our own, or return None.

        None means that the rule has none for this call or, unless ``forced``, that the project form costs less.
        """
        return None


class Kept:
    """What a deferred contraction needs of one call and one parameter."""

    def contract(self, v: Tensor) -> Tensor:
        """Return ⟨g_n, v⟩, ``[n, k]``, for directions ``v`` ``[k, *shape]``."""
        raise NotImplementedError

    def rows(self) -> Tensor | None:
        """Return the rows of the parameter that can be non-zero in g_n, or None for all."""
        return None

    def total(self) -> Tensor:
        """Return Σ_n g_n, ``[*shape]``."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Return the memory that is held until the optimizer steps."""
        raise NotImplementedError


class KeptGradients(Kept):
    """Per-sample gradients, ``[n, *shape]``."""

    def __init__(self, g: Tensor) -> None:
        """Hold ``g``."""
        self.g = g

    def contract(self, v: Tensor) -> Tensor:
        """Contract by one product per direction."""
        return dot_each(self.g, v)

    def total(self) -> Tensor:
        """Add them up."""
        return self.g.sum(0)

    def nbytes(self) -> int:
        """Return the bytes of the gradients."""
        return self.g.nbytes


class KeptRowSums(Kept):
    """⟨g_n, v⟩ row by row of a parameter, ``[n, k, p]``: contracted already, but for one factor per row."""

    def __init__(self, sums: Tensor) -> None:
        """Hold the sums."""
        self.sums = sums

    def weigh(self, factors: Tensor) -> Tensor:
        """Add up the rows with their factors ``[p]``, giving ``[n, k]``."""
        return self.sums @ factors.to(self.sums.dtype)

    def nbytes(self) -> int:
        """Return the bytes of the sums."""
        return self.sums.nbytes


class KeptFactors(Kept):
    """Layer inputs and output gradients; contracted by the rule when the direction is known."""

    def __init__(self, rule: Rule, module: nn.Module, name: str, saved: Saved, b: Any, n: int) -> None:
        """Hold the tensors of one call."""
        self.rule, self.module, self.name, self.saved, self.b, self.n = rule, module, name, saved, b, n
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        b = self.b if isinstance(self.b, list) else [self.b]
        return [x._version for x in (*self.saved, *b) if isinstance(x, Tensor)]

    def check(self) -> None:
        """Raise if a kept tensor was overwritten since the backward."""
        if self.versions != self._versions():
            raise StepError(
                f"the input or output gradient of a {type(self.module).__name__} was overwritten between its backward and "
                "optimizer.step(), where "
                "its contraction had to wait; give every microbatch a tensor of its own"
            )

    def contract(self, v: Tensor) -> Tensor:
        """Contract by the rule's project form."""
        self.check()
        return self.rule.contract(self.module, self.name, self.saved, self.b, self.n, v)

    def total(self) -> Tensor:
        """Leave the sum to the rule."""
        self.check()
        return self.rule.total(self.module, self.name, self.saved, self.b, self.n)

    def nbytes(self) -> int:
        """Return the bytes of inputs and output gradients."""
        tensors = [x for x in (*self.saved, self.b) if isinstance(x, Tensor)]
        return sum(x.nbytes for x in tensors)


_rules: dict[type[nn.Module], Rule] = {}
_finders: list[Callable[[nn.Module], Rule | None]] = []
R = TypeVar("R", bound=type[Rule])


def register(*module_classes: type[nn.Module]) -> Callable[[R], R]:
    """Register a rule for module classes (and subclasses that keep their ``forward``)."""

    def add(rule: R) -> R:
        for cls in module_classes:
            _rules[cls] = rule()
        return rule

    return add


def register_finder(finder: Callable[[nn.Module], Rule | None]) -> Callable[[nn.Module], Rule | None]:
    """Register a function from a module to its rule, for classes that cannot be imported here."""
    _finders.append(finder)
    return finder


def registered() -> list[str]:
    """Return the names of the module classes that have a rule, for messages."""
    return sorted(cls.__name__ for cls in _rules)


def find_rule(module: nn.Module) -> Rule | None:
    """Return the rule for a module, or None where only the fallback can serve.

    A subclass counts only if it computes the same function: its ``forward`` is the registered class's, and
    its parameters are plain parameters (a parametrised or patched layer is another function).
    """
    cls = type(module)
    if "forward" in module.__dict__ or torch.nn.utils.parametrize.is_parametrized(module):
        return None
    for base in cls.__mro__:
        if base in _rules and cls.forward is base.forward:
            return _rules[base]
    for finder in _finders:
        rule = finder(module)
        if rule is not None:
            return rule
    return None

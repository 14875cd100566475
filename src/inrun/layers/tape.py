"""The tape: sees every torch function that the model calls, and taps those in which a parameter meets data.

Which function it is decides the rule; which module called it does not matter. So heads that are applied outside of their
module, raw parameters and custom norms are scored by the same few rules as ``nn.Linear``.

*Sources* are parameters, and tensors made of parameters and constants alone (``W.T``, ``W.to(dtype)``, ``g * v / ‖v‖``).
They are followed until they meet data; the per-sample gradients there are pulled back through their own graph.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from inrun.errors import InrunError
from inrun.layers.backward import BACKWARD, differentiate, run_backward
from inrun.layers.calls import bound, custom_leaves, run_eagerly
from inrun.layers.layout import Layout, tensors_in
from inrun.layers.shares import rule_of_masks, rule_of_spread
from inrun.layers.tap import Leaf, Observe, Rule, Source, Spread, Tap
from inrun.layers.taps import Taps
from inrun.layers.tensors import Tensors
from inrun.torch_private import functions_unseen

#: Rules by function: called with the tape and the function's arguments, they return its output, or NotImplemented to have
#: the call treated like any other.
RULES: dict[Any, Callable[..., Any]] = {}
#: Functions that treat all entries of broadcast tensors alike.
POINTWISE: set[Any] = set()

#: The kind of functions that read and set attributes of tensors.
_ATTRIBUTE = type(getattr(Tensor.grad, "__set__"))  # noqa: B009

#: Functions whose training mode mixes the samples on purpose: a score is what flows through a sample's own rows.
STATISTICS = {F.batch_norm}


def rule_for(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for functions."""

    def add(rule: Callable[..., Any]) -> Callable[..., Any]:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return add


class Tape(TorchFunctionMode):
    """Taps one microbatch at a time, between :meth:`begin` and :meth:`end`."""

    #: Tests set it, which hold rules that compute gradients against a reference in double precision.
    own_in_double = False

    def __init__(self, model: nn.Module, leaves: Iterable[Leaf], bitwise: bool = False) -> None:
        super().__init__()
        self.model, self.bitwise = model, bitwise
        self.leaves = list(leaves)
        self.tensors, self.taps = Tensors(0, (), False), Taps()
        #: Finds the layouts of taps that are not known when a backward begins, and knows those of earlier steps.
        self.layouts: Any = None
        self.active = False
        #: A backward runs to read layouts: taps only pass gradients on.
        self.probing = False
        #: ``torch.autograd.grad`` runs, whose gradients nobody is paid for.
        self.silent = False
        #: Whether an error of the row check waits until the step ends, since other processes wait for this one's backward; and it.
        self.defers = False
        self.failed: InrunError | None = None
        self._stance: AbstractContextManager[Any] | None = None

    @property
    def blind(self) -> bool:
        """Whether taps read nothing: there is no sample, the rows could not be told, or nothing is trained."""
        return self.tensors.n == 0 or self.failed is not None

    # A microbatch

    def begin(self, n: int) -> None:
        """Begin a microbatch of n samples. Compiled code calls no torch functions, so it runs eagerly until :meth:`end`."""
        self._stance = run_eagerly()
        self.active, self.failed = True, None
        documents = self.layouts.samples.documents
        self.tensors = Tensors(n, (n,) if documents is None else tuple(documents.shape), bool(self.layouts.fresh))
        self.tensors.begin(self.model, self.leaves)
        self.taps.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Tap nothing for the time of the block."""
        before, self.active = self.active, False
        try:
            with functions_unseen():
                yield
        finally:
            self.active = before

    def end(self) -> None:
        """Let go of everything that the microbatch made."""
        self.taps.clear()
        self.tensors, self.active = Tensors(0, (), False), False
        if self._stance is not None:
            self._stance.__exit__(None, None, None)
            self._stance = None

    # Functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, tapped if a source meets data in it."""
        kwargs = kwargs or {}
        if func in BACKWARD:
            return run_backward(self, func, args, kwargs)
        if func is torch.autograd.grad:
            return differentiate(self, args, kwargs)
        tensors = self.tensors
        if not torch.is_grad_enabled() or tensors.n == 0 or (type(func) is _ATTRIBUTE and func.__name__ == "__set__"):
            return func(*args, **kwargs)
        for t in (*args, *kwargs.values()):
            leaves = custom_leaves(t, tensors.sources, tensors.is_data) if isinstance(t, Tensor) else ()
            if leaves:
                tensors.derive(t, leaves)
        if tensors.meets_source(args, kwargs) and any(tensors.source(t) for t in tensors_in((args, kwargs))):
            return self._tapped(func, args, kwargs)
        out = self._untapped(func, args, kwargs)
        tensors.note(func, args, kwargs, out)
        return out

    def _untapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if func in STATISTICS:
            self.pass_rows(out)
        self.tensors.moves.see(self.tensors, func, args, kwargs, out)
        return out

    def owns(self, weight: Tensor) -> bool:
        """Whether a rule may compute a weight gradient itself, from the per-sample gradients that it forms anyway.

        In double precision it does not: next to parts in single precision, rounding of 1e-16 would become one of 1e-9.
        """
        if self.bitwise:
            return False
        source = self.tensors.sources.get(id(weight))
        tensors = [weight] if source is None else [weight, *(leaf.tensor for leaf in source.leaves)]
        return self.own_in_double or all(t.dtype != torch.float64 for t in tensors)

    def _tapped(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        found = [s for t in given if (s := self.tensors.source(t)) is not None]
        met = any(id(t) not in self.tensors.sources and self.tensors.is_data(t) for t in given)
        leaves = tuple(dict.fromkeys(leaf for s in found for leaf in s.leaves))
        if not any(leaf.reader for leaf in leaves):
            return self._untapped(func, args, kwargs) if met else self._call_derived(func, args, kwargs, leaves)
        rule = RULES.get(func)
        given_to = None if rule is None else bound(rule, args, kwargs)
        if rule is not None and given_to is not None:
            out = rule(self, met, func, *given_to[0], **given_to[1])
            if out is not NotImplemented:
                return out
        if not met:
            return self._call_derived(func, args, kwargs, leaves)
        if func in POINTWISE:
            return self._pointwise(func, args, kwargs)
        return self.generic(func, args, kwargs)

    def _call_derived(self, func: Any, args: Any, kwargs: Any, leaves: tuple[Leaf, ...]) -> Any:
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__setitem__":
            self.tensors.derive(args[0], leaves)
        return self.tensors.derive(out, leaves)

    # Taps

    def tap(
        self, func: Any, rule: Rule, targets: list[Source], given: Iterable[Tensor], shape: torch.Size, constants: Any = None
    ) -> Tap:
        """Make a tap; its layout is the one known from earlier steps, if any."""
        tap = Tap(self.taps.key(func, targets), rule, targets, self, constants, shape)
        # Of a function without a rule it is not known which dimension of an output has the samples.
        tap.reads_inputs = rule is not rule_of_masks and self.tensors.reads_inputs(given)
        moves = self.tensors.moves
        tap.moved = next((r for t in given if (r := moves.of(t)) is not None and shape[:1] == r.shape), None)
        tap.layout = self.layouts.known(tap, self.taps.recomputing) if not self.blind else Layout("all", 1)
        self.taps.add(tap)
        return tap

    def observe(
        self,
        func: Any,
        out: Tensor,
        rule: Rule,
        targets: list[Source],
        given: Iterable[Tensor],
        saved: tuple[Tensor, ...] = (),
        constants: Any = None,
        owned: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """Tap the output of a function.

        The gradients of ``owned``, the tensors of the first targets, are the sums over samples; the function was called
        with them detached.
        """
        if not (out.requires_grad or owned):
            return out
        tap = self.tap(func, rule, targets, given, out.shape, constants)
        result: Tensor = Observe.apply(out, tap, len(saved), len(owned), *saved, *owned, *tap.probes())
        tap.edge = get_gradient_edge(result)
        return result

    def spread(
        self, func: Any, source: Source, shape: torch.Size, given: Iterable[Tensor], dtype: torch.dtype | None = None
    ) -> Tensor:
        """Tap a source on its way into a function that broadcasts it to ``shape`` and works in ``dtype``."""
        tap = self.tap(func, rule_of_spread, [source], given, torch.Size(shape), source.tensor.shape)
        dtype = dtype or source.tensor.dtype
        result: Tensor = Spread.apply(source.tensor, torch.Size(shape), dtype, tap, *tap.probes())
        tap.edge = get_gradient_edge(result)
        return result

    def _pointwise(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensors_in((args, kwargs)))
        inside = getattr(func, "__name__", "")
        in_place = inside == "__setitem__" or (inside.endswith("_") and not inside.endswith("__")) or inside.startswith("__i")
        shape = args[0].shape if in_place else torch.broadcast_shapes(*(t.shape for t in given))
        wide = [t for t in given if t.dim() > 0]
        if not wide:
            return func(*args, **kwargs)  # a penalty joins the loss: no sample has a row here, which audits see
        if any(t.dim() == 0 and t.dtype != wide[0].dtype for t in given if self.tensors.source(t)):
            return self.generic(func, args, kwargs)  # a number of its own precision would become a tensor of it
        dtype = wide[0].dtype
        for t in wide:
            dtype = torch.promote_types(dtype, t.dtype)

        made = self.taps.latest
        count = len(made)

        def swapped(t: Any) -> Any:
            s = self.tensors.source(t) if isinstance(t, Tensor) else None
            return t if s is None or not s.scored else self.spread(func, s, shape, given, dtype)

        out = func(*[swapped(a) for a in args], **{k: swapped(v) for k, v in kwargs.items()})
        if not in_place and isinstance(out, Tensor) and out.shape == shape and out.requires_grad:
            for tap in made[count:]:  # rows are read at the output, from which they reach the data, too
                tap.edge = get_gradient_edge(out)
        return out

    def pass_rows(self, out: Tensor) -> None:
        """Let a function that mixes samples hand gradients on row by row while the rows are read."""
        node, tape = out.grad_fn, weakref.ref(self)
        if node is not None:
            node.register_hook(lambda new, old: (old[0], *new[1:]) if (t := tape()) is not None and t.probing else None)

    def generic(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tap a function without a rule: its own backward runs once per sample, on that sample's part of the gradient."""
        given = list(tensors_in((args, kwargs)))
        aliases: list[tuple[Source, Tensor]] = []

        def alias(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                parts = [alias(v) for v in value]
                return type(value)(parts) if type(value) in (list, tuple) else value
            s = self.tensors.source(value) if isinstance(value, Tensor) else None
            if s is None or not s.scored:
                return value
            other = value.view_as(value)
            aliases.append((s, other))
            return other

        out = func(*[alias(a) for a in args], **{k: alias(v) for k, v in kwargs.items()})
        targets, edges = [s for s, _ in aliases], [get_gradient_edge(a) for _, a in aliases]

        def tapped(value: Any) -> Any:
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    self.tensors.inputs.add(value)
                    return value
                return self.observe(func, value, rule_of_masks, targets, given, constants=(get_gradient_edge(value), edges))
            if type(value) in (list, tuple):
                return type(value)(tapped(v) for v in value)
            if isinstance(value, tuple) and hasattr(value, "_make"):
                return value._make(tapped(v) for v in value)
            return value

        return tapped(out)

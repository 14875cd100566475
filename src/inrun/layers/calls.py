"""How functions are called: eagerly, with arguments as rules take them; and tensors by identity."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from inrun.errors import StepError

if TYPE_CHECKING:
    from inrun.layers.tap import Leaf, Source

#: Nodes of the graph through which data has come.
_TAPS = ("ObserveBackward", "SpreadBackward")


class Known:
    """Tensors by identity, held weakly."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Tensor]] = {}

    def add(self, tensor: Tensor) -> None:
        """Remember a tensor."""
        refs, key = self._refs, id(tensor)
        refs[key] = weakref.ref(tensor, lambda _: refs.pop(key, None))

    def __contains__(self, tensor: object) -> bool:
        return id(tensor) in self._refs

    def clear(self) -> None:
        """Forget all."""
        self._refs.clear()


@functools.cache
def _signature(rule: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(rule)


def bound(rule: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Return arguments as a rule takes them, the function's ``input`` first; None if it does not know their names."""
    if not kwargs:
        return args, kwargs
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    try:
        _signature(rule).bind(None, None, None, *args, **kwargs)
    except TypeError:
        return None
    return args, kwargs


def custom_leaves(t: Tensor, sources: dict[int, Source], is_data: Callable[[Tensor], bool]) -> tuple[Leaf, ...]:
    """Return the parameters that a custom autograd function made a tensor of; none if its backward uses data, or it is known.

    Such functions are not seen when they are called.
    """
    if not t.requires_grad or id(t) in sources or not isinstance(t.grad_fn, BackwardCFunction):
        return ()
    if type(t.grad_fn).__name__ in _TAPS:
        return ()
    by_tensor = {id(s.tensor): leaf for s in sources.values() if s.is_leaf for leaf in s.leaves}
    found: dict[Leaf, None] = {}
    nodes, seen = [t.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if type(node).__name__ in _TAPS or (variable is not None and id(variable) not in by_tensor):
            return ()
        if isinstance(node, BackwardCFunction):
            try:
                saved = node.saved_tensors
            except RuntimeError:  # its backward has run
                return ()
            if any(isinstance(x, Tensor) and is_data(x) for x in saved):
                return ()
        if variable is not None:
            found[by_tensor[id(variable)]] = None
        nodes += [following for following, _ in node.next_functions if following is not None]
    return tuple(found)


def run_eagerly() -> AbstractContextManager[Any]:
    """Let compiled code run eagerly from now on, until the result's ``__exit__`` is called."""
    try:
        if not torch.compiler.is_compiling():
            return torch.compiler.set_stance("force_eager")
    except RuntimeError:  # torch refuses in what compiled code calls
        pass
    raise StepError("a step began inside compiled code. Open accountant.step() outside of the function that is compiled.")


def is_shared(t: Tensor, n: int, lengths: set[int]) -> bool:
    """Return whether numbers are the same for all n samples: positions ``[1, t]``, or ``[t]`` beside a batch ``[n, t]``."""
    return (t.dim() > 1 and len(t) == 1) or (t.dim() == 1 and len(t) != n and len(t) in lengths)

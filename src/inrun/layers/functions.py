"""Functions that broadcast, and functions of ``torch.nn.functional`` that are made of others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inrun.layers.layout import tensors_in
from inrun.layers.tap import opened
from inrun.layers.tape import POINTWISE, Tape, rule_for
from inrun.layers.tensors import LIKE

_NAMES = (
    "add sub mul div true_divide divide multiply subtract rsub pow float_power maximum minimum fmax fmin lerp addcmul addcdiv "
    "where atan2 hypot logaddexp copysign xlogy heaviside"
)
_OPERATORS = "add sub mul truediv pow"


def _pointwise() -> set[Any]:
    found = set()
    for name in _NAMES.split():
        for space in (torch, Tensor):
            found |= {getattr(space, n) for n in (name, f"{name}_") if hasattr(space, n)}
    for name in _OPERATORS.split():
        found |= {getattr(Tensor, f"__{kind}{name}__") for kind in ("", "r", "i") if hasattr(Tensor, f"__{kind}{name}__")}
    return found


POINTWISE |= _pointwise()


@rule_for(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, Tensor.expand_as)
def tap_expand(tape: Tape, met: bool, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A tensor that is expanded to one row per sample meets data there."""
    source = tape.tensors.source(x)
    if source is None or not source.scored:
        return NotImplemented
    with torch.no_grad():
        shape = func(x.detach(), *args, **kwargs).shape
    grows = len(shape) > 0 and shape[0] == tape.tensors.n and (len(shape) > x.dim() or x.shape[0] != tape.tensors.n)
    return tape.spread(func, source, shape, (x,)) if grows and tape.tensors.n > 1 else NotImplemented


@rule_for(*LIKE - {Tensor.expand_as})
def tap_like(tape: Tape, met: bool, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of the other tensor, only precision, place or shape are used."""
    source = tape.tensors.source(x)
    return NotImplemented if source is None else tape.tensors.derive(func(x, *args, **kwargs), source.leaves)


@rule_for(Tensor.repeat, torch.tile, Tensor.tile)
def tap_repeat(tape: Tape, met: bool, func: Any, x: Tensor, *sizes: Any) -> Any:
    """The same for ``repeat`` along a new or single first dimension."""
    source = tape.tensors.source(x)
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list, torch.Size)) else sizes
    n = tape.tensors.n
    if source is None or not source.scored or n == 1 or not sizes or sizes[0] != n or len(sizes) < x.dim():
        return NotImplemented
    if len(sizes) == x.dim() and x.shape[0] != 1:
        return NotImplemented
    wide = x if len(sizes) > x.dim() else x.squeeze(0)
    tape.tensors.sources.setdefault(id(wide), type(source)(wide, source.leaves))
    rest = wide if all(size == 1 for size in sizes[1:]) and len(sizes) - 1 <= wide.dim() else wide.repeat(*sizes[1:])
    tape.tensors.sources.setdefault(id(rest), type(source)(rest, source.leaves))
    return tape.spread(func, tape.tensors.sources[id(rest)], torch.Size((n, *rest.shape)), (x,)).clone()


@rule_for(Tensor.copy_)
def tap_copy(tape: Tape, met: bool, func: Any, x: Tensor, other: Tensor, *rest: Any) -> Any:
    """Writing a parameter into data."""
    source = tape.tensors.source(other)
    if not met or source is None or not source.scored:
        return NotImplemented
    return func(x, tape.spread(func, source, x.shape, (x,)), *rest)


@rule_for(Tensor.__getitem__)
def tap_getitem(tape: Tape, met: bool, func: Any, x: Tensor, index: Any) -> Any:
    """Choosing one expert's matrix by a number of the data is no use of data."""
    source = tape.tensors.source(x)
    chosen = list(tensors_in(index if isinstance(index, tuple) else (index,)))
    if not met or source is None or any(t.dim() > 0 for t in chosen):
        return NotImplemented
    return tape.tensors.derive(func(x, index), source.leaves)


@rule_for(Tensor.__setitem__)
def tap_setitem(tape: Tape, met: bool, func: Any, x: Tensor, index: Any, value: Any) -> Any:
    """Writing a parameter into rows of data."""
    source = tape.tensors.source(value)
    has_rows = isinstance(x, Tensor) and tape.tensors.n > 1 and x.shape[:1] == (tape.tensors.n,)
    if not (met or has_rows) or source is None or not source.scored:
        return NotImplemented
    with torch.no_grad():
        shape = x.detach()[index].shape
    return func(x, index, tape.spread(func, source, shape, (x,)))


_OPENED = {F.multi_head_attention_forward: opened(F.multi_head_attention_forward)}


@rule_for(*_OPENED)
def tap_opened(tape: Tape, met: bool, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function that is made of others with the tape on."""
    if not met:
        return NotImplemented
    with tape:
        return _OPENED[func](*args, **kwargs)

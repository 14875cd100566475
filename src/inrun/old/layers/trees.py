"""Arguments and outputs of modules as trees: the tensors in them, whatever they are wrapped in.

Containers are opened by torch's own registry (lists, dicts, named tuples, outputs of transformers); mappings, dataclasses and
plain objects with tensors in their attributes are opened too, and rebuilt as shallow copies.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from inrun.torch_private import flatten_tree, unflatten_tree

#: Things whose attributes are none of a batch's business.
_CLOSED = (
    str,
    bytes,
    int,
    float,
    bool,
    complex,
    type(None),
    type,
    FunctionType,
    MethodType,
    ModuleType,
    nn.Module,
    torch.Generator,
)


@dataclasses.dataclass
class _Opened:
    """How to put an object together again: a shallow copy whose attributes (or items) are replaced."""

    original: Any
    names: list[Any]
    as_mapping: bool
    inner: list[tuple[int, Any]]


def _attributes(x: Any) -> dict[Any, Any] | None:
    """Return the items or attributes of an object that may hold tensors; None where it is a leaf."""
    if isinstance(x, (Tensor, *_CLOSED)):
        return None
    if isinstance(x, Mapping):
        return dict(x)
    if dataclasses.is_dataclass(x):
        return {f.name: getattr(x, f.name) for f in dataclasses.fields(x)}
    found = dict(getattr(x, "__dict__", {}))
    for cls in type(x).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(x, name) and not name.startswith("__"):
                found[name] = getattr(x, name)
    return found or None


def flatten(tree: Any, depth: int = 6) -> tuple[list[Any], Any]:
    """Return the leaves of a tree and what :func:`unflatten` needs to rebuild it."""
    outer, structure = flatten_tree(tree)
    leaves: list[Any] = []
    inner: list[tuple[int, Any]] = []
    for x in outer:
        attributes = _attributes(x) if depth else None
        if attributes is not None:
            below, rebuild = flatten(list(attributes.values()), depth - 1)
            if any(isinstance(leaf, Tensor) for leaf in below):
                leaves += below
                inner.append((len(below), _Opened(x, list(attributes), isinstance(x, Mapping), rebuild)))
                continue
        leaves.append(x)
        inner.append((1, None))
    return leaves, (structure, inner)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Rebuild a tree from leaves."""
    outer_structure, inner = structure
    outer, place = [], 0
    for count, opened in inner:
        some = leaves[place : place + count]
        place += count
        outer.append(some[0] if opened is None else _rebuild(opened, unflatten(some, opened.inner)))
    return unflatten_tree(outer, outer_structure)


def _rebuild(opened: _Opened, values: list[Any]) -> Any:
    made = copy.copy(opened.original)
    for name, value in zip(opened.names, values, strict=True):
        if opened.as_mapping:
            made[name] = value
        else:
            object.__setattr__(made, name, value)  # frozen dataclasses too
    return made


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree."""
    return (x for x in flatten(tree)[0] if isinstance(x, Tensor))


def float_tensors(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, in order."""
    return [x for x in tensors_of(tree) if x.is_floating_point()]


def replace_float_tensors(tree: Any, new: Iterator[Tensor]) -> Any:
    """Return a tree with its floating-point tensors replaced, in order."""
    leaves, structure = flatten(tree)
    swapped = [next(new) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    return unflatten(swapped, structure)

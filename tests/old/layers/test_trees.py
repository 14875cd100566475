"""Tensors are found and replaced whatever they are wrapped in."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inrun.old.layers.trees import flatten, float_tensors, replace_float_tensors, tensors_of, unflatten

Pair = namedtuple("Pair", ["a", "b"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    name: str = "x"


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


TREES: list[Any] = [
    lambda x: (x, {"a": [x]}),
    lambda x: Pair(x, 3),
    lambda x: UserDict({"ids": x, "n": 3}),
    lambda x: Frozen(x),
    lambda x: Slotted(x),
    lambda x: SimpleNamespace(inner=[Frozen(x)], other=None),
]


@pytest.mark.parametrize("make", TREES)
def test_found_and_rebuilt(make: Any) -> None:
    x = torch.ones(2)
    tree = make(x)
    assert any(t is x for t in tensors_of(tree))
    leaves, structure = flatten(tree)
    again = unflatten([leaf + 1 if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)
    assert type(again) is type(tree)
    assert all(torch.equal(t, x + 1) for t in tensors_of(again))
    assert all(torch.equal(t, x) for t in tensors_of(tree))  # the original is untouched


def test_models_and_functions_are_closed() -> None:
    assert not list(tensors_of([nn.Linear(2, 2), float_tensors, "text", None, 3]))


def test_only_floating_point_outputs_are_replaced() -> None:
    tree = {"logits": torch.ones(2), "ids": torch.ones(2, dtype=torch.long)}
    new = replace_float_tensors(tree, iter([torch.zeros(2)]))
    assert torch.equal(new["logits"], torch.zeros(2))
    assert new["ids"] is tree["ids"]

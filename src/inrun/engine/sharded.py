"""Hooks on models whose parameters ``fully_shard`` splits over processes, and validation passes through them.

Weights, gradients, optimizer state, A, q and directions are those of the local rows. In a forward, whole parameters stand for the
split ones: the tape is told of them when a module is entered. ⟨g_n, v⟩ needs v whole: it is gathered in the backward, for one
module at a time, when ``fully_shard`` gathers that module's parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.flat import local
from inrun.engine.parameters import Parameters
from inrun.engine.shards import Gathered
from inrun.layers.tap import Leaf, Source
from inrun.layers.tape import Tape
from inrun.torch_private import fsdp_groups, fsdp_parameters, tree_leaves


class ShardedModel:
    """Hooks on the modules that ``fully_shard`` was applied to, and passes through them."""

    def __init__(self, model: nn.Module, parameters: Parameters, tape: Tape) -> None:
        self.model, self.tape = model, tape
        self._directions: Gathered | None = None
        leaves: dict[Tensor, Leaf] = {leaf.parameter: leaf for leaf in parameters.leaves}
        place = {s.parameter: s.place for s in parameters.scored}
        #: By module: split parameters with their leaf and what tells the whole one, and the places of what is scored.
        self._held: dict[nn.Module, list[tuple[Leaf | None, Any]]] = {}
        self._places: dict[nn.Module, list[int]] = {}
        self._hooks: list[Any] = []
        names = {}
        for name, module in model.named_modules():
            if not hasattr(module, "_get_fsdp_state"):
                continue
            held = fsdp_parameters(module, recurse=False)
            self._held[module] = [(leaves.get(p), whole) for p, whole in held.items()]
            self._places[module] = [place[p] for p in held if p in place]
            names[module] = f"{name}." if name else ""
        #: The places of a module's parameters and of those around it.
        self._around = {
            m: {i for o, around in names.items() if name.startswith(around) for i in self._places[o]} for m, name in names.items()
        }

    def begin(self, directions: Any) -> None:
        """Begin a microbatch, which contracts with directions.

        Between microbatches no module has hooks of ours, so compiled code does not know of them.
        """
        self._directions = directions if isinstance(directions, Gathered) else None
        for module in self._held:
            self._hooks += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def end(self) -> None:
        """End a microbatch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._directions = [], None

    # Forward and backward

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Tell the tape which tensors stand for the split parameters of a module."""
        if not self.tape.active:
            return
        for leaf, whole_of in self._held[module]:
            whole = whole_of()
            if whole is None:
                continue
            if leaf is None:
                self.tape.tensors.constants.add(id(whole))
            else:
                leaf.tensor = whole
                self.tape.tensors.sources[id(whole)] = Source(whole, (leaf,))

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        """Gather the directions of a module when its backward begins."""
        if not (self.tape.active and torch.is_grad_enabled() and self._places[module]):
            return
        model, key = weakref.ref(self), module

        def begin(g: Tensor) -> None:
            found = model()
            if found is not None and found.tape.active and not found.tape.probing:
                found._begin_backward(key)

        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.requires_grad:
                t.register_hook(begin)

    def _begin_backward(self, module: nn.Module) -> None:
        if self._directions is not None:
            self._directions.drop(self._around[module])
            self._directions.gather(self._places[module])


class ShardedPasses:
    """Validation passes through a model that is split: they gather and average as training does."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Let a pass gather parameters as they are now, and the next one as they are then."""
        self.reshard()
        yield
        self.reshard()

    def reshard(self) -> None:
        """Let go of whole parameters."""
        for module in self.model.modules():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()  # type: ignore[operator]

    @contextlib.contextmanager
    def _averaging(self) -> Iterator[None]:
        """Let backwards average gradients over all ranks, and put ``.grad`` back."""
        # Not model.parameters(): while a parameter is whole, its module has the one that stands for it.
        held = [(p, p.grad) for p in fsdp_parameters(self.model)]
        names = ("reduce_grads", "all_reduce_grads", "gradient_divide_factor")
        groups = [(g, {name: getattr(g, name) for name in names if hasattr(g, name)}) for g in fsdp_groups(self.model)]
        for g, before in groups:
            for name in before:
                setattr(g, name, None if name == "gradient_divide_factor" else True)
        try:
            yield
        finally:
            for p, grad in held:
                p.grad = grad
            for g, before in groups:
                for name, value in before.items():
                    setattr(g, name, value)

    def gradients(self, point: Tensor, parameters: Sequence[Tensor], last: bool) -> list[Tensor | None]:
        """Return the local rows of the gradients of a loss, the mean over ranks; ``.grad`` stays as it was."""
        with self._averaging():
            for p in fsdp_parameters(self.model):
                p.grad = None
            point.backward(retain_graph=not last)  # type: ignore[no-untyped-call]
            return [None if p.grad is None else local(p.grad).clone() for p in parameters]

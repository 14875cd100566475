"""Models whose parameters ``fully_shard`` splits over processes: every rank holds some rows of every tensor.

Weights, gradients, optimizer state, A, q and directions are those of the local rows. In a forward, whole parameters stand for the
split ones: the tape is told of them when a module is entered. ⟨g_n, v⟩ needs v whole: it is gathered in the backward, for one
module at a time, when ``fully_shard`` gathers that module's parameters.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from inrun.engine.parameters import Parameters
from inrun.engine.processes import Processes
from inrun.layers.tap import Leaf, Source
from inrun.layers.tape import Tape
from inrun.torch_private import fsdp_groups, fsdp_parameters


def local(x: Tensor) -> Tensor:
    """Return what is here of a tensor: its rows of this rank where it is split."""
    if not hasattr(x, "to_local"):
        return x
    with torch.no_grad():
        found: Tensor = x.to_local()
        return found


@dataclass(frozen=True)
class Shard:
    """Which entries of a tensor are here: as many rows on every rank, but for the last ones."""

    shape: torch.Size
    rank: int
    world: int

    @property
    def rows(self) -> int:
        """Return the rows per rank."""
        return -(-self.shape[0] // self.world)

    @property
    def padded(self) -> int:
        """Return the entries per rank, filled up."""
        return self.rows * self.shape[1:].numel()

    @property
    def part(self) -> slice:
        """Return the local entries of the flat tensor."""
        first = min(self.rank * self.padded, self.shape.numel())
        return slice(first, min(first + self.padded, self.shape.numel()))

    def embed(self, x: Tensor) -> Tensor:
        """Return local entries ``[k, ...]`` in their place in whole tensors of zeros, ``[k, *shape]``."""
        found = torch.zeros(len(x), self.shape.numel(), dtype=x.dtype, device=x.device)
        found[:, self.part] = x.reshape(len(x), -1)
        return found.view(len(x), *self.shape)


class Gathered(Mapping[int, Tensor]):
    """Directions ``[k, *shape]`` by place, of which each rank has its rows; whole ones are there while they are needed."""

    def __init__(self, local_ones: dict[int, Tensor], shards: dict[int, Shard], processes: Processes) -> None:
        self._local, self._shards, self._processes = local_ones, shards, processes
        self._whole: dict[int, Tensor] = {}

    def __getitem__(self, place: int) -> Tensor:
        if place not in self._whole:
            self.gather([place])
        return self._whole[place]

    def __contains__(self, place: object) -> bool:
        return place in self._local

    def __iter__(self) -> Iterator[int]:
        return iter(self._local)

    def __len__(self) -> int:
        return len(self._local)

    @torch.no_grad()
    def gather(self, places: Sequence[int]) -> None:
        """Gather some of them in one call; all ranks do it together."""
        missing = [i for i in places if i in self._local and i not in self._whole]
        if not missing:
            return
        parts = []
        for i in missing:
            x = self._local[i].flatten(1)
            parts.append(torch.nn.functional.pad(x, (0, self._shards[i].padded - x.shape[1])).reshape(-1))
        found = self._processes.all_gather("directions", torch.cat(parts))
        sizes = [len(p) for p in parts]
        for i, part in zip(missing, found.split(sizes, 1), strict=True):
            k, shape = len(self._local[i]), self._shards[i].shape
            whole = part.view(len(found), k, -1).transpose(0, 1).reshape(k, -1)
            self._whole[i] = whole[:, : shape.numel()].view(k, *shape)

    def drop(self, kept: set[int]) -> None:
        """Let go of whole ones but for some."""
        self._whole = {i: x for i, x in self._whole.items() if i in kept}


class ShardedModel:
    """Hooks on the modules that ``fully_shard`` was applied to, and passes through them."""

    def __init__(self, model: nn.Module, parameters: Parameters, processes: Processes, tape: Tape) -> None:
        self.model, self.processes, self.tape = model, processes, tape
        self.shards = {s.place: Shard(s.parameter.shape, processes.rank, processes.world) for s in parameters.scored}
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

    def begin(self) -> None:
        """Begin a microbatch. Between microbatches no module has hooks of ours, so compiled code does not know of them."""
        for module in self._held:
            self._hooks += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def end(self) -> None:
        """End a microbatch."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._directions is not None:
            self._directions.drop(set())

    # Forward and backward

    def directions(self, some: dict[int, Tensor]) -> Gathered:
        """Return directions for the next backward, of which the local rows are given."""
        self._directions = Gathered(some, self.shards, self.processes)
        return self._directions

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Tell the tape which tensors stand for the split parameters of a module."""
        if not self.tape.active:
            return
        for leaf, whole_of in self._held[module]:
            whole = whole_of()
            if whole is None:
                continue
            if leaf is None:
                self.tape.constants.add(id(whole))
            else:
                leaf.tensor = whole
                self.tape.sources[id(whole)] = Source(whole, (leaf,))

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

    # Validation

    def reshard(self) -> None:
        """Let go of whole parameters: the next pass gathers them as they are then."""
        for module in self._held:
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

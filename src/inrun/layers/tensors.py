"""What is known of the tensors of one microbatch: which are made of parameters, which depend on the samples, which do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from inrun.layers.calls import Known, is_shared
from inrun.layers.layout import tensors_in
from inrun.layers.moves import Moves
from inrun.layers.tap import Leaf, Source
from inrun.torch_private import storage_of

#: Functions that take only precision, place or shape of their second tensor.
LIKE = {Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as, Tensor.expand_as}


class Tensors:
    """Tensors by identity. *Sources* are parameters, and what was made of parameters and constants alone."""

    def __init__(self, n: int, lead: tuple[int, ...], follows: bool) -> None:
        #: The number of samples, and the sizes that begin the shape of a batch: n, or rows and positions of packed documents.
        self.n, self.lead = n, lead
        #: Whether rows are read anew, and what the model does to its inputs before is followed.
        self.follows = follows
        self.sources: dict[int, Source] = {}
        self.constants: set[int] = set()
        #: Tensors without gradient that depend on the samples, and those that do not.
        self.inputs, self.made = Known(), Known()
        #: The strides between samples in the model's inputs, by storage.
        self.strides: dict[int, tuple[int, ...]] = {}
        self.moves = Moves()

    def begin(self, model: nn.Module, leaves: Iterable[Leaf]) -> None:
        """Note the parameters that are trained, and what is constant."""
        trained = [leaf for leaf in leaves if leaf.tensor.requires_grad]  # others are frozen for a while
        self.sources = {id(leaf.tensor): Source(leaf.tensor, (leaf,)) for leaf in trained}
        frozen = [p for p in model.parameters() if not p.requires_grad]
        self.constants = {id(t) for t in (*frozen, *model.buffers())}

    def take_inputs(self, values: Any) -> None:
        """Note tensors that are given to the model: row i of a batch is sample i, wherever it came from."""
        self.moves.clear()
        given, packed = list(tensors_in(values)), len(self.lead) > 1
        lengths = {t.shape[1] for t in given if t.dim() > 1 and len(t) == self.n}
        for t in given:
            if id(t) in self.constants:
                continue
            if not packed and self.n > 1 and not t.is_floating_point() and is_shared(t, self.n, lengths):
                self.made.add(t)
            else:
                self.inputs.add(t)
                if self._has_rows(t) and t.layout is torch.strided:
                    self.strides[storage_of(t)] = self._stride(t)

    # Sources

    def source(self, t: Any) -> Source | None:
        """Return the source that a tensor is, if any; a parameter that is frozen for a while is none."""
        source = self.sources.get(id(t))
        return source if source is not None and source.tensor.requires_grad else None

    def meets_source(self, args: Any, kwargs: Any) -> bool:
        """Whether a source may be among the arguments of a function."""
        sources = self.sources
        for a in args:
            if id(a) in sources:
                return True
            if type(a) in (list, tuple) and any(id(x) in sources for x in a):
                return True
        return bool(kwargs) and any(id(t) in sources for t in tensors_in(kwargs))

    def derive(self, out: Any, leaves: tuple[Leaf, ...]) -> Any:
        """Note tensors that are made of parameters and constants; return them."""
        for t in tensors_in(out):
            if t.requires_grad and id(t) not in self.sources:
                self.sources[id(t)] = Source(t, leaves)
            elif not t.requires_grad and t not in self.inputs:
                self.made.add(t)
        return out

    # Data

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note whether what a function made without gradient depends on the samples."""
        if isinstance(out, Tensor) and not out.requires_grad:
            (self.inputs if self._depends(func, args, kwargs) else self.made).add(out)
        elif isinstance(out, (tuple, list)):
            for t in out:
                if isinstance(t, Tensor) and not t.requires_grad:
                    (self.inputs if self._depends(func, args, kwargs) else self.made).add(t)

    def _depends(self, func: Any, args: Any, kwargs: Any) -> bool:
        given = args[:1] if func in LIKE else (args, kwargs)
        return any(self.is_data(t) for t in tensors_in(given))

    def is_data(self, t: Tensor) -> bool:
        """Whether a tensor that is no source depends on the samples."""
        if t.requires_grad:
            return id(t) not in self.sources
        if t in self.inputs:
            return True
        if t in self.made or id(t) in self.constants or id(t) in self.sources:
            return False
        return t.dim() > 0 and self.n in t.shape[:2]  # made before the step: data, if it has a row per sample

    def reads_inputs(self, given: Iterable[Tensor]) -> bool:
        """Whether one of a function's arguments is an input of the model with a row per sample, in order."""
        return any(
            self._has_rows(t) and (self.strides.get(storage_of(t)) == self._stride(t) or self._is_given(t))
            for t in given
            if id(t) not in self.sources
        )

    def _has_rows(self, t: Tensor) -> bool:
        """Whether a tensor may have the samples first: its rows, or the positions of packed documents."""
        return tuple(t.shape[: len(self.lead)]) == self.lead

    def _stride(self, t: Tensor) -> tuple[int, ...]:
        """Return how the samples lie in memory."""
        return tuple(step for step, size in zip(t.stride()[: len(self.lead)], t.shape, strict=False) if size > 1)

    def _is_given(self, t: Tensor) -> bool:
        """Whether data with a row per sample was made before the step, by the loop, and lies as it was made."""
        seen = t.requires_grad or t in self.inputs or t in self.made or id(t) in self.constants
        return not seen and t.is_contiguous()

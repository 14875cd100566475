"""Packed documents: several samples in one row of a batch, so that a sample is a run of positions instead of a row.

Rules see samples as rows, ``[n, t, features]``. For a packed batch the positions are laid out anew, in the backward: every
document is cut into *chunks* of one length, and the chunks are the rows, ``[chunks, length, features]``, filled up with positions
without gradient. What comes out for the chunks of a document is added up, since everything a shape can be asked for is linear
in the positions. Chunks, because documents padded to the longest one could take many times the memory of the batch.

Only for layers that treat every position by itself (``LayerRule.positionwise``). Letters as in ``shapes``; U documents.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.old.layers.fallback import RecordedCall, Replay
from inrun.old.layers.layout import SCRATCH_BYTES
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.running import shared_outer
from inrun.old.layers.shapes import Formed, GradientShape, LookUp, Outer, Parts
from inrun.old.layers.sketch import SketchPlan


@dataclass(frozen=True)
class Packing:
    """How the documents of a batch ``[rows, length]`` lie, in plain numbers; the places are in a tensor beside it.

    ``places`` is ``[chunks, 1 + chunk_length]``: the document of the chunk, then its positions in ``[rows · length]``, −1 where it
    is filled up.
    """

    rows: int
    length: int
    documents: int
    chunks: int
    chunk_length: int

    def features(self, shape: torch.Size) -> torch.Size | None:
        """Return what follows the positions in a shape: ``[rows, length, ...]`` or ``[rows · length, ...]``; None if neither."""
        if len(shape) > 1 and shape[0] == self.rows and shape[1] == self.length:
            return shape[2:]
        return shape[1:] if len(shape) > 0 and shape[0] == self.rows * self.length else None

    def by_position(self, x: Tensor) -> Tensor:
        """View a tensor as ``[rows · length, ...]``."""
        features = self.features(x.shape)
        assert features is not None, f"a tensor of shape {tuple(x.shape)} has no positions of {self}"
        return x.reshape(self.rows * self.length, *features)

    def in_chunks(self, x: Tensor, places: Tensor) -> Tensor:
        """Lay positions out as ``[chunks, chunk_length, ...]``; where a chunk is filled up stands some other position."""
        flat = self.by_position(x)
        picked = flat.index_select(0, places[:, 1:].clamp(min=0).reshape(-1))
        return picked.view(self.chunks, self.chunk_length, *flat.shape[1:])

    def _stand_ins(self, inputs: tuple[Tensor, ...], groups: int, length: int) -> tuple[Tensor, ...]:
        """Return tensors that take no memory, as if positions were laid out as ``[groups, length, ...]``."""
        return tuple(x.new_empty(()).expand(groups, length, *(self.features(x.shape) or ())) for x in inputs)

    # What a rule tells of itself, for documents

    def gradients(
        self, rule: LayerRule, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, places: Tensor, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Map the inputs of a call and its output gradient to the shapes of its documents' gradients."""
        laid = self.in_chunks(b, places)
        filled = (places[:, 1:] < 0).view(self.chunks, self.chunk_length, *(1,) * (laid.dim() - 2))
        laid = laid.masked_fill_(filled, 0.0)
        found = rule.gradients(constants, tuple(self.in_chunks(x, places) for x in inputs), laid, self.chunks, names)
        return {name: packed(shape, places[:, 0], self.documents) for name, shape in found.items()}

    def kept_as(
        self, rule: LayerRule, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype
    ) -> tuple[type[GradientShape], Parts]:
        """Tell as which tensors gradients are kept: formed by document, or factors by chunk."""
        length = self.chunks * self.chunk_length // self.documents  # of a document, on average
        kind, parts = rule.kept_as(
            constants, name, parameter, self._stand_ins(inputs, self.documents, length), dtype, self.documents
        )
        if kind.summable:
            return kind, parts
        return rule.kept_as(constants, name, parameter, self._stand_ins(inputs, self.chunks, self.chunk_length), dtype, self.chunks)

    def sketched_as(self, rule: LayerRule, plan: SketchPlan, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Parts:
        """Tell as which tensors a sketch leaves: rows of a look-up by chunk, all else by document."""
        parts = rule.sketched_as(plan, self._stand_ins(inputs, self.chunks, self.chunk_length), dtype, self.chunks)
        return parts if rule.sparse else tuple(((self.documents, *shape[1:]), kind) for shape, kind in parts)


def add_up(x: Tensor, owner: Tensor, documents: int) -> Tensor:
    """Add up what belongs to the chunks of a document: ``[chunks, ...]`` to ``[documents, ...]``."""
    if len(x) == documents:  # every document has a chunk, in order
        return x
    return x.new_zeros(documents, *x.shape[1:]).index_add_(0, owner, x)


def packed(shape: GradientShape, owner: Tensor, documents: int) -> GradientShape:
    """Turn the gradients of chunks into those of documents; ``owner`` ``[chunks]`` tells the document of each."""
    if isinstance(shape, Formed):
        return Formed(add_up(shape.form(), owner, documents))
    return Packed(shape, owner, documents)


class Packed(GradientShape):
    """g_u = Σ g_c over the chunks c of document u, with the gradients of the chunks in a shape of their own."""

    def __init__(self, inner: GradientShape, owner: Tensor, documents: int) -> None:
        """``owner`` ``[chunks]`` tells the document of each chunk."""
        self.inner, self.owner, self.documents = inner, owner, documents

    def _sum(self, x: Tensor) -> Tensor:
        return add_up(x, self.owner, self.documents)

    def contract(self, v: Tensor) -> Tensor:
        """Contract chunks and add up."""
        return self._sum(self.inner.contract(v))

    def contract_by_rows(self, v: Tensor) -> Tensor:
        """Contract chunks and add up."""
        return self._sum(self.inner.contract_by_rows(v))

    def total(self) -> Tensor:
        """All chunks."""
        return self.inner.total()

    def total_and_contract(self, v: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
        """From the same products, chunk by chunk."""
        total, c = self.inner.total_and_contract(v, by_rows)
        return total, self._sum(c)

    def touched(self) -> Tensor | None:
        """Those of the chunks."""
        return self.inner.touched()

    def contract_touched(self, rows: Tensor, v: Tensor) -> Tensor:
        """Contract chunks and add up."""
        return self._sum(self.inner.contract_touched(rows, v))

    def form(self) -> Tensor:
        """Form chunks and add up."""
        return self._form(None)

    def _form(self, buffer: Tensor | None) -> Tensor:
        """Form some chunks of matrices at a time, so that all of them are never there at once."""
        if not isinstance(self.inner, Outer):
            return self._sum(self.inner.form())
        x, y = self.inner.x, self.inner.y
        shape, dtype = (self.documents, x.shape[2], y.shape[2]), torch.promote_types(x.dtype, y.dtype)
        fits = buffer is not None and buffer.shape == shape and buffer.dtype == dtype
        made = buffer.zero_() if buffer is not None and fits else x.new_zeros(shape, dtype=dtype)
        piece = max(1, SCRATCH_BYTES // max(made[:1].nbytes, 1))
        for at in range(0, len(x), piece):
            some = slice(at, at + piece)
            made.index_add_(0, self.owner[some], Outer(x[some], y[some]).form())
        return made

    def segment_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Sums of segments are linear, too."""
        return self._sum(self.inner.segment_sums(signs, plan))

    def form_rows(self, rows: Tensor) -> Tensor:
        """Form the rows of a document in all of its chunks, and add up."""
        return self._sum(self.inner.form_rows(rows[self.owner]))

    def sketch(self, signs: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, ...]:
        """Rows of a look-up stay by chunk; else the heaviest rows are those of documents."""
        if isinstance(self.inner, LookUp):
            return self.inner.sketch(signs, weights, plan)
        return super().sketch(signs, weights, plan)

    def total_and_sketch(
        self, v: Tensor | None, signs: Tensor, weights: Tensor, plan: SketchPlan
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """From the same products where the chunks have some."""
        if v is None or not isinstance(self.inner, Outer):
            return super().total_and_sketch(v, signs, weights, plan)
        total, c, z = shared_outer(self.inner.x, self.inner.y, v, signs=signs, segment=plan.segment)
        assert z is not None
        return total, self._sum(c), self.bucketed(self._sum(z), signs, weights, plan)

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Form the gradients of documents, or keep the factors of chunks."""
        if kind is Formed:
            return self.inner.keep(kind, buffer) if len(self.owner) == self.documents else Formed(self._form(buffer))
        return Packed(self.inner.keep(kind), self.owner, self.documents)

    def parts(self) -> tuple[Tensor, ...]:
        """Those of the chunks."""
        return self.inner.parts()


class PackedReplay(Replay):
    """The gradients of documents of one parameter of a module that is run again.

    Its outputs have positions: document u has Σ b ∘ (∂f/∂θ · v) over its positions, ``unit`` ``[rows · length]`` (−1: nobody's).
    """

    def __init__(
        self,
        call: RecordedCall,
        name: str,
        b: list[Tensor | None],
        packing: Packing,
        unit: Tensor,
        quietly: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Hold the call, its output gradients and whose positions they are."""
        super().__init__(call, name, b, packing.documents, quietly)
        self.packing, self.unit = packing, unit

    def _contract_outputs(self, tangents: tuple[Tensor, ...]) -> Tensor:
        """Add up Σ b ∘ tangent by document, ``[U]``."""
        count = self.packing.rows * self.packing.length
        pairs = [(tangent, b) for tangent, b in zip(tangents, self.b, strict=True) if b is not None]
        summed = torch.stack([(tangent * b).reshape(count, -1).sum(1) for tangent, b in pairs]).sum(0)
        owned = self.unit >= 0
        return summed.new_zeros(self.n).index_add_(0, self.unit[owned], summed[owned])

    def _gradients_of(self, sample: int) -> dict[int, Tensor]:
        """Return the output gradients, by place, without those of other documents."""
        mine = (self.unit == sample).unsqueeze(1)
        return {i: (b.reshape(len(mine), -1) * mine).view(b.shape) for i, b in enumerate(self.b) if b is not None}

    def _form_each(self) -> Tensor:
        """Pull the output gradients of one document at a time back through the call, ``[U, *shape]``."""
        parameter = self.call.module.get_parameter(self.name).detach()

        def run(value: Tensor) -> tuple[Tensor, ...]:
            outs = self.call.run({self.name: value})
            return tuple(out for out, b in zip(outs, self.b, strict=True) if b is not None)

        outs, pull = torch.func.vjp(run, parameter)[:2]
        self.call.check_outputs(dict(zip((i for i, b in enumerate(self.b) if b is not None), outs, strict=True)))

        def one_document(number: Tensor) -> Tensor:
            mine = (self.unit == number).unsqueeze(1)
            parts = [(b.reshape(len(mine), -1) * mine).view(b.shape) for b in self.b if b is not None]
            (g,) = pull(tuple(parts))
            return g  # type: ignore[no-any-return]

        return torch.func.vmap(one_document, chunk_size=16)(torch.arange(self.n, device=self.unit.device))

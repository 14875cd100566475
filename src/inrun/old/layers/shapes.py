"""The shapes that per-sample gradients come in, and what can be done with each without forming more than it needs.

A layer maps its inputs and the gradient at its output to one shape per parameter:

``Outer``   g_n = Σ_t x_nt y_ntᵀ: a matrix that is never formed unless that is smaller
``Formed``  g_n itself, ``[n, *shape]``: norms, biases, whatever is small
``LookUp``  rows of a table: g_n[w] = Σ_t [token_nt = w] b_nt

(``fallback.Replay``, for modules without a rule, is the fourth.) Letters: n samples, t positions, k validation sets.
A shape knows how to contract itself with directions, to add itself up, to be kept for later and to be sketched.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from inrun.errors import CoverageError
from inrun.old.layers.layout import SCRATCH_BYTES, dot_each, row_dots, scratch_like, sum_positions
from inrun.old.layers.running import added_up, contract_formed, shared_outer
from inrun.old.layers.sketch import SketchPlan, as_bits, fold, from_bits, heaviest_rows, rows_apart, segment_sums

#: A product of a formed gradient with a direction takes as long as so many positions do where it is formed.
FORMED_DOTS = 4
#: Shapes and dtypes of the tensors that a kept gradient leaves the backward as, told before there is any.
Parts = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class GradientShape:
    """The per-sample gradients of one parameter in one call."""

    #: Whether parts of several calls may be added up (formed gradients may, factors may not).
    summable: ClassVar[bool] = False

    def contract(self, v: Tensor) -> Tensor:
        """Return ⟨g_n, v⟩, ``[n, k]``, for directions ``v`` ``[k, *shape]``."""
        raise NotImplementedError

    def contract_by_rows(self, v: Tensor) -> Tensor:
        """Return ⟨g_n, v⟩ row by row of the parameter, ``[n, k, p]``."""
        raise NotImplementedError(f"{type(self).__name__} does not contract row by row")

    def total(self) -> Tensor:
        """Return Σ_n g_n, ``[*shape]``: the parameter's gradient."""
        raise NotImplementedError

    def total_and_contract(self, v: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
        """Return both, from the same products where that saves work."""
        return self.total(), self.contract_by_rows(v) if by_rows else self.contract(v)

    def touched(self) -> Tensor | None:
        """Return the sorted rows of the parameter that some g_n may touch, or None for all."""
        return None

    def contract_touched(self, rows: Tensor, v: Tensor) -> Tensor:
        """Contract with directions given for the ``rows`` alone, ``[k, r, ...]``."""
        raise NotImplementedError(f"{type(self).__name__} touches every row")

    def samples(self, first: int, end: int) -> GradientShape:
        """Return the gradients of some samples, without a copy."""
        raise CoverageError(f"gradients of the shape {type(self).__name__} are not told apart into training and validation rows")

    def at_rows(self, rows: Tensor) -> GradientShape:
        """Return the gradients of some rows of the parameter alone, ``rows`` ``[r]``."""
        raise NotImplementedError(f"{type(self).__name__} does not leave rows of its parameter out")

    def form(self) -> Tensor:
        """Return g_n, ``[n, *shape]``; large, for sketches of what is small and for tests."""
        raise NotImplementedError

    def segment_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Return the signed sums of the segments of every g_n, ``[n, segments]``; ``signs`` ``[entries]``."""
        g = self.form()
        return segment_sums(g.reshape(len(g), -1).to(signs.dtype), signs, plan.segment)

    def sketch(self, signs: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, ...]:
        """Return the sketch ``[n, buckets]`` and, where rows are kept apart, their segment sums and numbers (as bits)."""
        return self.bucketed(self.segment_sums(signs, plan), signs, weights, plan)

    def bucketed(self, z: Tensor, signs: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, ...]:
        """Let segment sums ``[n, segments]`` fall into buckets, after the heaviest rows are taken out where they are kept apart."""
        if plan.heavy == 0:
            return (fold(z, weights, plan.buckets),)
        rows = heaviest_rows(z, weights, plan)
        return fold(z, weights, plan.buckets), rows_apart(self.form_rows(rows), rows, signs, weights, plan), as_bits(rows)

    def form_rows(self, rows: Tensor) -> Tensor:
        """Return some rows of every g_n, ``[n, r, columns]``, for ``rows`` ``[n, r]``."""
        g = self.form().flatten(2)
        return g.gather(1, rows.unsqueeze(-1).expand(-1, -1, g.shape[-1]))

    def total_and_sketch(
        self, v: Tensor | None, signs: Tensor, weights: Tensor, plan: SketchPlan
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Return Σ_n g_n, ⟨g_n, v⟩ (None without ``v``) and the sketch, from the same products where that saves work."""
        return self.total(), None if v is None else self.contract(v), self.sketch(signs, weights, plan)

    @classmethod
    def sketch_parts(cls, plan: SketchPlan, n: int, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Parts:
        """Tell the shapes and dtypes of what :meth:`sketch` returns, before there is any."""
        parts: Parts = (((n, plan.buckets), dtype),)
        if plan.heavy:
            parts += (((n, plan.heavy, plan.per_row_apart), dtype), ((n, plan.heavy), torch.float64))
        return parts

    # How it is kept from the backward until the optimizer steps

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Return the same gradients in the shape ``kind`` that they are to be kept in; ``buffer`` is memory to put them in."""
        assert isinstance(self, kind), f"{type(self).__name__} cannot be kept as {kind.__name__}"
        return self

    def parts(self) -> tuple[Tensor, ...]:
        """Return the floating-point tensors as which the gradients leave the backward."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Return the memory of the parts."""
        return sum(part.nbytes for part in self.parts())


class Formed(GradientShape):
    """Per-sample gradients, ``[n, *shape]``."""

    summable = True

    def __init__(self, g: Tensor) -> None:
        """Hold ``g``."""
        self.g = g

    def samples(self, first: int, end: int) -> GradientShape:
        """Some of them."""
        return Formed(self.g[first:end])

    def contract(self, v: Tensor) -> Tensor:
        """One product per direction."""
        return dot_each(self.g, v)

    def contract_by_rows(self, v: Tensor) -> Tensor:
        """One product per direction and row."""
        return contract_formed(self.g.to(v.dtype), v, by_rows=True)

    def total(self) -> Tensor:
        """Add them up."""
        return self.g.sum(0) if self.g.dim() < 3 or len(self.g) == 0 else added_up(self.g)

    def form(self) -> Tensor:
        """They are formed."""
        return self.g

    def parts(self) -> tuple[Tensor, ...]:
        """One tensor."""
        return (self.g,)

    @staticmethod
    def of(parts: tuple[Tensor, ...]) -> Formed:
        """Undo ``parts``."""
        return Formed(*parts)


class Outer(GradientShape):
    """g_n = Σ_t x_nt y_ntᵀ with ``x`` ``[n, t, p]`` and ``y`` ``[n, t, q]``; the parameter is ``[p, q]``."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        """Hold both factors."""
        self.x, self.y = x, y

    def samples(self, first: int, end: int) -> GradientShape:
        """Some rows of both factors."""
        return Outer(self.x[first:end], self.y[first:end])

    def at_rows(self, rows: Tensor) -> GradientShape:
        """Some features of x, picked position by position: along a middle dimension that takes several times as long."""
        n, t = self.x.shape[:2]
        return Outer(self.x.reshape(n * t, -1).index_select(1, rows).view(n, t, -1), self.y)

    def contract(self, v: Tensor) -> Tensor:
        """*Project*: Σ_t x_nt · (v y_nt), one matrix product of the size of the layer's forward.

        That is one per direction: with several, forming gradients takes less, some at a time in memory that is reused.
        """
        k, t = len(v), self.x.shape[1]
        if k * t > t + FORMED_DOTS * k:
            return self._formed_dots(v)
        n, x, y = len(self.x), self.x.to(v.dtype), self.y.to(v.dtype)
        flat, x = y.reshape(-1, y.shape[-1]), x.reshape(n, -1)
        return torch.stack([row_dots(x, (flat @ direction.t()).view(n, -1)) for direction in v], dim=1)

    def _formed_dots(self, v: Tensor) -> Tensor:
        n, _, p = self.x.shape
        x, y = self.x.to(v.dtype).transpose(1, 2), self.y.to(v.dtype)
        some = max(1, SCRATCH_BYTES // max(v[0].nbytes, 1))
        buffer = scratch_like(v, (min(n, some), p, y.shape[2]), "formed")
        found = v.new_empty(n, len(v))
        for first in range(0, n, some):
            here = slice(first, min(first + some, n))
            found[here] = dot_each(torch.bmm(x[here], y[here], out=buffer[: here.stop - first]), v)
        return found

    def contract_by_rows(self, v: Tensor) -> Tensor:
        """Σ_t x_ntp (v y_nt)_p."""
        n, t = self.x.shape[:2]
        flat, x = self.y.reshape(n * t, -1).to(v.dtype), self.x.to(v.dtype)
        return torch.stack([sum_positions((flat @ direction.t()).view(n, t, -1).mul_(x)) for direction in v], dim=1)

    def total(self) -> Tensor:
        """One product over all positions."""
        dtype = torch.promote_types(self.x.dtype, self.y.dtype)
        return self.x.flatten(0, 1).to(dtype).t() @ self.y.flatten(0, 1).to(dtype)

    def total_and_contract(self, v: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
        """*Shared*: the weight gradient and the contractions come out of the same products."""
        return shared_outer(self.x, self.y, v, by_rows)[:2]

    def form(self) -> Tensor:
        """Form Σ_t x_nt y_ntᵀ."""
        dtype = torch.promote_types(self.x.dtype, self.y.dtype)
        return torch.bmm(self.x.to(dtype).transpose(1, 2), self.y.to(dtype))

    def segment_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Project few positions on the signs; of more form some gradients at a time, in memory that is reused."""
        if 0 < self.x.shape[1] <= plan.segment and plan.columns == self.y.shape[2]:
            return self._projected_sums(signs, plan)
        piece = max(1, SCRATCH_BYTES // max(signs.nbytes, 1))
        some = [slice(i, i + piece) for i in range(0, max(len(self.x), 1), piece)]
        return torch.cat([Formed(Outer(self.x[s], self.y[s]).form()).segment_sums(signs, plan) for s in some])

    def _projected_sums(self, signs: Tensor, plan: SketchPlan) -> Tensor:
        """Return Σ_t x_ntp (Σ_{c in segment j} sign_pc y_ntc), ``[n, p·J]``: t numbers per segment where forming makes ℓ.

        That is a matrix product per segment (of the size of the layer's forward, all together), some rows of the weight at a time.
        """
        (n, t, p), segment, j = self.x.shape, plan.segment, plan.per_row
        x, y = self.x.to(signs.dtype), self.y.to(signs.dtype).reshape(n * t, j, segment).transpose(0, 1)
        by_segment = signs.view(p, j, segment).permute(1, 2, 0)
        found = x.new_empty(n, p, j)
        rows = max(1, SCRATCH_BYTES // max(n * t * j * x.itemsize, 1))
        for first in range(0, p, rows):
            some, count = slice(first, first + rows), min(rows, p - first)
            made = torch.bmm(y, by_segment[:, :, some], out=scratch_like(x, (j, n * t, count)))
            made = made.view(j, n, t, count).mul_(x[:, :, some])
            found[:, some] = (made.sum(2) if t > 1 else made[:, :, 0]).permute(1, 2, 0)
        return found.view(n, p * j)

    def total_and_sketch(
        self, v: Tensor | None, signs: Tensor, weights: Tensor, plan: SketchPlan
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """*Shared*: weight gradient, contractions and sketch come out of the same products."""
        if v is None:
            return super().total_and_sketch(v, signs, weights, plan)
        total, c, z = shared_outer(self.x, self.y, v, signs=signs, segment=plan.segment)
        assert z is not None
        return total, c, self.bucketed(z, signs, weights, plan)

    def form_rows(self, rows: Tensor) -> Tensor:
        """Form no other rows."""
        dtype = torch.promote_types(self.x.dtype, self.y.dtype)
        x = self.x.gather(2, rows.unsqueeze(1).expand(-1, self.x.shape[1], -1))
        return torch.bmm(x.to(dtype).transpose(1, 2), self.y.to(dtype))

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Form the gradients, into ``buffer`` if given, where they are to be kept formed."""
        if kind is not Formed:
            return super().keep(kind)
        if buffer is None or buffer.dtype != torch.promote_types(self.x.dtype, self.y.dtype):
            return Formed(self.form())
        return Formed(torch.bmm(self.x.to(buffer.dtype).transpose(1, 2), self.y.to(buffer.dtype), out=buffer))

    def parts(self) -> tuple[Tensor, ...]:
        """Both factors."""
        return (self.x, self.y)

    @staticmethod
    def of(parts: tuple[Tensor, ...]) -> Outer:
        """Undo ``parts``."""
        return Outer(*parts)

    @staticmethod
    def kept_as(n: int, t: int, p: int, q: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[type[GradientShape], Parts]:
        """Choose the smaller of the factors, t·(p + q), and the formed gradients, p·q; ``dtypes`` are those of x and y."""
        if p * q <= t * (p + q):
            return Formed, (((n, p, q), torch.promote_types(*dtypes)),)
        return Outer, (((n, t, p), dtypes[0]), ((n, t, q), dtypes[1]))


class LookUp(GradientShape):
    """A table's rows: g_n[w] = Σ_t [token_nt = w] b_nt, without the row ``padding``.

    ``tokens`` ``[n, t]``, ``b`` ``[n, t, d]``, the table ``[rows, d]``.
    """

    def __init__(self, tokens: Tensor, b: Tensor, rows: int, padding: int | None) -> None:
        """Hold tokens and output gradients."""
        self.tokens, self.b, self.rows, self.padding = tokens, b, rows, padding

    def samples(self, first: int, end: int) -> GradientShape:
        """Some rows of tokens and output gradients."""
        return LookUp(self.tokens[first:end], self.b[first:end], self.rows, self.padding)

    def _gather(self, places: Tensor, v: Tensor) -> Tensor:
        """Return Σ_t b_nt · v[place_nt], ``[n, k]``; padding counts nothing."""
        n = len(self.b)
        b = self.b.reshape(n, -1).to(v.dtype)
        blank = None if self.padding is None else self.tokens == self.padding
        if n > 1 and places.stride(0) == 0 and blank is None:
            # The same tokens for every sample (position indices): pick their rows once.
            return b @ v[:, places[0]].flatten(1).t()
        piece = max(1, SCRATCH_BYTES * n // max(b.nbytes, 1))
        parts = []
        for first in range(0, n, piece):
            group = slice(first, first + piece)
            index, b_p = places[group].reshape(-1), b[group]
            scores = []
            for direction in v:
                picked = torch.index_select(direction, 0, index, out=scratch_like(b_p, (len(index), v.shape[-1])))
                if blank is not None:
                    picked.masked_fill_(blank[group].reshape(-1, 1), 0.0)
                scores.append(row_dots(picked.view(b_p.shape), b_p))
            parts.append(torch.stack(scores, dim=1))
        return torch.cat(parts)

    def contract(self, v: Tensor) -> Tensor:
        """Gather the direction's rows and contract: n·t·d, no matrix product."""
        return self._gather(self.tokens, v)

    def touched(self) -> Tensor | None:
        """Return the distinct tokens where they are fewer than the table has rows."""
        return torch.unique(self.tokens) if self.tokens.numel() < self.rows else None

    def contract_touched(self, rows: Tensor, v: Tensor) -> Tensor:
        """Gather from the given rows."""
        return self._gather(torch.searchsorted(rows, self.tokens.contiguous()), v)

    def unpadded(self) -> Tensor:
        """Return the output gradients with 0 at the padding."""
        blank = None if self.padding is None else (self.tokens == self.padding).unsqueeze(-1)
        return self.b if blank is None else self.b.masked_fill(blank, 0.0)

    def total(self) -> Tensor:
        """Scatter the output gradients of all samples into one table."""
        flat = self.unpadded().flatten(0, 1)
        return flat.new_zeros(self.rows, flat.shape[1]).index_add_(0, self.tokens.reshape(-1), flat)

    def form(self) -> Tensor:
        """Scatter the output gradients into one table per sample."""
        b = self.unpadded()
        index = self.tokens.unsqueeze(-1).expand_as(b)
        return b.new_zeros(len(b), self.rows, b.shape[2]).scatter_add_(1, index, b)

    def parts(self) -> tuple[Tensor, ...]:
        """Return output gradients, and tokens as the bits of floating-point numbers (only such leave a backward).

        Tokens are copied: loaders like to refill one buffer.
        """
        return (self.b, as_bits(self.tokens))

    def sketch(self, signs: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, ...]:
        """Keep the touched rows: weighted segment sums ``[n, t, J]``, and the tokens as bits."""
        return rows_apart(self.unpadded(), self.tokens, signs, weights, plan), as_bits(self.tokens)

    @classmethod
    def sketch_parts(cls, plan: SketchPlan, n: int, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> Parts:
        """Segment sums and tokens."""
        t = inputs[0].numel() // max(n, 1)
        return (((n, t, plan.per_row_apart), dtype), ((n, t), torch.float64))

    @staticmethod
    def of(parts: tuple[Tensor, ...], rows: int, padding: int | None) -> LookUp:
        """Undo ``parts``."""
        b, bits = parts
        return LookUp(from_bits(bits), b, rows, padding)

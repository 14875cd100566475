"""The merged pass: training and validation rows in one batch, one forward, one backward.

The first n rows of every tensor are training rows, the last m validation rows. A layer's parameters are taken out of its own
forward (it runs with detached ones), and :class:`Merged`, the identity on its output, gives them their gradient back: that of
the training rows alone. The rows of validation give ∇ℓ of this use of the parameter, V = Σ_j g_j (or g_j apart, one per point),
and the training rows are contracted with v = gain ∘ V right there, or in *gram* form without V being formed:

    ⟨g_n, g_j⟩ = Σ_{t,t'} (x_nt · x_jt') (y_nt · y_jt')

Where a parameter has more than one use, V of one use is not ∇ℓ: training rows are kept, and V leaves as a probe's gradient. A head
that is tied to a token table keeps little: the look-ups' part of ∇ℓ is 0 but in the rows R of the validation rows' tokens,

    ⟨g_n, v⟩ = ⟨g_n, gain ∘ V_head⟩ + ⟨g_n[R], (gain ∘ V_table)[R]⟩

so that the first term is contracted at once, and only rows R of g_n wait for the second.

Layers whose forward and backward a rule owns (``Owner``) run as :class:`MergedOwned`, without copies of outputs or their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import StepError
from inrun.old.layers.layout import SCRATCH_BYTES, turned
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.seam import unrounded
from inrun.old.layers.shapes import GradientShape, Outer


@dataclass(frozen=True)
class MergedAsk:
    """What is wanted of one parameter in one call of a merged pass; probes come in the order of the fields that ask for them."""

    name: str
    #: Contract the training rows: "shared", "project" or "gram"; None where they are kept.
    form: str | None = None
    by_rows: bool = False
    #: A gain ``[1, *shape]`` comes with it; without one v = V.
    has_gain: bool = False
    kept_as: type[GradientShape] | None = None
    #: Rows R ``[r]`` come with it, and those rows of the training rows' gradients are kept beside the contraction, in this shape.
    rows_as: type[GradientShape] | None = None
    #: V leaves.
    leaves: bool = False

    @property
    def given(self) -> int:
        """Return how many tensors come with it."""
        return self.has_gain + (self.rows_as is not None)


@dataclass(frozen=True)
class MergedCall:
    """What the backward of a call knows beside tensors."""

    rule: LayerRule
    constants: Any
    #: Rows of training and of validation.
    n: int
    m: int
    #: Every row of validation is a column of its own.
    points: bool
    asks: tuple[MergedAsk, ...]
    #: As in ``seam.Call``: the output has no batch and is given one copy per row.
    expands: bool = False
    batch_of_one: bool = False
    turn: str = ""

    @property
    def given(self) -> int:
        """Return how many tensors come with all asks: gains and rows, before the probes."""
        return sum(ask.given for ask in self.asks)

    def gradients(self, inputs: tuple[Tensor, ...], b: Tensor) -> dict[str, GradientShape]:
        """Map inputs and output gradient of all rows to the shapes of their gradients."""
        rows = self.n + self.m
        if self.turn:
            inputs, b = tuple(turned(x, rows, self.turn) for x in inputs), turned(b, rows, self.turn)
        return self.rule.gradients(self.constants, inputs, b, rows, tuple(ask.name for ask in self.asks))

    def validation_gradient(self, rows: GradientShape) -> Tensor:
        """Return V ``[k, *shape]``, in single precision at least."""
        v = rows.form() if self.points else rows.total().unsqueeze(0)
        return v.to(torch.promote_types(v.dtype, torch.float32))


def gram(a: GradientShape, b: GradientShape) -> Tensor:
    """Return ⟨g_i, g_j⟩ for the outer products of two sets of rows, ``[n, m]``, from products of positions with positions.

    No gradient is formed: t·t'·(p + q) operations per pair instead of t·p·q and a pass over p·q entries. In pieces whose
    products fit the scratch memory.
    """
    assert isinstance(a, Outer) and isinstance(b, Outer), "gram is for outer products"
    n, t, m, s = *a.x.shape[:2], *b.x.shape[:2]
    dtype = torch.promote_types(torch.promote_types(a.x.dtype, a.y.dtype), torch.float32)
    right_x, right_y = b.x.reshape(m * s, -1).to(dtype).t(), b.y.reshape(m * s, -1).to(dtype).t()
    piece = max(1, SCRATCH_BYTES // max(t * m * s * dtype.itemsize, 1))
    found = []
    for first in range(0, n, piece):
        x, y = a.x[first : first + piece].to(dtype), a.y[first : first + piece].to(dtype)
        products = (x.flatten(0, 1) @ right_x).mul_(y.flatten(0, 1) @ right_y)
        found.append(products.view(len(x), t, m, s).sum((1, 3)))
    return torch.cat(found) if found else a.x.new_zeros((0, m), dtype=dtype)


def drops_out(module: nn.Module) -> bool:
    """Whether a module draws random numbers for every row, validation rows too."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return isinstance(module, kinds) and module.p > 0 and module.training


def can_gram(shape: GradientShape) -> bool:
    """Whether gradients of this shape have a gram form."""
    return isinstance(shape, Outer)


def _check_once() -> None:
    """Raise in a backward that is differentiated itself."""
    if torch.is_grad_enabled():
        raise StepError(
            "backward(create_graph=True) in a merged step: gradients of gradients are not told apart into training and "
            "validation rows. Give the Accountant validation= and open steps without merged=."
        )


class Merged(torch.autograd.Function):
    """The identity on the output of a layer that ran with detached parameters; its backward has all that they are owed."""

    @staticmethod
    def forward(ctx: Any, call: MergedCall, buffers: dict[str, Tensor], out: Tensor, count: int, *tensors: Tensor) -> Tensor:
        """Pass ``out`` on; ``tensors``: ``count`` inputs of the layer, one parameter per ask, gains and rows, probes."""
        start = count + len(call.asks)
        ctx.call, ctx.buffers, ctx.inputs = call, buffers, count
        ctx.dtypes = tuple(p.dtype for p in tensors[count:start])
        ctx.save_for_backward(*tensors[:count], *tensors[start : start + call.given])
        if call.expands:
            rows = call.n + call.m
            return (out if call.batch_of_one else out.unsqueeze(0)).expand(rows, *out.shape[call.batch_of_one :])
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on; return the training rows' gradient for the parameters, and what was asked for."""
        (b,), call = grads, ctx.call
        _check_once()
        saved = ctx.saved_tensors  # once: a checkpoint hands them out once
        buffers, ctx.buffers = ctx.buffers, {}
        own, leaving = _answers(call, tuple(saved[: ctx.inputs]), b, saved[ctx.inputs :], buffers)
        passed = b.sum(0, keepdim=call.batch_of_one) if call.expands else b
        totals = [total.to(dtype) for total, dtype in zip(own, ctx.dtypes, strict=True)]
        return (None, None, passed, None, *([None] * ctx.inputs), *totals, *([None] * call.given), *leaving)


class MergedOwned(torch.autograd.Function):
    """A layer whose forward and backward are its rule's own, for rows of both kinds."""

    @staticmethod
    def forward(
        ctx: Any, call: MergedCall, buffers: dict[str, Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, *asked: Tensor
    ) -> Tensor:
        """Run the layer; ``asked`` are gains and rows, then the probes."""
        assert call.rule.owner is not None
        out, saved = call.rule.owner.run(call.constants, x, weight, bias)
        ctx.call, ctx.buffers = call, buffers
        ctx.save_for_backward(weight, *asked[: call.given], *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the input's gradient, the training rows' gradient for the parameters, and what was asked for."""
        b, call = grads[0].contiguous(), ctx.call
        _check_once()
        weight, *rest = ctx.saved_tensors
        saved = tuple(rest[call.given :])
        grad_x = call.rule.owner.input_gradient(call.constants, saved, weight, b) if ctx.needs_input_grad[2] else None
        buffers, ctx.buffers = ctx.buffers, {}
        own, leaving = _answers(call, saved, b, rest[: call.given], buffers)
        totals = {ask.name: total.to(weight.dtype) for ask, total in zip(call.asks, own, strict=True)}
        return (None, None, grad_x, totals.get("weight"), totals.get("bias"), *([None] * call.given), *leaving)


def _answers(
    call: MergedCall, inputs: tuple[Tensor, ...], b: Tensor, given: Sequence[Tensor], buffers: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the training rows' gradients of the parameters that are asked for, and the probes' gradients."""
    own: list[Tensor] = []
    leaving: list[Tensor] = []
    remaining = iter(given)
    with torch.no_grad(), unrounded(b):
        shapes = call.gradients(inputs, b.detach())
        for ask in call.asks:
            gain = next(remaining) if ask.has_gain else None
            rows = next(remaining) if ask.rows_as is not None else None
            total, probes = _answer(call, ask, shapes[ask.name], gain, rows, buffers.get(ask.name))
            own.append(total)
            leaving += probes
    return own, leaving


def _answer(
    call: MergedCall,
    ask: MergedAsk,
    gradients: GradientShape,
    gain: Tensor | None,
    rows: Tensor | None,
    buffer: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the training rows' gradient of one parameter, and its probes' gradients."""
    training, validation = gradients.samples(0, call.n), gradients.samples(call.n, call.n + call.m)
    in_gram = ask.form == "gram" and can_gram(gradients)
    v = None if in_gram and not ask.leaves else call.validation_gradient(validation)
    leaving: list[Tensor] = []
    if ask.kept_as is not None:
        kept = training.keep(ask.kept_as, buffer)
        # New tensor objects: autograd then takes them over as they are instead of copying.
        leaving += [part.detach() for part in kept.parts()]
        total = kept.total()
    elif in_gram:
        c = gram(training, validation)
        leaving.append(c if call.points else c.sum(1, keepdim=True))
        total = training.total()
    else:
        assert v is not None
        direction = v if gain is None else v * gain
        if ask.form == "shared":
            total, c = training.total_and_contract(direction, ask.by_rows)
        else:
            total = training.total()
            c = training.contract_by_rows(direction) if ask.by_rows else training.contract(direction)
        leaving.append(c)
    if ask.rows_as is not None:
        assert rows is not None
        leaving += [part.detach() for part in training.at_rows(rows).keep(ask.rows_as).parts()]
    if ask.leaves:
        assert v is not None
        leaving.append(v)
    return total, leaving

"""The seam between layers and engine: tensors in, gradients out, and nothing else.

A *probe* is a leaf of zeros. The autograd functions here take probes and directions beside their usual inputs, and what they
return as a probe's "gradient" is what the engine asked for: the inner products ⟨g_n, v⟩ of a parameter, or the tensors that
its per-sample gradients are kept as. Nothing is looked up in a backward and nothing is left behind by it, so autograd itself
sums over repeated uses of a weight, over several backwards and over recomputed segments.

=========  =========================  ==========================================================================
``Ask``    probes                     their gradients
=========  =========================  ==========================================================================
contract   ``[n, k]``                 ⟨g_n, v⟩ (*per parameter*, shared by all its uses)
by rows    ``[n, k, p]``              the same, row by row of the parameter
sketch     ``[n, buckets]`` or rows   a few numbers of g_n (*per parameter*; rows that are kept apart: per call)
keep       as the shape tells         the parts of the gradient shape (formed ones are shared by all uses)
joined     ``[asks, n, k]``           ⟨g_n, v⟩ of all parameters of a call, where nothing else is asked for
=========  =========================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from inrun.old.layers.layout import turned
from inrun.old.layers.packed import Packing
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.shapes import GradientShape
from inrun.old.layers.shards import Shards
from inrun.old.layers.sketch import SketchPlan
from inrun.old.layers.squares import squares


@dataclass(frozen=True)
class Ask:
    """What the engine wants of one parameter in one call."""

    name: str
    #: Contract row by row of the parameter.
    by_rows: bool = False
    #: Keep the gradients in this shape instead of contracting them.
    kept_as: type[GradientShape] | None = None
    #: How many probes it has.
    probes: int = 1
    #: Contract with a direction (unless the gradients are kept).
    contracts: bool = True
    #: Sketch the gradients, too.
    sketch: SketchPlan | None = None
    #: The direction is split over processes, and whole only while this parameter is contracted.
    shards: Shards | None = None
    #: Asked for beside the contraction: kept or contracted once more, or (neither) the squared norms ``[n]``.
    extra: bool = False

    @property
    def has_own_probes(self) -> bool:
        """Whether every call needs probes of its own: factors and rows that are kept apart must not be added up."""
        if self.kept_as is not None:
            return not self.kept_as.summable
        return self.sketch is not None and self.probes - self.contracts > 1

    @property
    def given(self) -> int:
        """Return how many tensors come with it: a direction, and signs and weights of a sketch."""
        return 0 if self.kept_as is not None else self.contracts + (0 if self.sketch is None else 2)


@dataclass(frozen=True)
class Call:
    """What a backward knows of a call beside tensors: all of it is fixed in the forward."""

    rule: LayerRule
    constants: Any
    #: Rows of the batch.
    n: int
    asks: tuple[Ask, ...]
    #: The output has no batch and is given one copy per sample; it stands for a batch of one, or has no such dimension.
    expands: bool = False
    batch_of_one: bool = False
    #: Samples are documents packed into the rows. Their places, and the positions that are nobody's, then come before all else
    #: that is given, and a probe for gradient at those positions comes last.
    packing: Packing | None = None
    #: Where the samples are not in the first dimension: ``second`` or ``cycled`` (see ``layout.py``).
    turn: str = ""

    #: All asks are contractions, and what they give leaves in one probe, ``[asks, n, k]``.
    joined: bool = False
    #: The parameters of an owned layer, in order.
    owned_names: tuple[str, ...] = ()

    @cached_property
    def asked_names(self) -> tuple[str, ...]:
        """Return the parameters that are asked for."""
        return tuple(ask.name for ask in self.asks)

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Pick places, directions, signs and weights out of ``asked`` tensors: they come before the probes."""
        return list(tensors[: self._given])

    @cached_property
    def _given(self) -> int:
        return self.places + sum(ask.given for ask in self.asks)

    @property
    def places(self) -> int:
        """Return how many of the given tensors tell where documents lie."""
        return 0 if self.packing is None else 2

    def gradients(
        self, inputs: tuple[Tensor, ...], b: Tensor, given: list[Tensor], names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Map inputs and output gradient to the shapes of the samples' gradients."""
        if self.packing is None:
            if self.turn:
                # Batched products of a gradient whose samples lie interleaved take a quarter longer; the copy takes little.
                inputs, b = tuple(turned(x, self.n, self.turn) for x in inputs), turned(b, self.n, self.turn).contiguous()
            return self.rule.gradients(self.constants, inputs, b, self.n, names)
        return self.packing.gradients(self.rule, self.constants, inputs, b, given[0], names)

    def at_nobody(self, b: Tensor, given: list[Tensor]) -> list[Tensor]:
        """Return the size of the gradient at positions that are nobody's, for the probe that asks for it."""
        if self.packing is None:
            return []
        return [self.packing.by_position(b)[given[1]].abs().sum(dtype=torch.float32)]


def plainly(b: Tensor, twice: bool) -> AbstractContextManager[Any]:
    """Keep graph and autocast out of a backward's own arithmetic; a backward has no graph unless it is differentiated itself."""
    if not twice and not torch.is_autocast_enabled(b.device.type):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(unrounded(b))
    return stack


def unrounded(b: Tensor) -> AbstractContextManager[Any]:
    """Keep autocast out of the backward's own arithmetic; it stays on in a backward inside an autocast block."""
    on = torch.is_autocast_enabled(b.device.type)
    return torch.autocast(b.device.type, enabled=False) if on else nullcontext()


class SecondOrder(torch.autograd.Function):
    """The identity on an output gradient in a backward that is itself differentiated (``create_graph=True``).

    Gradient that flows through it reaches weights past every rule; the probe's gradient says that there was some.
    """

    @staticmethod
    def forward(ctx: Any, b: Tensor, probe: Tensor) -> Tensor:
        """Pass ``b`` on."""
        return b.view_as(b)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on and tell its size."""
        return grads[0], grads[0].detach().abs().sum().to(torch.float32).to("cpu")


def gradients_for_probes(
    call: Call, shapes: dict[str, GradientShape], given: list[Tensor], buffers: dict[str, Tensor], want_totals: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Turn gradient shapes into what was asked for.

    Args:
        call: The call.
        shapes: One per parameter that is asked for (others may be there for their totals).
        given: A direction ``[k, *shape]`` for every ask that contracts, and signs and weights for every sketch, in order.
        buffers: Memory for gradients that are kept formed.
        want_totals: Whether the parameters' own gradients are wanted too.

    Returns:
        Totals by name, and the probes' gradients in the order of the asks.
    """
    totals: dict[str, Tensor] = {}
    leaving: list[Tensor] = []
    remaining = iter(given[call.places :])
    for ask in call.asks:
        shape = shapes[ask.name]
        if ask.extra:
            leaving += _extra(ask, shape, remaining)
            continue
        if ask.kept_as is not None:
            kept = shape.keep(ask.kept_as, buffers.get(ask.name))
            # New tensor objects: autograd then takes them over as they are instead of copying.
            leaving += [part.detach() for part in kept.parts()]
            if want_totals:
                totals[ask.name] = kept.total()
            continue
        v = next(remaining) if ask.contracts else None
        if v is not None and ask.shards is not None:
            v = ask.shards.whole(v)
        if ask.sketch is not None:
            signs, weights = next(remaining), next(remaining)
            if signs.dtype == torch.int8 and ask.shards is not None:  # those of the rows that are here
                rows = signs.view(1, -1, ask.sketch.columns)
                signs = ask.shards.whole(rows).reshape(-1).to(weights.dtype)
            if want_totals:
                totals[ask.name], c, sketch = shape.total_and_sketch(v, signs, weights, ask.sketch)
            else:
                c, sketch = None if v is None else shape.contract(v), shape.sketch(signs, weights, ask.sketch)
            leaving += [*([] if c is None else [c]), *sketch]
            continue
        assert v is not None
        if want_totals:
            totals[ask.name], c = shape.total_and_contract(v, ask.by_rows)
        else:
            c = shape.contract_by_rows(v) if ask.by_rows else shape.contract(v)
        leaving.append(c)
    if want_totals and len(totals) < len(shapes):
        totals |= {name: shape.total() for name, shape in shapes.items() if name not in totals}
    if call.joined:
        leaving = [torch.stack(leaving) if len(leaving) > 1 else leaving[0].unsqueeze(0)]
    return totals, leaving


def _extra(ask: Ask, shape: GradientShape, given: Iterator[Tensor]) -> list[Tensor]:
    """Return what is asked for beside the contraction of a parameter."""
    if ask.kept_as is not None:
        return [part.detach() for part in shape.keep(ask.kept_as).parts()]
    return [shape.contract(next(given)) if ask.contracts else squares(shape)]


class Owned(torch.autograd.Function):
    """A layer whose weight gradient and contractions come from the same products (the *shared* form)."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        buffers: dict[str, Tensor],
        past: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *asked: Tensor,
    ) -> Tensor:
        """Run the layer; ``asked`` are the directions, then the probes."""
        assert call.rule.owner is not None
        out, saved = call.rule.owner.run(call.constants, x, weight, bias)
        directions = call.given(asked)
        ctx.call, ctx.buffers, ctx.count = call, buffers, len(directions)
        ctx.save_for_backward(past, weight, *directions, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and what was asked for."""
        call, needs = ctx.call, ctx.needs_input_grad
        past, weight, *rest = ctx.saved_tensors
        directions, saved = rest[: ctx.count], tuple(rest[ctx.count :])
        b, twice = grads[0].contiguous(), torch.is_grad_enabled()
        if twice:
            b = SecondOrder.apply(b, past)
        grad_x = call.rule.owner.input_gradient(call.constants, saved, weight, b) if needs[3] else None
        names = tuple(name for name, need in (("weight", needs[4]), ("bias", needs[5])) if need or name in call.asked_names)
        # A buffer serves once: what left in it must not be overwritten by a second backward through the same call.
        buffers, ctx.buffers = ctx.buffers, {}
        totals: dict[str, Tensor] = {}
        if twice:
            totals = {k: s.total() for k, s in call.gradients(saved, b, directions, names).items()}
        with plainly(b, twice):
            shapes = call.gradients(saved, b.detach() if twice else b, directions, names)
            once, leaving = gradients_for_probes(call, shapes, directions, buffers, want_totals=not twice)
            leaving += call.at_nobody(b, directions)
        found = totals or once
        dtype = weight.dtype
        own = [found[name].to(dtype) if need else None for name, need in (("weight", needs[4]), ("bias", needs[5]))]
        return (None, None, None, grad_x, *own, *([None] * ctx.count), *leaving)


class Tapped(torch.autograd.Function):
    """The identity on a layer's output; its backward contracts (the *project* form).

    The layer's own forward and backward stay the framework's, bit for bit. An output without a batch (position tables) is
    given one copy per sample, so that its gradient arrives sample by sample; the backward sums over them, which is what
    broadcasting would have done.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, buffers: dict[str, Tensor], past: Tensor, out: Tensor, count: int, *tensors: Tensor
    ) -> Tensor:
        """Pass ``out`` on; ``tensors`` are ``count`` inputs of the layer, then the directions, then the probes."""
        directions = call.given(tensors[count:])
        ctx.call, ctx.buffers, ctx.inputs, ctx.count = call, buffers, count, len(directions)
        ctx.save_for_backward(past, *tensors[:count], *directions)
        if call.expands:
            return (out if call.batch_of_one else out.unsqueeze(0)).expand(call.n, *out.shape[call.batch_of_one :])
        # The same tensor, so that an in-place activation may follow.
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on, and return what was asked for."""
        (b,), call = grads, ctx.call
        past, *rest = ctx.saved_tensors
        inputs, directions = tuple(rest[: ctx.inputs]), rest[ctx.inputs :]
        twice = torch.is_grad_enabled()
        if twice:
            b = SecondOrder.apply(b, past)
        buffers, ctx.buffers = ctx.buffers, {}
        with plainly(b, twice):
            shapes = call.gradients(inputs, b.detach() if twice else b, directions, call.asked_names)
            leaving = gradients_for_probes(call, shapes, directions, buffers, want_totals=False)[1]
            leaving += call.at_nobody(b, directions)
        passed = b.sum(0, keepdim=call.batch_of_one) if call.expands else b
        return (None, None, None, passed, None, *([None] * (ctx.inputs + ctx.count)), *leaving)


class Output(torch.autograd.Function):
    """A copy of one output of a module without a rule; its gradient leaves as the probe's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, probe: Tensor) -> Tensor:
        """Copy: an in-place activation may follow, and some operations keep their own output for their backward."""
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on, twice."""
        return grads[0], grads[0].detach()

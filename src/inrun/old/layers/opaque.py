"""The seam for compiled code: the same numbers leave the same backward, by way of one operation that no compiler opens.

``Owned`` and ``Tapped`` (``seam.py``) choose, loop over samples and reuse memory, none of which can be traced without tying a
graph to the number of samples. Here the functions are plain tensor code, and all the rest of a backward is one custom operation,
``inrun::leave``. What it must know of a call beside tensors is fixed before the forward and stands in a table of equal calls, so
that equal layers share a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.errors import StepError
from inrun.old.layers.seam import Call, gradients_for_probes, unrounded
from inrun.torch_private import unsafe_view

#: Calls by key; equal calls have the same key. A handful for every kind of layer.
_calls: list[Call] = []
_keys: dict[Call, int] = {}


def key_of(call: Call) -> int:
    """Return the number under which a call is known to compiled code; its ``n`` is told by the probes."""
    call = dataclasses.replace(call, n=0)
    if call not in _keys:
        _keys[call] = len(_calls)
        _calls.append(call)
    return _keys[call]


@torch.library.custom_op("inrun::leave", mutates_args=())
def leave(
    key: int, inputs: Sequence[Tensor], b: Tensor, given: Sequence[Tensor], probes: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of the ``wanted`` parameters and what was asked for, one tensor per probe.

    Args:
        key: The call.
        inputs: What the rule needs of the forward.
        b: The gradient at the layer's output.
        given: Directions, signs and weights, as :class:`inrun.old.layers.seam.Ask` orders them.
        probes: For their shapes.
        wanted: Parameters whose own gradient is wanted, in the order of the rule's names.
    """
    n = probes[0].shape[0]
    call = dataclasses.replace(_calls[key], n=n)
    names = call.asked_names + tuple(x for x in call.owned_names if x not in call.asked_names) if wanted else call.asked_names
    with torch.no_grad(), unrounded(b):
        shapes = call.gradients(tuple(inputs), b.contiguous(), [], names)
        totals, leaving = gradients_for_probes(call, shapes, list(given), {}, want_totals=bool(wanted))
    for got, probe in zip(leaving, probes, strict=True):
        if got.shape != probe.shape:
            raise StepError(
                f"a {call.rule.label} inside compiled code was called with other shapes than its forward showed before it was "
                f"compiled ({tuple(got.shape)}, expected {tuple(probe.shape)}); its calls must depend on shapes only"
            )
    own = [totals[name].to(x.dtype) for name, x in zip(call.owned_names, wanted, strict=True)] if wanted else []
    taken = {x.untyped_storage().data_ptr() for x in (*inputs, b, *given, *probes, *wanted)}
    found = [*own, *(got.to(probe.dtype) for got, probe in zip(leaving, probes, strict=True))]
    # What leaves a custom operation may not share memory with what came in, nor with each other.
    result = []
    for x in found:
        place = x.untyped_storage().data_ptr()
        result.append(x.clone() if place in taken else x.contiguous())
        taken.add(place)
    return result


@leave.register_fake
def _(
    key: int, inputs: Sequence[Tensor], b: Tensor, given: Sequence[Tensor], probes: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*wanted, *probes)]


class OwnedOpaque(torch.autograd.Function):
    """``Owned`` for compiled code; ``asked`` are ``count`` given tensors, then the probes."""

    @staticmethod
    def forward(
        ctx: Any, key: int, call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, count: int, *asked: Tensor
    ) -> Tensor:
        """Run the layer."""
        assert call.rule.owner is not None
        out, saved = call.rule.owner.run(call.constants, x, weight, bias)
        ctx.key, ctx.call, ctx.count, ctx.has_bias = key, call, count, bias is not None
        ctx.saved = len(saved)
        ctx.save_for_backward(weight, *(() if bias is None else (bias,)), *saved, *asked)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and what was asked for."""
        weight, *rest = ctx.saved_tensors
        wanted = [weight]
        if ctx.has_bias:
            wanted.append(rest[0])
            rest = rest[1:]
        saved, asked = tuple(rest[: ctx.saved]), rest[ctx.saved :]
        given, probes = asked[: ctx.count], asked[ctx.count :]
        b = grads[0].contiguous()
        call = ctx.call
        grad_x = call.rule.owner.input_gradient(call.constants, saved, weight, b) if ctx.needs_input_grad[2] else None
        found = torch.ops.inrun.leave(ctx.key, saved, b, given, probes, wanted)
        grad_bias = found[1] if ctx.has_bias else None
        return (None, None, grad_x, found[0], grad_bias, None, *([None] * ctx.count), *found[len(wanted) :])


class TappedOpaque(torch.autograd.Function):
    """``Tapped`` for compiled code; ``tensors`` are ``inputs`` inputs of the layer, ``count`` given tensors, then the probes."""

    @staticmethod
    def forward(ctx: Any, key: int, call: Call, out: Tensor, inputs: int, count: int, *tensors: Tensor) -> Tensor:
        """Pass ``out`` on."""
        ctx.key, ctx.call, ctx.inputs, ctx.count = key, call, inputs, count
        ctx.save_for_backward(*tensors)
        if call.expands:
            n = tensors[inputs + count].shape[0]
            return (out if call.batch_of_one else out.unsqueeze(0)).expand(n, *out.shape[int(call.batch_of_one) :])
        # Not a view, or no in-place activation could follow.
        return unsafe_view(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on, and return what was asked for."""
        tensors = ctx.saved_tensors
        inputs, given = tensors[: ctx.inputs], tensors[ctx.inputs : ctx.inputs + ctx.count]
        probes = tensors[ctx.inputs + ctx.count :]
        b = grads[0].contiguous()
        found = torch.ops.inrun.leave(ctx.key, inputs, b, given, probes, [])
        call = ctx.call
        passed = b.sum(0, keepdim=call.batch_of_one) if call.expands else b
        return (None, None, passed, None, None, *([None] * (ctx.inputs + ctx.count)), *found)

"""The seam for parameters that are read: as ``seam.py``, tensors in, gradients out, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun.old.layers.seam import Call, Owned, SecondOrder, gradients_for_probes, plainly


class Spread(torch.autograd.Function):
    """Give a tensor without samples one copy per sample, so that its gradient arrives sample by sample.

    The backward sums over the copies, which is what broadcasting would have done.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, buffers: dict[str, Tensor], past: Tensor, q: Tensor, place: tuple[int, int, int], *asked: Tensor
    ) -> Tensor:
        """Expand ``q`` to ``place``: dimension of the samples, its size, and how many dimensions there are."""
        dim, size, dims = place
        directions = call.given(asked)
        ctx.call, ctx.buffers, ctx.place, ctx.shape, ctx.count = call, buffers, place, q.shape, len(directions)
        ctx.save_for_backward(past, *directions)
        return expanded(q, dim, size, dims)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the sum on, and return what was asked for."""
        (b,), call = grads, ctx.call
        past, *directions = ctx.saved_tensors
        twice = torch.is_grad_enabled()
        if twice:
            b = SecondOrder.apply(b, past)
        buffers, ctx.buffers = ctx.buffers, {}
        with plainly(b, twice):
            each = b.detach().movedim(ctx.place[0], 0)
            copies = each if len(each) == call.n else each.reshape(call.n, -1, *each.shape[1:]).sum(1)
            shapes = call.rule.gradients(call.constants, (), copies.reshape(call.n, *ctx.shape), call.n, call.asked_names)
            leaving = gradients_for_probes(call, shapes, directions, buffers, want_totals=False)[1]
        return (None, None, None, b.sum(ctx.place[0]).reshape(ctx.shape), None, *([None] * ctx.count), *leaving)


class Beside(torch.autograd.Function):
    """The identity on what the framework made; its gradient goes to what copies made of the same, too, for theirs."""

    @staticmethod
    def forward(ctx: Any, real: Tensor, copied: Tensor, own: bool) -> Tensor:
        """Pass ``real`` on: as the same tensor, so that an operation in place may follow, or as a view of it."""
        if not own:
            return real.view_as(real)
        ctx.mark_dirty(real)
        return real

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on, twice."""
        return grads[0], grads[0], None


def expanded(q: Tensor, dim: int, size: int, dims: int) -> Tensor:
    """Return ``q`` with ``dims`` dimensions, of which ``dim`` has ``size`` copies."""
    shape = [1] * (dims - q.dim()) + list(q.shape)
    return q.reshape(shape).expand(*(size if i == dim else -1 for i in range(dims)))


def arranged(copies: Tensor, dim: int, size: int, dims: int) -> Tensor:
    """Return copies ``[n, *shape]`` of a tensor as :func:`expanded` would lay it out; blocks of copies belong to one sample."""
    n, shape = len(copies), [1] * (dims - copies.dim() + 1) + list(copies.shape[1:])
    each = copies.reshape(n, *shape).repeat_interleave(size // n, 0) if size > n else copies.reshape(n, *shape)
    return each.movedim(0, dim).squeeze(dim + 1)


class Multiplied(Owned):
    """A product with a weight that was read; its gradient and the contractions come from the same products."""

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
        buffers, ctx.buffers = ctx.buffers, {}
        wanted = [kind for kind, need in (("weight", needs[4]), ("bias", needs[5])) if need]
        found: dict[str, Tensor] = {}
        if twice:
            found = {k: s.total() for k, s in call.gradients(saved, b, [], tuple(wanted)).items()}
        with plainly(b, twice):
            shapes = call.gradients(saved, b.detach() if twice else b, [], call.asked_names)
            once, leaving = gradients_for_probes(call, shapes, directions, buffers, want_totals=not twice)
            kinds = {name: kind for name, (kind, _) in call.constants[1].items()}
            if not twice:
                found = {kinds[name]: total for name, total in once.items()}
                missing = tuple(kind for kind in wanted if kind not in found)
                if missing:
                    found |= {k: s.total() for k, s in call.gradients(saved, b.detach(), [], missing).items()}
        own = [found[kind].to(weight.dtype) if kind in wanted else None for kind in ("weight", "bias")]
        return (None, None, None, grad_x, *own, *([None] * ctx.count), *leaving)

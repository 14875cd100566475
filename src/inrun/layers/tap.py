"""Scores as the gradient of a probe.

A *probe* is a leaf of zeros with one entry per sample and validation set. The autograd functions here take
probes beside their usual inputs; the "gradient" they return for a probe is ⟨g_n, v⟩. Autograd itself then sums
over layers and over repeated uses of a weight, and nothing else has to be remembered between forward and backward.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from inrun.layers.registry import Kept


class Observer(Protocol):
    """One forward call of one module, as the autograd functions see it (implemented by the engine)."""

    #: Names of the module's scored parameters, in the order of the probes.
    names: tuple[str, ...]
    #: One probe ``[n, k]`` per scored parameter.
    probes: tuple[Tensor, ...]
    n: int

    def direction(self, name: str) -> Tensor | None:
        """Return the directions ``[k, *shape]`` of a parameter, or None if its contraction is deferred."""
        ...

    def rowwise(self, name: str) -> bool:
        """Whether the contraction is wanted row by row of the parameter, ``[n, k, p]`` (then call ``keep_rows``)."""
        ...

    def keep_rows(self, name: str, sums: Tensor) -> None:
        """Keep a row-by-row contraction until the factors of the rows are known."""
        ...

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a reused buffer that lasts until the optimizer's step."""
        ...

    def keep(self, name: str, kept: Kept) -> None:
        """Keep a contraction until its direction is known."""
        ...

    def book(self, name: str, contributions: Tensor) -> Tensor:
        """Note that a parameter was scored in this backward; return the probe's gradient ``[n, k]``."""
        ...

    def settle(self, name: str, saved: tuple[Any, ...], b: Tensor) -> Tensor | None:
        """Contract one parameter by the rule's project form, or keep it for later (then return None)."""
        ...


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return what was saved, in order; raises if a tensor was modified in place since."""
    tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
    return tuple(next(tensors) if is_tensor else next(others) for is_tensor in ctx.is_tensor)


class Tap(torch.autograd.Function):
    """The identity on a layer's output; its backward contracts (the *project* form).

    The layer's own forward and backward stay the framework's, bit for bit.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, observer: Observer, saved: tuple[Any, ...], *probes: Tensor) -> Tensor:
        """Pass ``out`` on; remember what the contraction needs."""
        ctx.observer = observer
        ctx.is_tensor = [isinstance(x, Tensor) for x in saved]
        ctx.others = [x for x in saved if not isinstance(x, Tensor)]
        ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        # The same tensor, so that an in-place activation may follow.
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on; return ⟨g_n, v⟩ for the probes."""
        (b,) = grads
        saved, observer = _saved(ctx), ctx.observer
        return (b, None, None, *(observer.settle(name, saved, b) for name in observer.names))


class ExpandTap(torch.autograd.Function):
    """Give a batch-free output one copy per sample, so that its gradient arrives sample by sample.

    Forward ``[1, ...]`` or ``[...]`` to ``[n, ...]`` (a view); the backward sums over samples, which is what
    broadcasting would have done, and contracts each sample's part.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, batched: bool, observer: Observer, saved: Any, *probes: Tensor) -> Tensor:
        """Expand ``out``; ``batched`` tells that its leading dimension is a batch of one."""
        ctx.observer, ctx.batched = observer, batched
        ctx.is_tensor = [isinstance(x, Tensor) for x in saved]
        ctx.others = [x for x in saved if not isinstance(x, Tensor)]
        ctx.save_for_backward(*[x for x in saved if isinstance(x, Tensor)])
        return (out if batched else out.unsqueeze(0)).expand(observer.n, *out.shape[1 if batched else 0 :])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Sum over samples for the layer, contract per sample for the probes."""
        (b,) = grads
        observer, n = ctx.observer, ctx.observer.n
        whole = tuple(
            (x if ctx.batched else x.unsqueeze(0)).expand(n, *x.shape[1 if ctx.batched else 0 :]) if isinstance(x, Tensor) else x
            for x in _saved(ctx)
        )
        scores = [observer.settle(name, whole, b) for name in observer.names]
        return (b.sum(0, keepdim=ctx.batched), None, None, None, *scores)

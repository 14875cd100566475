"""Appendix D.3, first half: what the layers of one forward leave for the ghost products.

While a :class:`Capture` is open, a layer runs with its parameters frozen, so that autograd does
not form the gradient of training and validation rows together. Kept are the layer's input x, and
the places in the graph where the gradient at its output, and the gradient that it passes on to its
own input, will arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from inrun.errors import RowOwnershipError, StepError
from inrun.paper.layers import EmbeddingRule, Layer, trainable
from inrun.torch_private import version_of


@dataclass(frozen=True)
class Call:
    """One call of a layer in the forward.

    Attributes:
        layer: The layer.
        x: Its input, ``[n + m, ...]``, in the graph.
        output: Where the gradient at its output arrives.
        input: Where the gradient that this call passes on to its input arrives, added to that of
            other uses of the input; None where the input is data, and in first order.
        version: How often ``x`` had been written to.
    """

    layer: Layer
    x: Tensor
    output: GradientEdge
    input: GradientEdge | None
    version: int

    def check_input(self) -> None:
        """Raise if the input was overwritten after the forward."""
        if version_of(self.x) != self.version:
            raise StepError(
                f"the input of layer '{self.layer.name}' was changed in place after the layer ran, "
                "so that its gradient cannot be computed. Use the operation that is not in place"
            )


class Capture(contextlib.ExitStack):
    """Hooks on the layers of a model while the batch runs forward; a context manager.

    Args:
        layers: What to observe.
        rows: Rows of the batch, training and validation.
        through_inputs: Also note where gradients pass through the layers (second order).

    Attributes:
        calls: The calls so far, in the order of the forward.
    """

    def __init__(self, layers: Sequence[Layer], rows: int, through_inputs: bool) -> None:
        """Place the hooks."""
        super().__init__()
        self.rows, self.through_inputs = rows, through_inputs
        self.calls: list[Call] = []
        self.callback(self.calls.clear)
        for layer in layers:
            self._observe(layer)

    def _observe(self, layer: Layer) -> None:
        frozen: list[nn.Parameter] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.is_grad_enabled():
                return
            if not args:
                raise StepError(f"layer '{layer.name}' got its input by keyword; give it first")
            frozen.extend(trainable(module).values())
            for p in frozen:
                p.requires_grad_(False)

        def after(module: nn.Module, args: tuple[Any, ...], out: Tensor | None) -> Tensor | None:
            called = bool(frozen)
            for p in frozen:
                p.requires_grad_(True)
            frozen.clear()
            return self._note(layer, args[0], out) if called and out is not None else None

        self.callback(layer.module.register_forward_pre_hook(before).remove)
        # Also after a forward that failed (out is None), which must not leave parameters frozen.
        self.callback(layer.module.register_forward_hook(after, always_call=True).remove)

    def _note(self, layer: Layer, x: Tensor, out: Tensor) -> Tensor:
        """Keep a call; return its output."""
        x, out = self._by_rows(layer, x, out)
        if not out.requires_grad:  # the first layer: data at its input, frozen parameters
            out = out.detach().requires_grad_()
        passes_on = self.through_inputs and x.requires_grad
        at_input = get_gradient_edge(x) if passes_on else None
        self.calls.append(Call(layer, x, get_gradient_edge(out), at_input, version_of(x)))
        return out.clone() if out.is_leaf else out  # a leaf could not be changed in place

    def _by_rows(self, layer: Layer, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return input and output with one row per row of the batch; shared positions repeat."""
        if x.dim() > 0 and len(x) == self.rows == len(out):
            return x, out
        if isinstance(layer.rule, EmbeddingRule) and (x.dim() == 1 or len(x) == 1):
            x, out = (x.unsqueeze(0), out.unsqueeze(0)) if x.dim() == 1 else (x, out)
            return x.expand(self.rows, *x.shape[1:]), out.expand(self.rows, *out.shape[1:])
        raise RowOwnershipError(
            f"layer '{layer.name}' maps shape {tuple(x.shape)} to {tuple(out.shape)}; the first "
            f"dimension of both must be the {self.rows} rows of the batch, training rows (one per "
            "id) and then validation rows"
        )

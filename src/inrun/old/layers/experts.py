"""Mixtures of experts of transformers (Mixtral, OLMoE, Qwen and many more): recognised by what they compute.

For a position h that is sent to experts e with shares w_e, the module returns Σ_e w_e D_e φ(U_e h): ``gate_up_proj`` (or
``up_proj``) holds all U_e, ``down_proj`` all D_e, with or without biases, stored ``[E, o, i]`` or ``[E, i, o]``; φ is the
module's own. Whether transformers runs a loop, batched or grouped products, the function is the same. The rule runs it as
one product per expert on pairs (position, expert) that are sorted by expert; see ``routed.py`` for the gradients.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from inrun.old.layers.registry import LayerRule, nbytes_of, register_finder
from inrun.old.layers.routed import Order, Routed, biases, multiply
from inrun.old.layers.seam import Call, gradients_for_probes, unrounded
from inrun.old.layers.shapes import Formed, GradientShape, Parts


@dataclass(frozen=True)
class Experts:
    """What the module is beside tensors."""

    count: int
    #: Weights are stored ``[E, i, o]``.
    transposed: bool
    gated: bool
    biased: bool

    @property
    def layers(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of both layers' parameters: weight and, where there is one, bias."""
        up = "gate_up_proj" if self.gated else "up_proj"
        return tuple((name, f"{name}_bias") if self.biased else (name,) for name in (up, "down_proj"))  # type: ignore[return-value]


def shapes_of(experts: Experts, names: tuple[str, ...], order: Order, a: Tensor, b: Tensor) -> dict[str, GradientShape]:
    """Map input and output gradient of one layer, pairs sorted, to its parameters' gradients."""
    found: dict[str, GradientShape] = {}
    for name in names:
        if name.endswith("_bias"):
            found[name] = biases(b, order)
        else:
            found[name] = Routed(a, b, order) if experts.transposed else Routed(b, a, order)
    return found


class ExpertLayer(torch.autograd.Function):
    """One of the two layers on sorted pairs, ``[S, i]`` to ``[S, o]``; gradients and contractions come from the same tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        buffers: dict[str, Tensor],
        names: tuple[str, ...],
        order: Order,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *asked: Tensor,
    ) -> Tensor:
        """Multiply, expert by expert; ``asked`` are the directions, then the probes."""
        given = call.given(asked)
        ctx.call, ctx.buffers, ctx.names, ctx.order, ctx.count = call, buffers, names, order, len(given)
        ctx.save_for_backward(x, weight, *given)
        return forward_layer(call.constants, order, x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and what was asked for."""
        call, order, (b,) = ctx.call, ctx.order, grads
        x, weight, *given = ctx.saved_tensors
        buffers, ctx.buffers = ctx.buffers, {}
        needs = dict(zip(ctx.names, ctx.needs_input_grad[5:7], strict=False))
        with unrounded(b):
            grad_x = multiply(order, b.to(weight.dtype), weight, not call.constants.transposed) if ctx.needs_input_grad[4] else None
            wanted = tuple(name for name in ctx.names if needs[name] or name in call.asked_names)
            shapes = shapes_of(call.constants, wanted, order, x, b)
            totals, leaving = gradients_for_probes(call, shapes, given, buffers, want_totals=True)
        own = [totals[name].to(weight.dtype) if needs[name] else None for name in ctx.names]
        own += [None] * (2 - len(own))
        return (None, None, None, None, grad_x, *own, *([None] * ctx.count), *leaving)


def forward_layer(experts: Experts, order: Order, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the layer's output on sorted pairs."""
    out = multiply(order, x.to(weight.dtype), weight, experts.transposed)
    return out if bias is None else out.add_(bias[order.experts.reshape(-1)[order.sorted]])


class TakenExperts(torch.autograd.Function):
    """The identity on what the module made; the backward runs the experts once more to have the gradients inside."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        buffers: dict[str, Tensor],
        module: Any,
        order: Order,
        made: Tensor,
        hidden: Tensor,
        shares: Tensor,
        *asked: Tensor,
    ) -> Tensor:
        """Pass it on; ``asked`` are the directions, then the probes."""
        given = call.given(asked)
        ctx.call, ctx.buffers, ctx.module, ctx.order, ctx.count = call, buffers, module, order, len(given)
        ctx.save_for_backward(hidden, shares, *(module.get_parameter(k) for names in call.constants.layers for k in names), *given)
        return made.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Pass the gradient on, and return what was asked for."""
        call, order, (b,) = ctx.call, ctx.order, grads
        names = [name for layer in call.constants.layers for name in layer]
        hidden, shares, *rest = ctx.saved_tensors
        weights, given = dict(zip(names, rest, strict=False)), rest[len(names) :]
        buffers, ctx.buffers = ctx.buffers, {}
        inside: list[tuple[Tensor, Tensor]] = []

        def run(layer: int, x: Tensor) -> Tensor:
            with torch.no_grad():
                made = forward_layer(call.constants, order, x.detach(), *_pair(weights, call.constants.layers[layer]))
            inside.append((x.detach(), made.requires_grad_()))
            return made

        shapes: dict[str, GradientShape] = {}
        with unrounded(b):
            with torch.enable_grad():
                up = run(0, sorted_inputs(hidden, order))
                between = activate(ctx.module, up)
                out = combine(run(1, between), shares, order, hidden)
            b_down = torch.autograd.grad(out, inside[1][1], b)[0]
            last = weights[call.constants.layers[1][0]]
            b_between = multiply(order, b_down.to(last.dtype), last, not call.constants.transposed)
            b_up = torch.autograd.grad(between, inside[0][1], b_between.to(between.dtype))[0]
            for layer, (x, _), grad in zip(call.constants.layers, inside, (b_up, b_down), strict=True):
                shapes |= shapes_of(call.constants, tuple(k for k in layer if k in call.asked_names), order, x, grad)
            leaving = gradients_for_probes(call, shapes, given, buffers, want_totals=False)[1]
        return (None, None, None, None, b, None, None, *([None] * ctx.count), *leaving)


def _pair(weights: dict[str, Tensor], names: tuple[str, ...]) -> tuple[Tensor, Tensor | None]:
    return weights[names[0]], weights[names[1]] if len(names) > 1 else None


def sorted_inputs(hidden: Tensor, order: Order) -> Tensor:
    """Return the position of every sorted pair, ``[S, d]``; ``hidden`` ``[n·t, d]``."""
    choices = order.experts.numel() // max(len(hidden), 1)
    return hidden[torch.div(order.sorted, max(choices, 1), rounding_mode="floor")]


def activate(module: Any, up: Tensor) -> Tensor:
    """Return φ of the first layer's output, as the module computes it."""
    made: Tensor = module._apply_gate(up) if module.has_gate else module.act_fn(up)
    return made


def combine(down: Tensor, shares: Tensor, order: Order, hidden: Tensor) -> Tensor:
    """Add up what the experts made of every position, by their shares: ``[S, d]`` to ``[n·t, d]``."""
    weighted = down[order.back] * shares.reshape(-1, 1)
    return weighted.view(len(hidden), -1, down.shape[1]).sum(1).to(hidden.dtype)


class ExpertsRule(LayerRule):
    """Experts whose weights are tensors of three dimensions."""

    label = "experts"
    whole = True
    flat = True

    def covers(self, module: nn.Module, names: set[str]) -> bool:
        """Weights and biases of both layers."""
        return names <= {name for layer in self.constants(module).layers for name in layer}

    def constants(self, module: Any) -> Experts:
        """Return what the module is."""
        return Experts(module.num_experts, bool(module.is_transposed), bool(module.has_gate), bool(module.has_bias))

    def inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return positions ``[n·t, d]``, their experts and shares ``[n·t, choices]``."""
        given = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
        return given["hidden_states"], given["top_k_index"], given["top_k_weights"]

    def run_scored(
        self,
        call: Call,
        buffers: dict[str, Tensor],
        asked: list[Tensor],
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
    ) -> Any:
        """Run the experts (or take what they ``made``) with probes."""
        hidden, chosen, shares = self.inputs(module, args, kwargs)
        experts: Experts = call.constants
        order = Order(chosen.detach().reshape(call.n, -1), experts.count)
        if made is not None:
            return TakenExperts.apply(call, buffers, module, order, made, hidden.detach(), shares.detach(), *asked)

        def layer(names: tuple[str, ...], x: Tensor) -> Tensor:
            parameters = {name: module.get_parameter(name) for name in names}
            part, tensors = part_of(call, asked, names)
            found: Tensor = ExpertLayer.apply(part, buffers, names, order, x, *_pair(parameters, names), *tensors)
            return found

        up, down = experts.layers
        between = activate(module, layer(up, sorted_inputs(hidden, order)))
        return combine(layer(down, between), shares, order, hidden)

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """The smaller of factors and formed gradients."""
        formed = super().kept_as(constants, name, parameter, inputs, dtype, n)
        if name.endswith("_bias") or n == 0:
            return formed
        m, kind = inputs[1].numel() // n, inputs[0].dtype
        sides: Parts = tuple(((n, m, size), kind) for size in parameter.shape[1:])
        parts: Parts = (*sides, ((n, m), torch.float64))
        return (Routed, parts) if nbytes_of(parts) < nbytes_of(formed[1]) else formed

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Put the number of experts back."""
        return Formed(*parts) if kind is Formed else Routed.of(parts, constants.count)


def part_of(call: Call, asked: list[Tensor], names: tuple[str, ...]) -> tuple[Call, list[Tensor]]:
    """Return the part of a call that asks for some parameters, and what is given and probed for them."""
    given, probes = iter(asked), iter(asked[sum(ask.given for ask in call.asks) :])
    kept: list[Tensor] = []
    leaving: list[Tensor] = []
    for ask in call.asks:
        some, leaves = [next(given) for _ in range(ask.given)], [next(probes) for _ in range(ask.probes)]
        if ask.name in names:
            kept += some
            leaving += leaves
    return dataclasses.replace(call, asks=tuple(ask for ask in call.asks if ask.name in names)), [*kept, *leaving]


_rule = ExpertsRule()
_WANTED = ("num_experts", "is_transposed", "has_gate", "has_bias", "has_post_expert_norm", "_is_expert_parallel", "_apply_gate")


@torch.no_grad()
def _computes_the_formula(module: Any) -> bool:
    """Run the module with small random weights in place of its own, and compare."""
    experts = _rule.constants(module)
    generator, device = torch.Generator().manual_seed(0), next(module.parameters()).device
    d, width, positions = 16, 16, 5
    sizes: dict[str, tuple[int, ...]] = {}
    for (name, *bias), (i, o) in zip(experts.layers, ((d, width * (1 + experts.gated)), (width, d)), strict=True):
        sizes[name] = (experts.count, i, o) if experts.transposed else (experts.count, o, i)
        sizes |= dict.fromkeys(bias, (experts.count, o))
    choices = min(2, experts.count)
    chosen = torch.rand(positions, experts.count, generator=generator).topk(choices).indices.to(device)
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):  # some kernels do not take the first
        weights = {k: torch.randn(*size, generator=generator, dtype=dtype).to(device) * 0.3 for k, size in sizes.items()}
        hidden, shares = (torch.rand(positions, size, generator=generator, dtype=dtype).to(device) for size in (d, choices))
        try:
            out = torch.func.functional_call(module, weights, (hidden, chosen, shares))
            order = Order(chosen.reshape(1, -1), experts.count)
            up = forward_layer(experts, order, sorted_inputs(hidden, order), *_pair(weights, experts.layers[0]))
            down = forward_layer(experts, order, activate(module, up), *_pair(weights, experts.layers[1]))
            mine = combine(down, shares, order, hidden)
        except Exception:  # noqa: BLE001, S112 - any failure means "not this kind of experts", or not in this precision
            continue
        return isinstance(out, Tensor) and out.shape == mine.shape and bool((out - mine).abs().max() < tolerance)
    return False


@register_finder
def find_experts(module: Any) -> LayerRule | None:
    """Recognise the experts of transformers by what they compute, whichever implementation is chosen."""
    if not type(module).__module__.startswith("transformers.") or not all(hasattr(module, name) for name in _WANTED):
        return None
    if module.has_post_expert_norm or module._is_expert_parallel or any(p.device.type == "meta" for p in module.parameters()):
        return None
    names = {name for name, _ in module.named_parameters()}
    known = {name for layer in _rule.constants(module).layers for name in layer}
    return _rule if names == known and _computes_the_formula(module) else None

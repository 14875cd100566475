"""Normalisation layers: LayerNorm, RMSNorm and the norms of transformers.

With x̂ the normalised input, the gradient of sample n is Σ_t b_nt ∘ x̂_nt at the weight and Σ_t b_nt at the bias. These
are as small as the layer, so they are formed, and their sum over samples is the weight gradient itself.
"""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inrun.old.layers.layout import SCRATCH_BYTES, by_sample, scratch_like, sum_positions
from inrun.old.layers.registry import LayerRule, Owner, register, register_finder
from inrun.old.layers.shapes import Formed, GradientShape


@dataclass(frozen=True)
class NormConstants:
    """x̂ = (x − μ) / √(variance + ε), or x / √(mean x² + ε) where not ``centred``; the output is x̂ ∘ w, or x̂ ∘ (1 + w)."""

    shape: tuple[int, ...]
    eps: float | None
    centred: bool
    plus_one: bool = False
    #: Where the module computes its statistics in this dtype, whatever its input's; and whether x̂ in that of the input.
    dtype: torch.dtype | None = None
    product_in_input: bool = False

    def statistics(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return μ (None where not centred) and 1/deviation, over the last dimensions, kept as 1."""
        # The framework's kernels compute in single precision at least, and take their default ε from it.
        x = x.to(torch.promote_types(x.dtype, torch.float32) if self.dtype is None else self.dtype)
        over = tuple(range(-len(self.shape), 0))
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        if not self.centred:
            return None, torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
        if not torch.is_grad_enabled() and x.dtype in (torch.float32, torch.float64):
            # Ten times as fast as var_mean on CPUs; its statistics have no derivatives.
            _, mean, rstd = torch.native_layer_norm(x, self.shape, None, None, eps)
            return mean, rstd
        variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
        return mean, torch.rsqrt(variance + eps)

    def normalise(self, x: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
        """Return x̂, before any cast back to the dtype of the input."""
        wide = x if self.product_in_input else x.to(rstd.dtype if self.dtype is None else self.dtype)
        return (wide if mean is None else wide - mean) * rstd


class NormOwner(Owner):
    """A norm over the last dimension; LayerNorm by the framework's kernels, whose statistics the mapping uses again."""

    def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Normalise and scale; keep the statistics."""
        if constants.centred and constants.dtype is None:
            out, mean, rstd = torch.native_layer_norm(x, constants.shape, weight, bias, constants.eps)
            return out, (x, rstd, mean)
        centre, rstd = constants.statistics(x)
        out = constants.normalise(x, centre, rstd).to(x.dtype) * ((1.0 + weight) if constants.plus_one else weight)
        return out if bias is None else out + bias, (x, rstd) if centre is None else (x, rstd, centre)

    def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
        """Return r (w∘b − mean(w∘b) [where centred] − x̂ mean(w∘b ∘ x̂))."""
        x, rstd, *mean = saved
        if constants.centred and constants.dtype is None:
            # The bias takes no part in the gradient of the input.
            shape, mask = constants.shape, [True, False, False]
            return torch.ops.aten.native_layer_norm_backward(b, x, shape, mean[0], rstd, weight, None, mask)[0]
        if constants.dtype not in (None, x.dtype):
            # Computed in single precision inside a model of double: round as the module itself does.
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                wide = start if constants.product_in_input else start.to(constants.dtype)
                normalised = constants.normalise(wide, *constants.statistics(wide)).to(x.dtype)
            scale = (1.0 + weight) if constants.plus_one else weight
            return torch.autograd.grad(normalised, start, (b * scale).detach())[0]
        normalised = constants.normalise(x, mean[0] if mean else None, rstd)
        scaled = (b * ((1.0 + weight) if constants.plus_one else weight)).to(normalised.dtype)
        along = (scaled * normalised).mean(-1, keepdim=True)
        inner = scaled - normalised * along
        return ((inner - scaled.mean(-1, keepdim=True) if mean else inner) * rstd).to(x.dtype)


class NormRule(LayerRule):
    """A normalisation with an elementwise ``weight`` (and ``bias``)."""

    label = "norm"
    names: ClassVar[tuple[str, ...]] = ("weight", "bias")
    positionwise = True
    owner = NormOwner()
    turns = True

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nt ∘ x̂_nt for the weight, Σ_t b_nt for the bias; ``inputs`` may hold the statistics beside x."""
        x, dims = inputs[0], len(constants.shape)
        found: dict[str, GradientShape] = {}
        if "weight" in names:
            if len(inputs) == 1:
                mean, rstd = constants.statistics(x)
            else:
                mean, rstd = inputs[2] if len(inputs) > 2 else None, inputs[1]
            in_place = not torch.is_grad_enabled() and dims == 1 and x.dtype == b.dtype == rstd.dtype
            if in_place and x.dtype in (torch.float32, torch.float64):
                found["weight"] = Formed(form_normalised(x, mean, rstd, b, n))
            else:
                wide = torch.promote_types(torch.promote_types(b.dtype, torch.float32), rstd.dtype)
                normalised = constants.normalise(x, mean, rstd)
                found["weight"] = Formed(by_sample(normalised * b.to(wide), n, dims).sum(1, dtype=wide))
        if "bias" in names:
            exact = dims == 1 and b.dtype in (torch.float32, torch.float64)
            summed = by_sample(b, n, dims)
            wide = torch.promote_types(b.dtype, torch.float32)
            found["bias"] = Formed(sum_positions(summed) if exact else summed.sum(1, dtype=wide))
        return found

    def by_position(self, module: nn.Module, features: int) -> bool:
        """Unless it is over the positions, too."""
        weight = module.weight
        assert isinstance(weight, Tensor)
        return weight.dim() <= features

    def owns(self, module: nn.Module, inputs: tuple[Tensor, ...], n: int, forced: bool) -> bool:
        """Over one dimension, in full precision."""
        x, weight = inputs[0], module.weight
        assert isinstance(weight, Tensor)
        return weight.dim() == 1 and x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)


def form_normalised(x: Tensor, mean: Tensor | None, rstd: Tensor, b: Tensor, n: int) -> Tensor:
    """Return Σ_t r_t (b ∘ (x − μ))_nt, ``[n, d]``, which are the per-sample gradients of a norm's weight.

    Centring comes first, since b · x and μ b · 1 nearly cancel where the mean is large. The one temporary is a reused
    buffer: fresh pages would cost more than the arithmetic.
    """
    x, b = by_sample(x, n, 1), by_sample(b, n, 1)
    mean = None if mean is None else mean.reshape(n, -1, 1)
    rows = rstd.reshape(n, 1, -1)
    if 0 < x.nbytes <= SCRATCH_BYTES:
        scratch = scratch_like(x)
        centred = x if mean is None else torch.sub(x, mean, out=scratch)
        return torch.bmm(rows, torch.mul(centred, b, out=scratch)).squeeze(1)
    piece = max(1, SCRATCH_BYTES * n // max(x.nbytes, 1))
    parts = []
    for first in range(0, n, piece):
        group = slice(first, first + piece)
        scratch = scratch_like(x[group])
        if mean is None:
            torch.mul(x[group], b[group], out=scratch)
        else:
            torch.sub(x[group], mean[group], out=scratch).mul_(b[group])
        parts.append(torch.bmm(rows[group], scratch)[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else x.new_zeros(0, x.shape[2])


@register(nn.LayerNorm)
class LayerNormRule(NormRule):
    """``torch.nn.LayerNorm``."""

    label = "layer norm"

    def constants(self, module: Any) -> NormConstants:
        """Centred, over the module's dimensions."""
        return NormConstants(tuple(module.normalized_shape), module.eps, centred=True)


@register(nn.RMSNorm)
class RMSNormRule(NormRule):
    """``torch.nn.RMSNorm``: x̂ = x / √(mean x² + ε)."""

    label = "RMS norm"
    names = ("weight",)

    def constants(self, module: Any) -> NormConstants:
        """Not centred."""
        return NormConstants(tuple(module.normalized_shape), module.eps, centred=False)


class KnownNormRule(RMSNormRule):
    """A norm of transformers, recognised by what it computes: many names and texts, a handful of formulas.

    Llama's casts before the product, OLMo's after, T5's keeps the input's dtype, Gemma's multiplies by 1 + weight, Cohere's
    centres. All compute x̂ in float32 at the most.
    """

    exact = False

    def __init__(self, centred: bool, plus_one: bool, product_in_input: bool) -> None:
        """Take one of the formulas."""
        self.centred, self.plus_one, self.product_in_input = centred, plus_one, product_in_input

    def constants(self, module: Any) -> NormConstants:
        """The formula with the module's ε."""
        shape, eps = tuple(module.weight.shape), _eps_of(module)
        return NormConstants(shape, eps, self.centred, self.plus_one, torch.float32, self.product_in_input)


_formulas = [KnownNormRule(*choice) for choice in itertools.product((False, True), repeat=3)]
_found: dict[type[nn.Module], LayerRule | None] = {}


def _eps_of(module: nn.Module) -> float | None:
    names = ("variance_epsilon", "eps", "epsilon", "layer_norm_epsilon")
    return next((float(value) for name in names if isinstance(value := getattr(module, name, None), float)), None)


@torch.no_grad()
def _matching_formula(module: nn.Module) -> LayerRule | None:
    """Run the norm on random rows and return the rule whose formula gives the same, if any does."""
    weight = module.get_parameter("weight")
    generator = torch.Generator().manual_seed(0)
    # In double precision, where formulas that differ in a cast can be told apart.
    x, w = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(weight.device)
        for shape in ((3, len(weight)), weight.shape)
    )
    try:
        out = torch.func.functional_call(module, {"weight": w}, (x,))
    except Exception:  # noqa: BLE001 - any failure means "not this kind of norm"; the fallback then serves
        return None
    if not isinstance(out, Tensor) or out.shape != x.shape:
        return None
    found = [(float((out - NormOwner().run(rule.constants(module), x, w, None)[0]).abs().max()), rule) for rule in _formulas]
    off, best = min(found, key=lambda pair: pair[0])
    return best if off < 1e-5 else None


@register_finder
def find_known_norm(module: nn.Module) -> LayerRule | None:
    """Recognise the norms of transformers by what they compute; a gate or any other second input is another function."""
    cls = type(module)
    if not (cls.__module__.startswith("transformers.") and "Norm" in cls.__name__):
        return None
    if cls not in _found:
        names = [name for name, _ in module.named_parameters()]
        simple = names == ["weight"] and module.get_parameter("weight").dim() == 1 and not list(module.children())
        one_input = len(inspect.signature(cls.forward).parameters) == 2
        meta = any(p.device.type == "meta" for p in module.parameters())
        _found[cls] = _matching_formula(module) if simple and one_input and not meta and _eps_of(module) is not None else None
    return _found[cls]

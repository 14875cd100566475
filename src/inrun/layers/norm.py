"""Normalisation layers: LayerNorm, RMSNorm and the RMS norms of transformers.

With x̂ the normalised input, the gradient of sample n is Σ_t b_nt ∘ x̂_nt at the weight and Σ_t b_nt at the bias. These
are as small as the layer, so they are formed, and their sum over samples is the weight gradient itself.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from inrun.layers.registry import KeptGradients, Rule, Saved, dot_each, register, register_finder
from inrun.layers.rows import SCRATCH_BYTES, by_sample, scratch_like, sum_positions
from inrun.layers.tap import Observer


def sum_in_full_precision(x: Tensor, n: int, feature_dims: int) -> Tensor:
    """Sum ``x`` over positions, ``[n, *features]``, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return by_sample(x, n, feature_dims).sum(1, dtype=dtype)


class NormRule(Rule):
    """A normalisation with an elementwise ``weight`` (and ``bias``)."""

    label = "norm"
    names: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """Return x̂, computed as the module computes it."""
        raise NotImplementedError

    def sample_gradient(self, module: nn.Module, name: str, saved: Saved, b: Tensor, n: int) -> Tensor:
        """Form Σ_t b_nt ∘ x̂_nt, or Σ_t b_nt for the bias."""
        feature_dims = module.get_parameter(name).dim()
        if name == "bias":
            return sum_in_full_precision(b, n, feature_dims)
        return sum_in_full_precision(self.normalise(module, saved[0]) * b, n, feature_dims)


def settle_formed(observer: Observer, formed: dict[str, Tensor]) -> list[Tensor | None]:
    """Turn formed per-sample gradients into probe gradients, or keep the ones that are deferred."""
    scores: list[Tensor | None] = []
    for name in observer.names:
        v = observer.direction(name)
        if v is None:
            observer.keep(name, KeptGradients(formed[name]))
        scores.append(None if v is None else observer.book(name, dot_each(formed[name], v)))
    return scores


@register(nn.LayerNorm)
class LayerNormRule(NormRule):
    """``torch.nn.LayerNorm``."""

    label = "layer norm"

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """Return (x − mean) / √(variance + ε)."""
        return torch.nn.functional.layer_norm(x, module.normalized_shape, None, None, module.eps)

    def shared_forward(self, module: Any, args: tuple[Any, ...], observer: Observer, forced: bool) -> Tensor | None:
        """Run the framework's own kernels, and use the statistics of the forward in the contraction."""
        (x,) = args
        if module.weight is None or x.dtype != module.weight.dtype or len(module.normalized_shape) != 1:
            return None
        if x.dtype not in (torch.float32, torch.float64):
            return None
        out: Tensor = SharedLayerNorm.apply(x, module.weight, module.bias, module.eps, observer, *observer.probes)
        return out


class SharedLayerNorm(torch.autograd.Function):
    """LayerNorm by the framework's kernels, contracted with the statistics that its forward left behind."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, observer: Observer, *probes: Tensor
    ) -> Tensor:
        """Normalise and keep mean and 1/deviation."""
        out, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.bias, ctx.observer = bias, observer
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the framework's gradients, and ⟨g_n, v⟩ for the probes."""
        x, mean, rstd, weight = ctx.saved_tensors
        observer, b = ctx.observer, grads[0].contiguous()
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_x = None
        if of_input:
            mask = [True, False, False]
            grad_x = torch.ops.aten.native_layer_norm_backward(b, x, weight.shape, mean, rstd, weight, ctx.bias, mask)[0]
        formed = {}
        if of_weight:
            formed["weight"] = form_normalised(x, mean, rstd, b, observer.n)
        if ctx.bias is not None and of_bias:
            formed["bias"] = sum_positions(by_sample(b, observer.n, 1))
        usual = (formed[name].sum(0) if name in formed else None for name in ("weight", "bias"))
        return (grad_x, *usual, None, None, *settle_formed(observer, formed))


def form_normalised(x: Tensor, mean: Tensor, rstd: Tensor, b: Tensor, n: int) -> Tensor:
    """Return Σ_t r_t (b ∘ (x − μ))_nt, ``[n, d]``, which are the per-sample gradients of a layer norm's weight.

    Centring comes first, since b · x and μ b · 1 nearly cancel where the mean is large. The one temporary is a reused
    buffer: fresh pages would cost more than the arithmetic.
    """
    x, b, mean = by_sample(x, n, 1), by_sample(b, n, 1), mean.reshape(n, -1, 1)
    rows = rstd.reshape(n, 1, -1)
    piece = max(1, SCRATCH_BYTES * n // max(x.nbytes, 1))
    parts = []
    for first in range(0, n, piece):
        group = slice(first, first + piece)
        centred = torch.sub(x[group], mean[group], out=scratch_like(x[group]))
        parts.append(torch.bmm(rows[group], centred.mul_(b[group]))[:, 0])
    return torch.cat(parts) if parts else x.new_zeros(0, x.shape[2])


class ScaleRows(torch.autograd.Function):
    """``x̂ ∘ weight`` with the weight gradient as the sum of the per-sample gradients (the shared form of RMS norms)."""

    @staticmethod
    def forward(ctx: Any, normalised: Tensor, weight: Tensor, observer: Observer, *probes: Tensor) -> Tensor:
        """Scale the normalised rows."""
        ctx.save_for_backward(normalised, weight)
        ctx.observer = observer
        return normalised * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Return the usual gradients, and ⟨g_n, v⟩ for the probes."""
        (b,) = grads
        normalised, weight = ctx.saved_tensors
        formed = {"weight": sum_in_full_precision(b * normalised, ctx.observer.n, weight.dim())}
        scores = settle_formed(ctx.observer, formed)
        return (b * weight, formed["weight"].sum(0).to(weight.dtype), None, *scores)


@register(nn.RMSNorm)
class RMSNormRule(NormRule):
    """``torch.nn.RMSNorm``: x̂ = x / √(mean x² + ε)."""

    label = "RMS norm"
    names = ("weight",)

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """Return x̂."""
        return torch.nn.functional.rms_norm(x, module.normalized_shape, None, module.eps)

    def shared_forward(self, module: Any, args: tuple[Any, ...], observer: Observer, forced: bool) -> Tensor | None:
        """Let the framework differentiate x̂; own only the product with the weight."""
        (x,) = args
        if x.dtype != module.weight.dtype:
            return None
        out: Tensor = ScaleRows.apply(self.normalise(module, x), module.weight, observer, *observer.probes)
        return out


def evaluate_with(module: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Run the class's ``forward`` on ``x`` with another ``weight``, past hooks and patches and without touching it."""
    shadow = object.__new__(type(module))
    shadow.__dict__.update(module.__dict__)
    shadow.__dict__.pop("forward", None)
    shadow.__dict__["_parameters"] = {}
    shadow.__dict__["weight"] = weight
    out: Tensor = type(module).forward(shadow, x)
    return out


class AffineNormRule(RMSNormRule):
    """A norm whose output is affine in its weight, ``x̂ ∘ weight + rest``, whatever its text: x̂ = f(1) − f(0).

    Serves the RMS norms of transformers, which come under many names: Llama's casts before the product, OLMo's after,
    T5's keeps the input's dtype, Gemma's multiplies by 1 + weight.
    """

    exact = False

    def __init__(self, has_rest: bool) -> None:
        """``has_rest`` tells that f(0) is not zero (Gemma)."""
        self.has_rest = has_rest

    def normalise(self, module: Any, x: Tensor) -> Tensor:
        """Return x̂ as the module computes it."""
        ones = evaluate_with(module, x, torch.ones_like(module.weight))
        return ones - evaluate_with(module, x, torch.zeros_like(module.weight)) if self.has_rest else ones

    def shared_forward(self, module: Any, args: tuple[Any, ...], observer: Observer, forced: bool) -> Tensor | None:
        """Own the product with the weight where there is nothing but the product, in full precision."""
        if self.has_rest or module.weight.dtype not in (torch.float32, torch.float64):
            return None
        return super().shared_forward(module, args, observer, forced)


_affine = {False: AffineNormRule(has_rest=False), True: AffineNormRule(has_rest=True)}
_found: dict[type[nn.Module], Rule | None] = {}


def _try_affine(module: nn.Module) -> Rule | None:
    """Run the norm on random rows and see whether it is affine and elementwise in its weight."""
    weight = module.get_parameter("weight")
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, weight.shape[0], generator=generator), torch.randn(weight.shape[0], generator=generator)
    x, w = x.to(weight), w.to(weight)
    try:
        zero, one, out = (evaluate_with(module, x, v) for v in (torch.zeros_like(w), torch.ones_like(w), w))
    except Exception:  # noqa: BLE001 - any failure means "not this kind of norm"; the fallback then serves
        return None
    if out.shape != x.shape or not torch.allclose(out, zero + w * (one - zero), rtol=2e-2, atol=1e-3):
        return None
    return _affine[bool(zero.abs().max() > 0)]


@register_finder
def find_affine_norm(module: nn.Module) -> Rule | None:
    """Recognise the RMS norms of transformers by what they compute."""
    cls = type(module)
    if not (cls.__module__.startswith("transformers.") and "Norm" in cls.__name__):
        return None
    if cls not in _found:
        names = [name for name, _ in module.named_parameters()]
        simple = names == ["weight"] and module.get_parameter("weight").dim() == 1 and not list(module.children())
        with torch.no_grad():
            _found[cls] = _try_affine(module) if simple else None
    return _found[cls]

"""Embedding tables and bags. The gradient of sample n at row w is Σ_t [token_nt = w] b_nt; row ``padding_idx`` has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from inrun.old.layers.layout import by_sample
from inrun.old.layers.registry import LayerRule, register, register_finder
from inrun.old.layers.shapes import GradientShape, LookUp, Parts
from inrun.old.layers.sketch import SketchPlan


@register(nn.Embedding)
class EmbeddingRule(LayerRule):
    """A table look-up. The layer's own backward stays the framework's; the contraction is n·t·d and needs no GEMM."""

    label = "embedding"
    names = ("weight",)
    sparse = True
    positionwise = True
    turns = True

    def refusal(self, module: nn.Module) -> str | None:
        """Refuse options under which the table's gradient is not the sum over its uses."""
        options = ("scale_grad_by_freq", "sparse", "max_norm")
        used = [option for option in options if getattr(module, option)]
        return f"nn.Embedding with {', '.join(used)} has another gradient than the sum over tokens" if used else None

    def constants(self, module: Any) -> tuple[int, int | None]:
        """Return the number of rows and the row of the padding."""
        return (module.weight.shape[0], module.padding_idx)

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """One look-up."""
        return {"weight": LookUp(inputs[0].reshape(n, -1), by_sample(b, n, 1), *constants)}

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """Output gradients and tokens."""
        t = inputs[0].numel() // max(n, 1)
        return LookUp, (((n, t, parameter.shape[1]), dtype), ((n, t), torch.float64))

    def sketched_as(self, plan: SketchPlan, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int) -> Parts:
        """Touched rows and tokens."""
        return LookUp.sketch_parts(plan, n, inputs, dtype)

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Put rows and padding back."""
        return LookUp.of(parts, *constants)


class EmbeddingBagRule(LayerRule):
    """``torch.nn.EmbeddingBag`` that adds up or averages: a look-up whose output gradient is that of the bag, by weight."""

    label = "embedding bag"
    names = ("weight",)
    sparse = True

    def refusal(self, module: Any) -> str | None:
        """Refuse options under which the table's gradient is not the sum over its uses."""
        used = [option for option in ("scale_grad_by_freq", "sparse", "max_norm") if getattr(module, option)]
        return f"nn.EmbeddingBag with {', '.join(used)} has another gradient than the sum over tokens" if used else None

    def constants(self, module: Any) -> tuple[int, int | None]:
        """Return the number of rows and the row of the padding."""
        return (module.weight.shape[0], module.padding_idx)

    def inputs(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
        """Return tokens ``[n, t]`` and their weights; bags that are laid end to end are filled up with tokens of weight 0."""
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        tokens, offsets, weights = (given.get(name) for name in ("input", "offsets", "per_sample_weights"))
        assert tokens is not None
        dtype = module.weight.dtype
        shares = torch.ones_like(tokens, dtype=dtype) if weights is None else weights.detach().to(dtype)
        if offsets is not None:
            ends = offsets[1:] if module.include_last_offset else torch.cat([offsets[1:], offsets.new_tensor([len(tokens)])])
            starts = offsets[:-1] if module.include_last_offset else offsets
            longest = int((ends - starts).max()) if len(starts) else 0
            places = starts.unsqueeze(1) + torch.arange(longest, device=tokens.device)
            inside = places < ends.unsqueeze(1)
            places = places.clamp(max=max(len(tokens) - 1, 0))
            tokens, shares = torch.where(inside, tokens[places], 0), shares[places] * inside
        if module.padding_idx is not None:
            shares = shares * (tokens != module.padding_idx)
        if module.mode == "mean":
            shares = shares / shares.sum(1, keepdim=True).clamp_min(1)
        return tokens, shares

    def lead(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """One number for the tokens of every bag: how long the longest is must not show."""
        tokens, shares = self.inputs(module, args, kwargs)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return ((tokens + 0.7 * places).sin().double() * (shares != 0)).sum(1, keepdim=True)

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """One look-up."""
        tokens, shares = inputs
        spread = b.unsqueeze(1) * shares.unsqueeze(2).to(b.dtype)
        return {"weight": LookUp(tokens.reshape(n, -1), by_sample(spread, n, 1), *constants)}

    kept_as = EmbeddingRule.kept_as
    sketched_as = EmbeddingRule.sketched_as
    restore = EmbeddingRule.restore


_bag = EmbeddingBagRule()


@register_finder
def find_bag(module: nn.Module) -> LayerRule | None:
    """Take the bags that add up or average; the largest entry of a bag is another function."""
    is_bag = isinstance(module, nn.EmbeddingBag) and type(module).forward is nn.EmbeddingBag.forward
    return _bag if is_bag and getattr(module, "mode", "max") != "max" else None

"""Section 4.2, remark on other layers: every layer as output = weight · features(input) + bias.

``features`` has no parameters: the identity for a linear layer, the patches of a convolution, the
normalised input of a norm. The gradient of the weight is then bilinear in the features a and the
gradient b at the output, which is all that the ghost products need. A layer is added by one class
and one entry of ``RULES``.

Letters: n rows of the batch, t positions, i and o features at input and output, g groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inrun.errors import CoverageError
from inrun.paper.ghost import Formed, Outer, Term


def by_position(x: Tensor) -> Tensor:
    """Return ``[n, ..., i]`` as ``[n, t, i]``."""
    return x.unsqueeze(1) if x.dim() == 2 else x.flatten(1, -2)


class LinearRule:
    """``nn.Linear``: the weight ``[o, i]`` has the gradient Σₜ bₙₜ ⊗ aₙₜ, as in the paper."""

    def refused_options(self, module: Any) -> list[str]:
        """Return the options of a module for which the rule would be wrong."""
        return []

    def features(self, module: Any, x: Tensor) -> Tensor:
        """Return what the weight is applied to."""
        return x

    def weight(self, module: Any, a: Tensor, b: Tensor) -> Term:
        """Return the per-row gradients of the weight from features and output gradients."""
        return Outer(by_position(b), by_position(a), module.weight.shape)

    def bias(self, module: Any, b: Tensor) -> Term:
        """Return the per-row gradients of the bias, Σₜ bₙₜ."""
        return Formed(by_position(b).sum(1))


class TransposedLinearRule(LinearRule):
    """``Conv1D`` of transformers: a linear layer whose weight is ``[i, o]``."""

    def weight(self, module: Any, a: Tensor, b: Tensor) -> Term:
        """Return Σₜ aₙₜ ⊗ bₙₜ."""
        return Outer(by_position(a), by_position(b), module.weight.shape)


class EmbeddingRule(LinearRule):
    """``nn.Embedding``: a linear layer on unit vectors, of which only the token is kept."""

    def refused_options(self, module: Any) -> list[str]:
        """Return options that change the weights or their gradient."""
        return [o for o in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, o)]

    def weight(self, module: Any, a: Tensor, b: Tensor) -> Term:
        """Return Σₜ e(tokenₙₜ) ⊗ bₙₜ; padding gets no gradient."""
        if module.padding_idx is not None:
            b = b * (a != module.padding_idx).unsqueeze(-1)
        tokens = a.flatten(1) if a.dim() > 1 else a.unsqueeze(1)
        return Outer(tokens, by_position(b), module.weight.shape)


class ConvolutionRule(LinearRule):
    """``nn.Conv1d`` and ``nn.Conv2d``: a linear layer on patches, one position per output pixel."""

    def features(self, module: Any, x: Tensor) -> Tensor:
        """Return the patches, ``[n, t, i]`` with i = channels · kernel size."""
        x, sizes = _padded(module, x), (module.kernel_size, module.dilation, module.stride)
        if x.dim() == 3:  # a row of pixels is an image of height 1
            x, sizes = x.unsqueeze(2), ((1, *sizes[0]), (1, *sizes[1]), (1, *sizes[2]))
        kernel, dilation, stride = sizes
        return F.unfold(x, kernel, dilation=dilation, stride=stride).transpose(1, 2)

    def weight(self, module: Any, a: Tensor, b: Tensor) -> Term:
        """Return Σₜ bₙₜ ⊗ aₙₜ; with groups, the small matrices of all groups are formed."""
        b, groups = b.flatten(2).transpose(1, 2), module.groups
        if groups == 1:
            return Outer(b, a, module.weight.shape)
        a, b = a.unflatten(2, (groups, -1)), b.unflatten(2, (groups, -1))
        return Formed(torch.einsum("ntgo,ntgi->ngoi", b, a).reshape(-1, *module.weight.shape))

    def bias(self, module: Any, b: Tensor) -> Term:
        """Return the sum over pixels."""
        return Formed(b.flatten(2).sum(2))


def _padded(module: Any, x: Tensor) -> Tensor:
    """Return the input of a convolution with its padding around it."""
    sides: list[int] = []
    for k in reversed(range(len(module.kernel_size))):  # F.pad begins with the last dimension
        both = module.dilation[k] * (module.kernel_size[k] - 1)
        if module.padding == "same":
            sides += [both // 2, both - both // 2]
        else:
            sides += [0, 0] if module.padding == "valid" else [module.padding[k]] * 2
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, sides, mode) if any(sides) else x


class NormRule(LinearRule):
    """``nn.LayerNorm`` and ``nn.RMSNorm``: output = weight ∘ normalised input + bias."""

    def features(self, module: Any, x: Tensor) -> Tensor:
        """Return the normalised input."""
        norm = F.rms_norm if isinstance(module, nn.RMSNorm) else F.layer_norm
        return norm(x, module.normalized_shape, eps=module.eps)

    def weight(self, module: Any, a: Tensor, b: Tensor) -> Term:
        """Return Σₜ bₙₜ ∘ aₙₜ."""
        return self.bias(module, a * b)

    def bias(self, module: Any, b: Tensor) -> Term:
        """Return Σₜ bₙₜ."""
        return Formed(b.reshape(len(b), -1, *module.normalized_shape).sum(1))


class GroupNormRule(NormRule):
    """``nn.GroupNorm``: one weight and bias per channel, the second dimension."""

    def features(self, module: Any, x: Tensor) -> Tensor:
        """Return the normalised input."""
        return F.group_norm(x, module.num_groups, eps=module.eps)

    def bias(self, module: Any, b: Tensor) -> Term:
        """Return the sum over what is behind the channels."""
        return Formed(b.reshape(len(b), module.num_channels, -1).sum(2))


RULES: dict[type[nn.Module], LinearRule] = {
    nn.Linear: LinearRule(),
    nn.Embedding: EmbeddingRule(),
    nn.Conv1d: ConvolutionRule(),
    nn.Conv2d: ConvolutionRule(),
    nn.LayerNorm: NormRule(),
    nn.RMSNorm: NormRule(),
    nn.GroupNorm: GroupNormRule(),
}


@dataclass(frozen=True)
class Layer:
    """A module with trainable parameters, under its name in the model, and its rule."""

    name: str
    module: nn.Module
    rule: LinearRule

    def features(self, x: Tensor) -> Tensor:
        """Return what the weight is applied to."""
        return self.rule.features(self.module, x)

    def terms(self, x: Tensor, b: Tensor) -> dict[nn.Parameter, Term]:
        """Return the per-row gradients of the trainable parameters.

        Args:
            x: Input of the layer, ``[n, ...]``.
            b: Gradient of the loss at its output, ``[n, ...]``.
        """
        found = self.weight_terms(self.features(x), b)
        bias = trainable(self.module).get("bias")
        if bias is not None:
            found[bias] = self.rule.bias(self.module, _precise(b, bias))
        return found

    def weight_terms(self, a: Tensor, b: Tensor) -> dict[nn.Parameter, Term]:
        """Return those of the weight, from the features instead of the input."""
        weight = trainable(self.module).get("weight")
        if weight is None:
            return {}
        a = _precise(a, weight) if a.is_floating_point() else a
        return {weight: self.rule.weight(self.module, a, _precise(b, weight))}


def _precise(x: Tensor, parameter: Tensor) -> Tensor:
    """Return values in the parameter's precision, at least float32."""
    return x.to(torch.promote_types(parameter.dtype, torch.float32))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of a module itself, by name."""
    return {name: p for name, p in module.named_parameters(recurse=False) if p.requires_grad}


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the modules with trainable parameters; CoverageError names those without a rule."""
    found: list[Layer] = []
    refused: list[str] = []
    for name, module in model.named_modules():
        names = list(trainable(module))
        if not names:
            continue
        rule, kind = _rule_of(module), type(module).__name__
        unknown = [] if rule is None else rule.refused_options(module)
        unknown += [n for n in names if n not in ("weight", "bias")]
        if rule is None or unknown:
            refused.append(f"'{name}' ({kind}{' with ' + ', '.join(unknown) if unknown else ''})")
        else:
            found.append(Layer(name, module, rule))
    if refused:
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        raise CoverageError(
            f"no ghost product for {', '.join(refused[:5])}{more}. Accepted are "
            f"{', '.join(kind.__name__ for kind in RULES)} of torch.nn and Conv1D of transformers. "
            'Freeze the parameters, or take form="direct", which works for every layer'
        )
    return found


def _rule_of(module: nn.Module) -> LinearRule | None:
    """Return the rule of a module that runs the forward of a known class, also as a subclass."""
    kind, forward = type(module), getattr(module.forward, "__func__", None)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return TransposedLinearRule()
    return next((rule for known, rule in RULES.items() if forward is known.forward), None)

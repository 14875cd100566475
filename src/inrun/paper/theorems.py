"""Section 4.1: the Shapley value of one step in closed form (Theorems 1 and 2).

One step of SGD moves the weights by −η Σₙ gₙ. With ∇ℓ and H the gradient and the Hessian of the
validation loss at the weights before the step, the Shapley value of sample n in the Taylor
expansion of the loss is, with the sign of the paper turned so that positive lowers the loss:

    first order    φₙ = η ⟨gₙ, ∇ℓ⟩                                           (Theorem 1)
    second order   φₙ = η ⟨gₙ, ∇ℓ⟩ − (η²/2) ⟨gₙ, H Σₘ gₘ⟩                    (Theorem 2)

The paper's batch loss is a sum. Here gₙ is the sample's part of the gradient of the loss that is
actually trained on, so that Σₙ gₙ is the batch gradient for a mean, too. η differs by parameter
where the optimizer has several groups, and clipping multiplies the batch gradient by a factor c;
cη then stands for η in the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

#: Learning rate η of every parameter that the optimizer moves; others count as 0.
Rates = dict[nn.Parameter, float]
#: G by parameter, the gradient of the training loss, where the loss depends on the parameter.
Gradients = dict[nn.Parameter, Tensor]


@dataclass(frozen=True)
class Products:
    """The inner products of one step; sums run over the parameters p.

    Attributes:
        first: Σ_p η_p ⟨gₙ, ∇ℓ⟩, ``[n]``.
        interaction: Σ_p η_p ⟨gₙ, H ηG⟩ with G = Σₘ gₘ, ``[n]``; None in first order.
        forms: How a parameter was contracted, "gram" or "formed".
    """

    first: Tensor
    interaction: Tensor | None
    forms: dict[nn.Parameter, str] = field(default_factory=dict)

    def shapley_values(self, clip: float = 1.0) -> Tensor:
        """Return φₙ for all samples, ``[n]``, in units of the validation loss.

        Args:
            clip: The factor c between the gradient G and what the optimizer used.
        """
        if self.interaction is None:
            return clip * self.first
        return clip * self.first - clip**2 / 2 * self.interaction

"""One training step under a :class:`~inrun.paper.scorer.GhostScorer`, from the loss to the update.

::

    with scorer.step(ids, validation_rows=m):      hooks on the layers (``capture``)
        losses = loss_per_row(model(rows))
        loss = scorer.loss(train, validation)      a scalar whose backward is ours
        loss.backward()                            one or two backpropagations; .grad is written
        clip_grad_norm_(...)                       allowed: one factor for all parameters
        optimizer.step()                           the factor is measured, the values are known
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import CoverageError, OptimizerError, StepError, ValidationError
from inrun.paper.backpropagation import MergedLoss, ghost_products
from inrun.paper.capture import Capture
from inrun.paper.direct import direct_products
from inrun.paper.theorems import Gradients, Products, Rates

#: How far a gradient's norm may be from c times that of the training rows, relative. bfloat16
#: rounds to 4e-3.
CLIP_TOLERANCE = 1e-2


class OpenStep:
    """A step that is under way.

    Args:
        optimizer: Whose step it is.
        parameters: All trainable parameters of the model, by name.
        capture: The hooks on the layers; None for the direct computation.
        ids: Sample ids, ``[n]``.
        form: "auto", "gram", "formed" or "direct".
        order: 1 or 2.
        checked: Shapes for which the rows were seen to be kept apart; grows.

    Attributes:
        loss: The losses, once they are known.
        products: What the backward found.
        clip: The factor c between the gradient and what the optimizer used, once it steps.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        capture: Capture | None,
        ids: Tensor,
        form: str,
        order: int,
        checked: set[Any],
    ) -> None:
        """Begin; nothing has run yet."""
        self._optimizer, self._trainable, self._capture = optimizer, parameters, capture
        self.ids, self._form, self._order, self._checked = ids, form, order, checked
        self.loss: MergedLoss | None = None
        self._rates: Rates = {}
        self._norms: dict[nn.Parameter, Tensor] = {}
        self.products: Products | None = None
        self.clip: float | None = None
        for name, p in parameters.items():
            if p.grad is not None and p.grad.any():
                raise StepError(
                    f"'{name}' has a gradient from before the step, and accumulation is not "
                    "supported. Call optimizer.zero_grad() between steps"
                )

    def merge(self, training: Tensor, validation: Tensor) -> Tensor:
        """Return the loss of the step, a leaf whose backward runs the backpropagations."""
        n = len(self.ids)
        if self.loss is not None:
            raise StepError("scorer.loss() was called twice in one step; a step has one backward")
        if training.shape != (n,) and (training.dim() > 0 or self._form == "direct"):
            scalar = "" if self._form == "direct" else ", or a scalar"
            raise ValidationError(
                f"the training loss has shape {tuple(training.shape)}; accepted are the samples' "
                f"shares of it, one per id, shape ({n},){scalar}"
            )
        if validation.dim() > 0:
            shape = tuple(validation.shape)
            raise ValidationError(f"the validation loss has shape {shape}; accepted is a scalar")
        for name, loss in (("training", training), ("validation", validation)):
            if not loss.requires_grad:
                raise ValidationError(
                    f"the {name} loss has no graph. Take it from the model's output inside the "
                    "step, without detach() or torch.no_grad()"
                )
        self.loss = MergedLoss(training, validation, training.sum() + validation, n)
        leaf = self.loss.total.detach().requires_grad_()
        leaf.register_hook(self._backpropagate)
        return leaf

    def _backpropagate(self, scale: Tensor) -> None:
        """Find the products; write the training rows' gradient, times ``scale``, to ``.grad``."""
        if self.loss is None or self.products is not None:
            raise StepError("a step has one backward, inside the step")
        self._rates = self._learning_rates()
        self.products, gradients = self._multiply(self.loss)
        for p, gradient in gradients.items():
            self._norms[p] = _norm(gradient)
            own = (scale * gradient).to(p.dtype)
            p.grad = own if p.grad is None else p.grad.add_(own)

    def _multiply(self, loss: MergedLoss) -> tuple[Products, Gradients]:
        if self._capture is None:
            every = list(self._trainable.values())
            return direct_products(loss.training, loss.validation, self._rates, self._order, every)
        calls = list(self._capture.calls)  # checkpoints run layers again during the backward
        if not calls:
            raise CoverageError("no layer of the model ran inside the step; run its forward there")
        shapes = tuple((call.layer.name, call.x.shape) for call in calls)
        if shapes not in self._checked and loss.total.isfinite():
            loss.check_rows(calls)
            self._checked.add(shapes)
        return ghost_products(calls, loss, self._rates, self._form, self._order, self._trainable)

    def _learning_rates(self) -> Rates:
        """Return η by parameter; negative where the optimizer maximises."""
        groups = self._optimizer.param_groups
        signed = [(g, -float(g["lr"]) if g.get("maximize") else float(g["lr"])) for g in groups]
        return {p: eta for group, eta in signed for p in group["params"]}

    @property
    def values(self) -> Tensor | None:
        """Return the Shapley values, ``[n]``; None before the optimizer has stepped."""
        if self.products is None or self.clip is None:
            return None
        return self.products.shapley_values(self.clip).detach()

    def before_update(self, *_: Any) -> None:
        """Measure the clip factor; the optimizer is about to step."""
        if self.products is None:
            raise StepError(
                "no backward has run before optimizer.step(); call "
                "scorer.loss(train_loss, validation_loss).backward() inside the step"
            )
        if self.clip is not None:
            raise StepError("the optimizer stepped twice; open a step for each update")
        if self._learning_rates() != self._rates:
            raise StepError("a learning rate changed after the backward; change it between steps")
        self.clip = self._clip_factor()

    @torch.no_grad()
    def _clip_factor(self) -> float:
        """Return c with ``.grad`` = c · G, from norms by parameter; 1 if they are not finite."""
        made = torch.stack(list(self._norms.values()))
        now = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._norms]
        used = torch.stack([_norm(g) for g in now])
        total = made.norm()
        if total == 0 or not (total + used.sum()).isfinite():
            return 1.0
        c = used.norm() / total
        wrong = (used - c * made).abs() > CLIP_TOLERANCE * c * (made + 1e-3 * total)
        if wrong.any():
            changed = list(self._norms)[int(wrong.nonzero()[0])]
            name = next(name for name, p in self._trainable.items() if p is changed)
            raise OptimizerError(
                f"the gradient of '{name}' was changed by another factor than those of the other "
                f"parameters ({float(c):.3g} overall). Between backward and optimizer.step(), one "
                "factor for all of them is accepted (clipping by norm, a loss scale)"
            )
        return float(c)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)

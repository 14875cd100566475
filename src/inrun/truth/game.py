"""The game of one optimizer step, played with the real optimizer and the real loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.errors import ConfigurationError, ValidationError
from inrun.truth.losses import Losses, Weights
from inrun.truth.moves import Mover
from inrun.truth.progress import Progress, reporting
from inrun.truth.untouched import untouched

_MEMORY = 256 * 2**20  # bytes that one chunk of subsets may take
_COPIES = 8  # of the moving weights per subset: gradient, weights, two moments, temporaries, a margin for activations
_LARGEST_CHUNK = 16  # measured from 4,000 to 1,700,000 weights: more rows only fall out of the cache
_VMAP_TENSOR = 4 * 2**20  # bytes the largest tensor may have under vmap
_FEWEST_ROWS = 4  # with fewer, vmap's own overhead is not repaid


class StepGame:
    """U(S) = ℓ(w) − ℓ(w + u(c·Σ_{n∈S} g_n)): how much the step lowers the validation loss if only the samples in S take part.

    u is the real optimizer's update from its state as it stands, g_n sample n's part of the batch gradient, and c the clip
    factor of the whole batch, the same for every S. What the optimizer does without a gradient, u(0), happens in every
    coalition, so the Shapley values are those of V(S) = U(S) − U(∅).

    Make the game right before the step. Everything it needs is copied: model, optimizer, gradients, modes and random states
    stay as they are, bit for bit, and training on afterwards does not change the game. ``sample_losses`` runs in the model's
    present modes and from the present random state (so dropout falls as it will in the real step); ``validation`` runs in
    eval mode from a fixed seed. Utilities are remembered, so no subset is evaluated twice.

    Use float64: a step's utility is a small difference of two losses.

    Attributes:
        n: Number of samples.
        gradients: g_n of all moving weights, flat, ``[n, P]``.
        clip: The clip factor c.
        loss: ℓ(w).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        validation: Callable[[nn.Module], Any],
        sample_losses: Callable[[nn.Module], Tensor],
        *,
        max_norm: float | None = None,
        proxy: bool = False,
        chunk: int | None = None,
    ) -> None:
        """Copy what the step starts from and take the per-sample gradients, by n backward passes.

        Args:
            model: The model about to be stepped.
            optimizer: Its optimizer or optimizers; parameters in none do not move.
            validation: Scalar loss of a model.
            sample_losses: Each sample's part of the batch loss, ``[n]``; their sum is what the training loop differentiates.
            max_norm: The training loop's ``clip_grad_norm_`` over all parameters of the model.
            proxy: Play the paper's SGD game instead, u(z) = −lr·z whatever the optimizer.
            chunk: Subsets evaluated at once; chosen by memory if not given.
        """
        if max_norm is not None and max_norm <= 0:
            raise ConfigurationError(f"max_norm must be positive, got {max_norm}")
        if chunk is not None and chunk < 1:
            raise ConfigurationError(f"chunk must be at least 1, got {chunk}")
        self._mover = Mover([optimizer] if isinstance(optimizer, Optimizer) else list(optimizer), proxy)
        self._losses = Losses(model, validation)
        if strangers := self._mover.parameters - set(self._losses.weights):
            shapes = ", ".join(str(tuple(p.shape)) for p in strangers)
            raise ConfigurationError(
                f"the optimizer holds parameters that are not in the model, of shape {shapes}; give the model that has them"
            )
        self._moving, self.gradients, self.clip = self._sample_gradients(model, sample_losses, max_norm)
        self.n = len(self.gradients)
        self._takes_part = (self.gradients != 0).any(1).cpu()
        self.loss = float(self._losses.looped({p: self._losses.weights[p].unsqueeze(0) for p in self._moving}))
        if not np.isfinite(self.loss):
            raise ValidationError(f"the validation loss before the step is {self.loss}")
        bytes_per_subset = sum(p.numel() * p.element_size() for p in self._moving) * _COPIES
        self._chunk = chunk if chunk is not None else max(1, min(_LARGEST_CHUNK, _MEMORY // bytes_per_subset))
        self._chunk_given = chunk is not None
        self._rows: int | None = None  # chosen when the first utility is asked for
        self._known: dict[bytes, float] = {}

    def utilities(self, masks: Tensor, progress: Progress = None) -> Tensor:
        """U(S) of each subset.

        Args:
            masks: Subsets, ``[B, n]`` bool.
            progress: Called with the subsets done and in all; True shows a bar.

        Returns:
            U, ``[B]`` float64.
        """
        masks = self._checked(masks)
        keys = [row.tobytes() for row in np.packbits(masks.numpy(), axis=1)]
        new = {key: row for row, key in enumerate(keys) if key not in self._known}
        rows = list(new.values())
        with reporting(progress, len(keys), "subsets") as report:
            for start in range(0, len(rows), self._chunk):
                part = rows[start : start + self._chunk]
                values = self.loss - self._loss_at(self._moved(masks[part]))
                if not bool(values.isfinite().all()):
                    subset = masks[part][~values.isfinite()][0].nonzero().flatten().tolist()
                    raise ValidationError(f"the validation loss is not finite after a step with the samples {subset} alone")
                self._known.update((keys[row], float(value)) for row, value in zip(part, values, strict=True))
                report(len(keys) - len(rows) + start + len(part))
        return torch.tensor([self._known[key] for key in keys], dtype=torch.float64)

    def taylor_utilities(self, masks: Tensor, order: int) -> Tensor:
        """The utilities if the loss were its Taylor polynomial around w, along the real move Δ_S of each subset.

        U₁(S) = −⟨∇ℓ, Δ_S⟩ and U₂(S) = U₁(S) − ½ Δ_Sᵀ H Δ_S.

        Args:
            masks: Subsets, ``[B, n]`` bool.
            order: 1 or 2.

        Returns:
            U₁ or U₂, ``[B]`` float64.
        """
        if order not in (1, 2):
            raise ConfigurationError(f"order must be 1 or 2, got {order!r}")
        masks = self._checked(masks)
        result = torch.zeros(len(masks), dtype=torch.float64)
        with self._losses.graph() as loss:
            gradient = _gradients(loss, self._moving, create_graph=order == 2, keep=True)
            for start in range(0, len(masks), self._chunk):
                rows = slice(start, start + self._chunk)
                moved = self._moved(masks[rows])
                moves = [moved[p] - self._losses.weights[p] for p in self._moving]
                for row in range(len(moves[0])):
                    move = [m[row] for m in moves]
                    value = -_inner(gradient, move)
                    if order == 2 and value.requires_grad:  # a loss linear in the weights has no Hessian
                        # d⟨∇ℓ, Δ⟩/dw = HΔ
                        product = _gradients(-value, self._moving, create_graph=False, keep=True)
                        value = value - 0.5 * _inner(product, move)
                    result[start + row] = value.detach()
        return result

    def _sample_gradients(
        self, model: nn.Module, sample_losses: Callable[[nn.Module], Tensor], max_norm: float | None
    ) -> tuple[list[nn.Parameter], Tensor, float]:
        """Return the parameters that move, g of them ``[n, P]`` and the clip factor over all parameters."""
        trainable = [p for p in model.parameters() if p.requires_grad]
        with untouched(model, weights=False), torch.enable_grad():
            losses = sample_losses(model)
            if not isinstance(losses, Tensor) or losses.dim() != 1 or len(losses) == 0:
                shape = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
                raise ConfigurationError(
                    f"sample_losses must return each sample's part of the batch loss as a vector [n], got {shape}"
                )
            if not losses.requires_grad:
                raise ConfigurationError("sample_losses does not depend on the weights through autograd")
            rows = [torch.autograd.grad(loss, trainable, retain_graph=True, allow_unused=True) for loss in losses]
        if any(g is not None and g.layout != torch.strided for row in rows for g in row):
            raise ConfigurationError("sparse gradients are not supported; make the embedding with sparse=False")
        # The optimizer skips a parameter that the batch loss does not depend on at all; None for some samples only means zero.
        used = [k for k in range(len(trainable)) if any(row[k] is not None for row in rows)]
        columns = {trainable[k]: _rows_of(trainable[k], [row[k] for row in rows]) for k in used}
        clip = 1.0 if max_norm is None else _clip_factor([g.sum(0) for g in columns.values()], max_norm)
        moving = [p for p in columns if p in self._mover.parameters]
        if not moving:
            raise ConfigurationError("no parameter moves: none that the sample losses depend on belongs to an optimizer")
        return moving, torch.cat([columns[p] for p in moving], dim=1), clip

    def _checked(self, masks: Tensor) -> Tensor:
        masks = torch.as_tensor(masks)
        if masks.dtype != torch.bool or masks.dim() != 2 or masks.shape[1] != self.n:
            raise ConfigurationError(f"masks must be bool [B, {self.n}], got {masks.dtype} {tuple(masks.shape)}")
        # A sample without gradient changes no sum: leaving it out makes its marginals exactly zero and saves evaluations.
        return masks.cpu() & self._takes_part

    def _moved(self, masks: Tensor) -> Weights:
        """Return w + u(c·Σ_{n∈S} g_n) of the moving parameters, ``[B, *shape]``."""
        choose = masks.to(self.gradients)
        gradients, start = {}, 0
        for p in self._moving:
            columns = self.gradients[:, start : start + p.numel()]
            gradients[p] = ((choose @ columns) * self.clip).view(-1, *p.shape).to(p)
            start += p.numel()
        return self._mover.moved(self._losses.weights, gradients)

    def _loss_at(self, stack: Weights) -> Tensor:
        """Return ℓ at each row of a stack, ``[B]``."""
        if self._rows is None:
            self._rows = self._rows_at_once()
        if self._rows == 1:
            return self._losses.looped(stack)
        parts = zip(*(values.split(self._rows) for values in stack.values()), strict=True)
        return torch.cat([self._losses.vmapped(dict(zip(stack, part, strict=True))) for part in parts])

    def _rows_at_once(self) -> int:
        """Choose how many losses vmap takes together; 1 means one at a time, without vmap.

        By a rule on sizes, not by a stopwatch, so that the same game has the same bits on every run. Measured on GPTs of 4,000 to
        500,000 weights, vmap wins up to twice while its tensors fit the cache, and loses as much where each is fresh memory.
        """
        rows = self._chunk
        if not self._chunk_given:
            rows = min(rows, _VMAP_TENSOR // max(1, self._losses.largest_tensor()))
            rows = rows if rows >= _FEWEST_ROWS else 1
        return rows if rows > 1 and self._losses.can_vmap(self._moving) else 1


def _rows_of(p: nn.Parameter, gradients: list[Tensor | None]) -> Tensor:
    """Stack one parameter's per-sample gradients, ``[n, numel]``, in float32 or better: sums must not round in half."""
    rows = [torch.zeros_like(p).flatten() if g is None else g.detach().flatten() for g in gradients]
    return torch.stack(rows).to(torch.promote_types(p.dtype, torch.float32))


def _clip_factor(gradients: list[Tensor], max_norm: float) -> float:
    """What ``clip_grad_norm_`` multiplies the gradients of the whole batch by."""
    copies = [nn.Parameter(torch.empty_like(g)) for g in gradients]
    for copy, g in zip(copies, gradients, strict=True):
        copy.grad = g.clone()
    norm = float(torch.nn.utils.clip_grad_norm_(copies, max_norm))
    return min(1.0, max_norm / (norm + 1e-6))


def _gradients(loss: Tensor, parameters: list[nn.Parameter], *, create_graph: bool, keep: bool) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, create_graph=create_graph, retain_graph=keep, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]


def _inner(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """⟨a, b⟩ over all parameters, in float64."""
    return reduce(torch.add, ((x.double() * y.double()).sum().cpu() for x, y in zip(a, b, strict=True)))

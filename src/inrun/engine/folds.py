"""Folds: a standard error for every score, from parts of the validation set that are scored side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from inrun.errors import ConfigurationError, ValidationError


class Folds:
    """A validation loss in k parts. Made by :func:`folds`."""

    def __init__(self, fn: Callable[..., Tensor], k: int) -> None:
        """``fn`` returns one loss per validation point."""
        if not callable(fn):
            raise ConfigurationError(f"folds(fn, k): fn is {type(fn).__name__}, not a callable(model) -> vector of losses")
        if isinstance(k, bool) or not isinstance(k, int) or k < 2:
            raise ConfigurationError(f"folds(fn, k): k is {k!r}; it must be an integer of at least 2")
        self.fn, self.k = fn, k

    def split(self, losses: Tensor) -> Tensor:
        """Return the mean loss of each fold, ``[k]``, from losses ``[m]``; point j belongs to fold j mod k."""
        if losses.dim() != 1 or losses.numel() % self.k:
            raise ValidationError(
                f"folds need a vector of losses, one per validation point, whose length is a multiple of k={self.k} (so that "
                f"all folds weigh the same); the callable returned shape {tuple(losses.shape)}"
            )
        return losses.view(-1, self.k).mean(0)


def folds(fn: Callable[..., Tensor], k: int) -> Folds:
    """Score a validation set in k parts, side by side, so that every score has a standard error.

    The score is the mean over the folds, which is the score of the whole set; its error is the spread of the folds
    divided by √k. It tells how much the score would change with other validation points, and costs k gradients of the
    validation loss and k directions instead of one.

    Args:
        fn: ``model -> losses``, a vector with one loss per validation point; m points, a multiple of k.
        k: The number of folds, at least 2. An interval of 95 % is the score ± t(0.975, k − 1) errors: 2.26 for ten folds.

    Example:
        >>> accountant = inrun.Accountant(model, optimizer, inrun.folds(losses_of_points, 10))  # doctest: +SKIP
    """
    return Folds(fn, k)


def standard_error(parts: Tensor) -> Tensor:
    """Return the standard error of the mean over folds, ``[n, k]`` to ``[n]``."""
    return torch.std(parts.double(), dim=1) / parts.shape[1] ** 0.5

"""Shapley values of a step's game: exact over all subsets, or sampled over permutations with honest errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from inrun.errors import ConfigurationError
from inrun.truth.progress import Progress, reporting

LARGEST = 16  # samples that can be enumerated: 65,536 subsets
_BLOCK = 32  # permutations per call of the game


class Game(Protocol):
    """Anything with n players and a utility for every subset."""

    n: int

    def utilities(self, masks: Tensor, progress: Progress = None) -> Tensor:
        """U(S) of the subsets ``[B, n]``, float64 ``[B]``."""


@dataclass(frozen=True)
class Values:
    """Shapley values of V(S) = U(S) − U(∅).

    Attributes:
        values: φ_n, ``[n]`` float64; they sum to ``total``.
        standard_errors: Of each value, ``[n]`` float64; zero where exact, infinite where one draw cannot tell.
        evaluations: Different subsets the values rest on.
        total: U(N) − U(∅), the data's part of the fall of the loss.
        empty: U(∅), what momentum and decay did.
    """

    values: Tensor
    standard_errors: Tensor
    evaluations: int
    total: float
    empty: float


def enumerate_values(game: Game, progress: Progress = None) -> Values:
    """Exact values from all 2ⁿ subsets: φ_i = Σ_{S∌i} |S|!(n−|S|−1)!/n! · [U(S∪i) − U(S)].

    Args:
        game: A game of at most 16 samples.
        progress: Called with the subsets done and in all; True shows a bar.

    Returns:
        The values, with standard errors of zero.
    """
    n = game.n
    if n > LARGEST:
        raise ConfigurationError(f"{n} samples have 2^{n} subsets; enumeration stops at {LARGEST}, take sample_values beyond")
    subsets = torch.arange(2**n)
    masks = (subsets.unsqueeze(1) >> torch.arange(n)) & 1 == 1
    utilities = game.utilities(masks, progress)
    sizes = masks.sum(1)
    weights = torch.tensor([1 / (n * math.comb(n - 1, s)) for s in range(n)], dtype=torch.float64)
    values = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        without = subsets[~masks[:, i]]
        values[i] = (weights[sizes[without]] * (utilities[without + 2**i] - utilities[without])).sum()
    return Values(values, torch.zeros(n, dtype=torch.float64), 2**n, float(utilities[-1] - utilities[0]), float(utilities[0]))


def sample_values(game: Game, permutations: int = 300, seed: int = 0, antithetic: bool = True, progress: Progress = None) -> Values:
    """Values estimated as mean marginal utilities over random orders of the samples.

    Args:
        game: The game.
        permutations: Orders to draw; an odd number is rounded up to pairs if antithetic.
        seed: Of the draws; the same seed gives the same orders.
        antithetic: Follow each order by its reverse. What a sample adds early and late then falls into one mean; the pairs are
            independent of each other, the two orders of a pair are not, so errors come from the means of pairs.
        progress: Called with the permutations done and in all; True shows a bar.

    Returns:
        Unbiased values with their standard errors; they sum to the total exactly, whatever the number of permutations.
    """
    if permutations < 1:
        raise ConfigurationError(f"permutations must be at least 1, got {permutations}")
    n, generator = game.n, torch.Generator().manual_seed(seed)
    group = 2 if antithetic else 1
    draws = -(-permutations // group)
    marginals = torch.empty(draws, n, dtype=torch.float64)
    seen: set[bytes] = set()
    with reporting(progress, draws * group, "permutations") as report:
        for start in range(0, draws, _BLOCK // group):
            count = min(_BLOCK // group, draws - start)
            orders = torch.stack([torch.randperm(n, generator=generator) for _ in range(count)])
            if antithetic:
                orders = torch.stack([orders, orders.flip(1)], dim=1).flatten(0, 1)
            masks = _prefixes(orders)
            utilities = game.utilities(masks.flatten(0, 1)).view(len(orders), n + 1)
            seen.update(row.tobytes() for row in masks.flatten(0, 1).numpy())
            by_sample = torch.empty(len(orders), n, dtype=torch.float64).scatter_(1, orders, utilities.diff(dim=1))
            marginals[start : start + count] = by_sample.view(count, group, n).mean(1)
            report((start + count) * group)
    errors = marginals.std(0) / math.sqrt(draws) if draws > 1 else torch.full((n,), math.inf, dtype=torch.float64)
    empty, full = float(utilities[0, 0]), float(utilities[0, -1])
    return Values(marginals.mean(0), errors, len(seen), full - empty, empty)


def _prefixes(orders: Tensor) -> Tensor:
    """The subsets an order passes through, from empty to all: orders ``[m, n]`` to bool ``[m, n + 1, n]``."""
    ranks = orders.argsort(1)
    return ranks.unsqueeze(1) < torch.arange(orders.shape[1] + 1).view(1, -1, 1)

"""How well the Taylor expansions of the utility follow the true one, over random subsets (the paper's utility figure)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.truth import StepGame, agreement


@dataclass(frozen=True)
class UtilityReport:
    """Correlation of first- and second-order utilities with the true utility."""

    subsets: int
    true: list[float]
    first: list[float]
    second: list[float]
    first_pearson: float
    first_spearman: float
    second_pearson: float
    second_spearman: float

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"utility over {self.subsets} random subsets: first order Pearson {self.first_pearson:.3f}, Spearman "
            f"{self.first_spearman:.3f}; second order {self.second_pearson:.3f}, {self.second_spearman:.3f}"
        )


def random_subsets(n: int, count: int, seed: int = 0) -> Tensor:
    """Draw subsets of uniform size, bool ``[count, n]``."""
    generator = torch.Generator().manual_seed(seed)
    masks = torch.zeros(count, n, dtype=torch.bool)
    for row in masks:
        size = int(torch.randint(0, n + 1, (1,), generator=generator))
        row[torch.randperm(n, generator=generator)[:size]] = True
    return masks


def utility_agreement(game: StepGame, subsets: int, seed: int = 0) -> UtilityReport:
    """Draw subsets of uniform size and compare."""
    masks = random_subsets(game.n, subsets, seed)
    true, first, second = game.utilities(masks), game.taylor_utilities(masks, 1), game.taylor_utilities(masks, 2)
    one, two = agreement(first, true), agreement(second, true)
    return UtilityReport(
        subsets, true.tolist(), first.tolist(), second.tolist(), one.pearson, one.spearman, two.pearson, two.spearman
    )

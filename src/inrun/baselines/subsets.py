"""What the baselines that train on random subsets share: how these are drawn, trained and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from inrun.baselines.registry import Ids
from inrun.baselines.retraining import Draw, Mask, Retraining, Subset, Tell, Utility, Vector, random_subsets


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """The options of a baseline on random subsets. Two that are given the same, and ``cells``, share what was trained.

    Attributes:
        utility: ``(positions [m], seed) -> number per validation set``; every subset has a seed of its own.
        subsets: How many; each costs one training run.
        share: The part of the samples in a subset.
        draw: ``size``: all subsets have round(share · n) samples; ``coins``: each sample is in with probability ``share``.
        seed: Of subsets and training runs; the k-th subset does not depend on their number.
        jobs: Processes.
        cells: Folder where finished subsets are kept.
        tell: Hears of progress.
    """

    utility: Utility
    subsets: int = 1000
    share: float = 0.5
    draw: Draw = "size"
    seed: int = 0
    jobs: int = 1
    cells: Path | None = None
    tell: Tell | None = None


@dataclass(frozen=True)
class Drawn:
    """The subsets of a drawing from the samples, before they are trained."""

    name: str
    sample_ids: Ids
    drawing: Drawing

    @cached_property
    def _subsets(self) -> list[Subset]:
        d = self.drawing
        return random_subsets(len(self.sample_ids), d.subsets, d.share, d.draw, d.seed)

    @property
    def masks(self) -> Mask:
        """Return which samples are in which subset, ``[subsets, n]``."""
        return np.stack([subset.mask for subset in self._subsets])

    def utilities(self, validation: Mapping[str, Any]) -> dict[str, Vector]:
        """Train on every subset that was not trained on before; return the utilities by validation set, ``[subsets]`` each."""
        d = self.drawing
        retraining = Retraining(self.sample_ids, validation, d.utility, d.jobs, d.cells, d.tell)
        return retraining.utilities(f"{self.name}: subsets", self._subsets)

"""Scores of all methods on a corrupted set, part by part as cells, for the experiments that compare them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from inrun.experiments.image_methods import (
    IN_RUN,
    Budget,
    Scores,
    in_run,
    looking_back,
    shared_cells,
    together,
    training_again,
    without_training,
)
from inrun.experiments.image_training import Net, Subject, Training, make_subject
from inrun.experiments.images import Corrupted, Images, corrupt
from inrun.experiments.recipes import Work

SUBSETS = ("empirical_influence", "datamodels")
RETRAINING = ("data_shapley", *SUBSETS, "leave_one_out")


@dataclass(frozen=True)
class Setting:
    """What is scored, and by what."""

    samples: int = 1000
    changed: float = 0.1
    #: Test images whose mean loss defines value, in every step; the other test images measure accuracy.
    validation: int = 600
    training: Training = field(default_factory=Training)
    net: Net = field(default_factory=Net)
    #: "clean": from a network trained on the other, clean images; "features": from the same with a new last layer; "scratch": from
    #: random weights.
    start: str = "clean"
    in_run: tuple[str, ...] = tuple(IN_RUN)
    #: Checkpoints for TRAK, the last ones of those that are spread over the run.
    checkpoints: tuple[int, ...] = (1, 5, 15, 25)
    #: Of the random projections of TRAK and LESS.
    dimension: int = 2048
    retraining: tuple[str, ...] = RETRAINING
    budget: Budget = field(default_factory=Budget)


@dataclass
class Scored:
    """A setting on one corrupted set: the seed draws images, labels, weights and the order of the samples."""

    setting: Setting
    work: Work
    images: Images
    seed: int

    @cached_property
    def task(self) -> Corrupted:
        """The corrupted set; the same for all networks and starts."""
        s = self.setting
        return corrupt(self.images, s.samples, s.changed, s.validation, self.seed)

    @cached_property
    def subject(self) -> Subject:
        """The set with its network, made when something has to be computed."""
        s = self.setting
        return make_subject(self.images, self.task, s.net, s.training, s.start, self.seed)

    def key(self, part: str, **more: Any) -> dict[str, Any]:
        """Return all that a part of the scores depends on."""
        s = self.setting
        about = {"samples": s.samples, "changed": s.changed, "validation": s.validation, "training": s.training, "net": s.net}
        return {"part": part, "images": self.images.name, "kind": s.net.kind, "start": s.start, "seed": self.seed, **about, **more}

    def scores(self) -> Scores:
        """Return the scores of every method, ``[n]``, and of the combinations of ours with the loss."""
        found: dict[str, Sequence[float]] = {}
        for name in self.setting.in_run:
            part = "whole, exact, and own step" if name == "whole" else name
            found |= self._cell(self.key(part), lambda name=name: in_run(self.subject, name, self.seed))
        found |= self._looking_back()["scores"]
        found |= self._cell(self.key("without training"), lambda: without_training(self.subject, self.seed))
        for name in self.setting.retraining:
            found |= self._again(name)
        scores = {name: np.asarray(values, np.float64) for name, values in found.items()}
        for combined, ours in (("first_and_loss", "in_run_first"), ("whole_and_loss", "whole")):
            if ours in scores:
                scores[combined] = together(scores[ours], scores["mean_loss"])
        return scores

    def accuracy(self) -> float:
        """Return the accuracy of the run that the scores are of, on test images that define no value."""
        return float(self._looking_back()["accuracy"])

    def _cell(self, key: dict[str, Any], compute: Any) -> Any:
        s, total = self.setting, len(self.work.seeds)
        self.work.tell(f"{s.net.kind} from {s.start}: {key['part']}", self.work.seeds.index(self.seed), total)
        return self.work.cell(key, compute)

    def _looking_back(self) -> dict[str, Any]:
        s = self.setting

        def compute() -> dict[str, Any]:
            scores, accuracy = looking_back(self.subject, s.checkpoints, s.dimension, self.seed)
            return {"scores": scores, "accuracy": accuracy}

        return self._cell(self.key("looking back", checkpoints=s.checkpoints, dimension=s.dimension), compute)

    def _again(self, name: str) -> dict[str, Sequence[float]]:
        key = self.key(name, budget=self.setting.budget)

        def compute() -> dict[str, Any]:
            with shared_cells(self._kept()) as cells:
                scores = training_again(self.subject, name, self.setting.budget, self.seed, self.work.jobs, cells, self.work.tell)
            # JSON has no NaN: samples that were not asked for are left out.
            asked = np.flatnonzero(np.isfinite(scores))
            return {"asked": asked, "scores": scores[asked]}

        kept = self._cell(key, compute)
        scores = np.full(self.setting.samples, np.nan)
        scores[kept["asked"]] = kept["scores"]
        return {name: scores.tolist()}

    def _kept(self) -> Path | None:
        """Return the folder of this subject's training runs, which several methods share."""
        if self.work.cells is None:
            return None
        text = json.dumps(self.key("training"), sort_keys=True, default=asdict)
        return self.work.cells / f"runs-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

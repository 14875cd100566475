"""Do scores agree from seed to seed? In-run scores against retraining-based Shapley values (the paper's appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from inrun.experiments.figures import pyplot
from inrun.experiments.image_methods import Budget, Scores, Vector, in_run, label_of, training_again
from inrun.experiments.image_scores import Scored, Setting
from inrun.experiments.image_training import Net, Training
from inrun.experiments.images import load_images
from inrun.experiments.mislabel import mean_and_std, shown_mean
from inrun.experiments.recipes import Findings, Table, Work
from inrun.statistics import spearman

_FULL = Setting(
    samples=200,
    start="scratch",
    budget=Budget(permutations=2, tolerance=0.0),
)


@dataclass(frozen=True)
class StabilityConfig:
    """What is scored how often."""

    setting: Setting = _FULL
    #: Training runs of every set, that differ in the order of the samples alone.
    orders: int = 4
    methods: tuple[str, ...] = ("in_run_first", "step", "whole")
    #: Estimates of the Shapley values of every set, each with permutations and training seeds of its own.
    estimates: int = 2


_SMOKE = StabilityConfig(
    Setting(
        samples=24,
        validation=32,
        training=Training(epochs=2, batch=8, decay_every=1),
        net=Net(width=4, start_epochs=1),
        start="scratch",
        budget=Budget(permutations=1, tolerance=0.0),
    ),
    orders=2,
)
_QUICK = replace(_FULL, samples=40, validation=128, training=Training(epochs=8, batch=32, decay_every=4))
SIZES = {
    "smoke": _SMOKE,
    "quick": StabilityConfig(_QUICK, orders=3, methods=("in_run_first", "whole")),
    "full": StabilityConfig(_FULL),
}


def run(config: StabilityConfig, work: Work) -> Findings:
    """Score the same samples again and again, and compare ranks."""
    images = load_images(work)
    found: dict[str, list[float]] = {}
    for done, seed in enumerate(work.seeds):
        scored = Scored(config.setting, work, images, seed)
        by_order = _in_run(config, work, scored)
        for name in config.methods:
            several = [scores[name] for scores in by_order]
            _add(found, label_of(name), several)
            half = len(several) // 2
            means = [np.mean(several[:half], axis=0), np.mean(several[half : 2 * half], axis=0)]
            if half > 1:
                _add(found, f"{label_of(name)}, mean of {half} runs", means)
            _add(found, f"{label_of(name)}, the same run again", [several[0], _again(work, scored, name)])
        estimates = _estimates(config, work, scored)
        _add(found, label_of("data_shapley"), estimates)
        mean = np.mean(estimates, axis=0)
        for name in config.methods:
            values = [spearman(mean, scores[name]) for scores in by_order]
            found.setdefault(f"{label_of(name)} with {label_of('data_shapley')}", []).append(float(np.mean(values)))
        work.tell("scores again and again", done + 1, len(work.seeds))
    trainings = config.setting.budget.permutations * (config.setting.samples + 1)
    data = {"images": images.name, "spearman": found, "trainings_per_estimate": trainings}
    return Findings(data, [_table(found)], [images.note, *_notes(config, trainings)], draw=lambda path: _draw(path, found))


def _add(found: dict[str, list[float]], what: str, several: Sequence[Vector]) -> None:
    """Add the mean rank correlation over pairs."""
    found.setdefault(what, []).append(float(np.mean([spearman(a, b) for a, b in combinations(several, 2)])))


def _in_run(config: StabilityConfig, work: Work, scored: Scored) -> list[Scores]:
    """Return the scores of every method, for each order of the samples."""
    found = []
    for order in range(config.orders):
        cells = {
            name: work.cell(scored.key(name, order=order), partial(_scored_run, scored, name, order)) for name in config.methods
        }
        found.append({name: np.asarray(values) for name, values in cells.items()})
    return found


def _scored_run(scored: Scored, name: str, order: int) -> Vector:
    return in_run(scored.subject, name, 100 + order)[name]


def _again(work: Work, scored: Scored, name: str) -> Vector:
    """Return the scores of the first order once more: the run is the same, and so must they be."""
    return np.asarray(work.cell(scored.key(name, order="again"), partial(_scored_run, scored, name, 0)))


def _estimates(config: StabilityConfig, work: Work, scored: Scored) -> list[Vector]:
    """Return estimates of the retraining-based Shapley values."""
    budget = config.setting.budget

    def estimate(k: int) -> Vector:
        return training_again(scored.subject, "data_shapley", budget, k, work.jobs, None, work.tell)

    keys = [scored.key("data_shapley", budget=budget, estimate=k) for k in range(config.estimates)]
    return [np.asarray(work.cell(key, partial(estimate, k))) for k, key in enumerate(keys)]


def _table(found: dict[str, list[float]]) -> Table:
    caption = (
        "Spearman correlation between scores of the same samples, mean over pairs; mean and standard deviation over sets. In-run "
        "scores differ between orders of the samples because they are of other runs, and are the same for the same run; "
        "estimates of Shapley values differ by permutations and training seeds, and are meant to be of one quantity."
    )
    return Table("Agreement of scores", ["scores", "rank correlation"], [[k, shown_mean(v)] for k, v in found.items()], caption)


def _notes(config: StabilityConfig, trainings: int) -> list[str]:
    s, t = config.setting, config.setting.training
    return [
        f"{s.samples} samples, {s.changed:.0%} of the labels changed, {s.validation} validation images; small net of width "
        f"{s.net.width} from scratch (the same weights in all runs of a set), {t.epochs} epochs of Adam, rate {t.lr:g}.",
        f"In-run: {config.orders} orders of the samples, one training run each. Retraining-based: {config.estimates} estimates of "
        f"{s.budget.permutations} permutation(s), {trainings} training runs each, the negated validation loss as utility.",
        "The paper has no table of this; it argues that retraining-based values are unstable (citing Wang & Jia 2023).",
    ]


def _draw(path: Path, found: dict[str, list[float]]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 0.36 * len(found) + 1.2), layout="constrained")
    names = list(reversed(found))
    means, errors = zip(*(mean_and_std(found[name]) for name in names), strict=True)
    colours = ["C1" if "retraining" in name else "C0" for name in names]
    axes.barh(range(len(names)), means, 0.7, xerr=errors, color=colours, error_kw={"linewidth": 0.8, "capsize": 2})
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.axvline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("rank correlation of scores of the same samples (Spearman)")
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""Do scores find samples whose label was changed? The paper's Table 4."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inrun.experiments.figures import pyplot
from inrun.experiments.image_methods import Budget, Vector, label_of
from inrun.experiments.image_scores import SUBSETS, Scored, Setting
from inrun.experiments.image_training import Net, Training
from inrun.experiments.images import Images, load_images
from inrun.experiments.recipes import Findings, Table, Work
from inrun.statistics import ranks

#: AUROC with standard deviation: ResNet-18 from ImageNet weights, 1,000 images of CIFAR-10, three corrupted sets.
PAPER = {
    "data_shapley": (0.582, 0.029),
    "empirical_influence": (0.552, 0.017),
    "datamodels": (0.52, 0.008),
    "knn_shapley": (0.76, 0.018),
    "influence_function": (0.654, 0.054),
    "less": (0.55, 0.032),
    "in_run_first": (0.678, 0.045),
    "in_run_second": (0.680, 0.048),
    "trak_1": (0.511, 0.012),
    "trak_5": (0.542, 0.025),
    "trak_15": (0.609, 0.028),
    "trak_25": (0.617, 0.021),
}


@dataclass(frozen=True)
class MislabelConfig:
    """Settings by the heading of their column; the first is what figures are sorted by."""

    settings: dict[str, Setting] = field(default_factory=dict)
    #: How many of the seeds a column has, where it is not all of them.
    sets: dict[str, int] = field(default_factory=dict)

    def seeds_of(self, heading: str, seeds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the seeds of a column."""
        return seeds[: self.sets.get(heading, len(seeds))]


_FULL = Setting(start="scratch", budget=Budget(tolerance=0.1, subsets=100, left_out=40))
#: Long enough for the net to learn the changed labels by heart, as in the paper's 50 epochs; half the validation images.
_RESNET = replace(
    _FULL,
    start="features",
    validation=300,
    training=Training(epochs=16, decay_every=8),
    net=Net("resnet18", width=16, start_epochs=10),
    in_run=("in_run_first", "step", "whole"),
    retraining=(),
)
#: As the paper has it.
PAPERS = Training(epochs=50, decay_every=10)
_SMOKE = Setting(
    start="scratch",
    samples=60,
    changed=0.2,
    validation=32,
    training=Training(epochs=2, batch=20, decay_every=1),
    net=Net(width=4, start_epochs=1),
    checkpoints=(1, 2),
    dimension=16,
    budget=Budget(permutations=1, tolerance=0.3, subsets=10, left_out=4),
)
_QUICK = replace(
    _FULL,
    samples=400,
    validation=128,
    training=Training(epochs=10, decay_every=4),
    net=Net(start_epochs=8),
    checkpoints=(1, 5, 15),
    dimension=256,
    budget=Budget(tolerance=0.1, subsets=40, left_out=0),
    retraining=("data_shapley", *SUBSETS),
)
_QUICK_RESNET = replace(_RESNET, samples=400, validation=128, training=_QUICK.training, checkpoints=(1, 5), dimension=128)


def early_decay(training: Training) -> Training:
    """Return a recipe of about as many epochs whose rate falls after every fifth of them, as the paper's does."""
    every = max(1, round(training.epochs / 5))
    return replace(training, epochs=5 * every, decay_every=every)


def _columns(scratch: Setting, resnet: Setting, resnet_sets: int) -> MislabelConfig:
    # Shapley and leave-one-out, the dearest, are had once: from scratch, where `selection` needs them too.
    small = replace(scratch, start="clean", retraining=SUBSETS)
    settings = {
        "small net, clean start": small,
        "small net, new head": replace(small, start="features", retraining=()),
        "small net, from scratch": scratch,
        "ResNet-18, new head": resnet,
        "ResNet-18, early decay": replace(resnet, training=early_decay(resnet.training)),
    }
    return MislabelConfig(settings, {heading: resnet_sets for heading in settings if heading.startswith("ResNet")})


def _with_the_papers_epochs(config: MislabelConfig) -> MislabelConfig:
    """Add a column of one set, which takes 26 minutes of one core."""
    heading = "ResNet-18, the paper's epochs"
    return MislabelConfig({**config.settings, heading: replace(_RESNET, training=PAPERS)}, {**config.sets, heading: 1})


SIZES = {
    # The new head is had once, in the larger network.
    "smoke": MislabelConfig(
        {
            "small net, clean start": replace(_SMOKE, start="clean", retraining=SUBSETS),
            "small net, from scratch": _SMOKE,
            "ResNet-18, new head": replace(
                _SMOKE, start="features", net=Net("resnet18", 4, 1), retraining=(), in_run=("in_run_first", "whole")
            ),
        },
        {"ResNet-18, new head": 1},
    ),
    "quick": _columns(_QUICK, _QUICK_RESNET, 1),
    "full": _with_the_papers_epochs(_columns(_FULL, _RESNET, 3)),
}


def auroc(scores: Vector, changed: npt.NDArray[np.bool_]) -> float:
    """Return the probability that a changed sample scores lower than another, ties as halves; NaN is left out."""
    asked = np.isfinite(scores)
    low, wrong = ranks(-scores[asked]), changed[asked]
    positives, negatives = int(wrong.sum()), int((~wrong).sum())
    if not positives or not negatives:
        return math.nan
    return float((low[wrong].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def within_label(scores: Vector, labels: npt.NDArray[np.int64]) -> Vector:
    """Return scores minus the mean score of the samples that have the same label, as it was given."""
    known = np.isfinite(scores)
    found = scores.copy()
    for label in np.unique(labels[known]):
        mine = known & (labels == label)
        found[mine] -= scores[mine].mean()
    return found


def run(config: MislabelConfig, work: Work) -> Findings:
    """Score every corrupted set by every method, and see how well scores tell changed labels."""
    images = load_images(work)
    found: dict[str, dict[str, list[float]]] = {}
    within: dict[str, dict[str, list[float]]] = {}
    accuracies: dict[str, list[float]] = {}
    for heading, setting in config.settings.items():
        found[heading], within[heading], accuracies[heading] = {}, {}, []
        for seed in config.seeds_of(heading, work.seeds):
            scored = Scored(setting, work, images, seed)
            labels = scored.task.train[1].numpy()
            for name, scores in scored.scores().items():
                found[heading].setdefault(name, []).append(auroc(scores, scored.task.changed))
                inside = within_label(scores, labels)
                within[heading].setdefault(name, []).append(auroc(inside, scored.task.changed))
            accuracies[heading].append(scored.accuracy())
    work.tell("done", len(work.seeds), len(work.seeds))
    data = {"images": images.name, "auroc": found, "auroc_within_label": within, "test_accuracy": accuracies, "paper": PAPER}
    return Findings(data, _tables(found, within, accuracies), _notes(config, images), draw=lambda path: _draw(path, found))


def mean_and_std(values: list[float]) -> tuple[float, float]:
    """Return the mean and the standard deviation over seeds, 0 for one seed."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def shown_mean(values: list[float] | None) -> str | None:
    """Return "mean (standard deviation)", as the paper has it; of one value that value."""
    if not values:
        return None
    return f"{values[0]:.3f}" if len(values) == 1 else "{:.3f} ({:.3f})".format(*mean_and_std(values))


def methods_of(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return all methods in the order of the first column that has them."""
    return list(dict.fromkeys(name for column in found.values() for name in column))


def _tables(
    found: dict[str, dict[str, list[float]]], within: dict[str, dict[str, list[float]]], accuracies: dict[str, list[float]]
) -> list[Table]:
    def row(name: str) -> list[object]:
        paper = "{:.3f} ({:.3f})".format(*PAPER[name]) if name in PAPER else None
        return [label_of(name), paper, *(shown_mean(column.get(name)) for column in found.values())]

    rows = [row(name) for name in methods_of(found)]
    rows.append(["*test accuracy of the run*", None, *(shown_mean(values) for values in accuracies.values())])
    caption = (
        "AUROC of finding changed labels by low scores, mean and standard deviation over corrupted sets (one per seed). The "
        "paper's column is a ResNet-18 that starts from ImageNet weights, which are not to be had here: ours starts from a "
        "network trained on the other, clean training images (none of the set): as it is (clean start) or with a new last layer, "
        "which weights from another task need (new head); or from scratch."
    )
    inside = [[label_of(name), *(shown_mean(column.get(name)) for column in within.values())] for name in methods_of(within)]
    about = (
        "The same after the mean score of all samples with the same (given) label is taken off. In a step, the validation loss "
        "asks for more of one class and less of another, and pays all samples of a class alike. That is part of what a sample "
        "was worth, and says nothing of whether its label is right."
    )
    return [
        Table("AUROC of mislabelled samples", ["method", "paper", *found], rows, caption),
        Table("AUROC within labels", ["method", *within], inside, about),
    ]


def _notes(config: MislabelConfig, images: Images) -> list[str]:
    setting = next(s for s in config.settings.values() if s.start == "scratch")
    t, b = setting.training, setting.budget
    notes = [
        images.note,
        f"{setting.samples} samples, {setting.changed:.0%} of the labels changed to another class; {setting.validation} clean test "
        "images define value, in every step and for every method; test accuracy is of the other test images.",
        f"Adam, rate {t.lr:g} that falls to a tenth every {t.decay_every} of {t.epochs} epochs, label smoothing {t.smoothing:g}, "
        f"weight decay {t.weight_decay:g}, batch {t.batch} (the paper: 50 epochs, a tenth every 10).",
        "Group norm in all networks: under batch norm a sample has no gradient of its own.",
        f"Projections of TRAK and LESS have {setting.dimension} dimensions (the paper: 2,048); TRAK takes the last of "
        f"{max(setting.checkpoints)} checkpoints spread over the run, LESS five.",
    ]
    if setting.retraining:
        again = (
            f"Retraining: data Shapley {b.permutations} permutation(s), cut where the validation loss is "
            f"within {b.tolerance:g} of that of all samples; empirical influence and datamodels {b.subsets} subsets of half the "
            "samples (the paper: 1,000 runs each)"
        )
        if "leave_one_out" in setting.retraining and b.left_out:
            again += f"; leave-one-out {b.left_out} samples, half of them changed"
        notes.append(again + ". Their utility is the same validation loss, negated.")
    for heading, s in ((h, s) for h, s in config.settings.items() if s.net.kind == "resnet18"):
        count = f"; {config.sets[heading]} corrupted set(s)" if heading in config.sets else ""
        notes.append(
            f"{heading}: with its ImageNet stem and all its layers, at width {s.net.width} (64 in the paper), trained for "
            f"{s.training.epochs} epochs, a tenth of the rate every {s.training.decay_every}; {s.validation} validation images, "
            f"projections to {s.dimension}, TRAK with {' and '.join(map(str, s.checkpoints))} of {max(s.checkpoints)} "
            f"checkpoints{count}."
        )
    return notes


def _draw(path: Path, found: dict[str, dict[str, list[float]]]) -> None:
    """Draw a point per method and setting, with the standard deviation over corrupted sets; the paper's as diamonds."""
    plt = pyplot()
    first = next(iter(found.values()))
    names = sorted(methods_of(found), key=lambda name: np.mean(first.get(name, [0.0])))
    figure, axes = plt.subplots(figsize=(9, (0.09 * len(found) + 0.04) * len(names) + 1.4), layout="constrained")
    for k, (heading, column) in enumerate(found.items()):
        at = [j + 0.8 / len(found) * ((len(found) - 1) / 2 - k) for j, name in enumerate(names) if name in column]
        means, errors = zip(*(mean_and_std(column[name]) for name in names if name in column), strict=True)
        axes.errorbar(means, at, xerr=errors, label=heading, color=f"C{k}", fmt="o", markersize=4, capsize=2, elinewidth=0.9)
    there = [(j, PAPER[name][0]) for j, name in enumerate(names) if name in PAPER]
    axes.plot([x for _, x in there], [j for j, _ in there], "kD", markersize=3.5, label="the paper's ResNet-18")
    axes.axvline(0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(names)), [label_of(name) for name in names])
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0.35, 1.0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_xlabel("AUROC of changed labels (0.5: chance)")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)

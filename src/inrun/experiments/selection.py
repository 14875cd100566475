"""How well does a model train on the samples with the highest scores? The paper's Table 5."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from inrun.experiments import mislabel
from inrun.experiments.figures import pyplot
from inrun.experiments.image_methods import Scores, Vector, label_of
from inrun.experiments.image_scores import SUBSETS, Scored, Setting
from inrun.experiments.image_training import accuracy
from inrun.experiments.images import load_images
from inrun.experiments.mislabel import mean_and_std, shown_mean
from inrun.experiments.recipes import Findings, Table, Work
from inrun.statistics import ranks

#: Test accuracy on the top 20, 40, 60 and 80 %: ResNet-18 from ImageNet weights, 1,000 images, 10 % of the labels changed.
PAPER = {
    "random": ((0.350, 0.010), (0.461, 0.010), (0.525, 0.004), (0.559, 0.003)),
    "influence_function": ((0.320, 0.033), (0.450, 0.028), (0.530, 0.015), (0.580, 0.004)),
    "trak_1": ((0.329, 0.021), (0.443, 0.030), (0.517, 0.016), (0.572, 0.009)),
    "trak_5": ((0.325, 0.022), (0.445, 0.031), (0.519, 0.018), (0.572, 0.009)),
    "trak_15": ((0.327, 0.028), (0.446, 0.035), (0.523, 0.018), (0.573, 0.010)),
    "trak_25": ((0.332, 0.025), (0.443, 0.035), (0.520, 0.018), (0.578, 0.015)),
    "less": ((0.314, 0.012), (0.460, 0.015), (0.541, 0.006), (0.582, 0.006)),
    "data_shapley": ((0.317, 0.047), (0.468, 0.010), (0.527, 0.004), (0.570, 0.008)),
    "datamodels": ((0.342, 0.004), (0.465, 0.004), (0.534, 0.010), (0.559, 0.005)),
    "empirical_influence": ((0.342, 0.004), (0.466, 0.016), (0.530, 0.009), (0.568, 0.010)),
    "knn_shapley": ((0.354, 0.017), (0.478, 0.007), (0.525, 0.015), (0.563, 0.005)),
    "in_run_first": ((0.344, 0.009), (0.472, 0.003), (0.541, 0.006), (0.580, 0.004)),
    "in_run_second": ((0.342, 0.010), (0.473, 0.008), (0.544, 0.005), (0.580, 0.004)),
}
#: Chosen with the true labels, which no method has.
ORACLE = "oracle"
#: Scores by which equal shares of every (given) label are taken, too.
SPREAD, BY_LABEL = ("in_run_first", "whole", "influence_function"), "by label: "


@dataclass(frozen=True)
class SelectionConfig:
    """What is scored, which shares are kept, and how often each is trained on."""

    setting: Setting = field(default_factory=Setting)
    shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    #: Training runs for each share, whose accuracies are averaged.
    repeats: int = 1
    #: Whose choices are trained on; all methods where empty.
    methods: tuple[str, ...] = ()


def _of(size: str, repeats: int) -> SelectionConfig:
    """Take the setting of ``mislabel`` from scratch, and its retraining methods without leave-one-out, which has not all scores."""
    scratch = mislabel.SIZES[size].settings["small net, from scratch"]
    return SelectionConfig(replace(scratch, retraining=("data_shapley", *SUBSETS)), repeats=repeats)


SIZES = {"smoke": _of("smoke", 1), "quick": _of("quick", 1), "full": _of("full", 1)}


def run(config: SelectionConfig, work: Work) -> Findings:
    """Score every corrupted set by every method, and train on the best of each."""
    images = load_images(work)
    # Scores are those of `mislabel`: cells that it has left in this folder are taken as they are.
    scoring = replace(work, name="mislabel")
    found: dict[str, list[list[float]]] = {}
    everything: list[float] = []
    for seed in work.seeds:
        scored = Scored(config.setting, scoring, images, seed)
        scores = {name: s for name, s in scored.scores().items() if not config.methods or name in (*config.methods, "random")}
        labels = scored.task.train[1].numpy()
        scores |= {BY_LABEL + name: places_in_label(scores[name], labels) for name in SPREAD if name in scores}
        scores[ORACLE] = np.where(scored.task.changed, -1.0, 0.0) + 1e-3 * scores["random"]
        for name, values in _accuracies(config, work, scored, scores).items():
            if name == "all":
                everything.append(values[0])
            else:
                found.setdefault(name, []).append(values)
    work.tell("done", len(work.seeds), len(work.seeds))
    data = {"images": images.name, "shares": config.shares, "accuracy": found, "all_samples": everything, "paper": PAPER}
    notes = [images.note, *_notes(config, everything)]
    return Findings(data, [_table(config, found)], notes, draw=lambda path: _draw(path, config.shares, found, everything))


def places_in_label(scores: Vector, labels: npt.NDArray[np.int64]) -> Vector:
    """Return the share of the samples with the same label that score lower: the best of these are equal shares of all labels."""
    found = np.zeros(len(scores))
    for label in np.unique(labels):
        mine = labels == label
        found[mine] = ranks(scores[mine]) / mine.sum()
    return found


def _accuracies(config: SelectionConfig, work: Work, scored: Scored, scores: Scores) -> dict[str, list[float]]:
    """Return test accuracies by method, one per share, and under "all" that of training on every sample."""
    found: dict[str, list[float]] = {}
    for name, values in {"all": np.zeros(len(scored.task.ids)), **scores}.items():
        shares = (1.0,) if name == "all" else config.shares
        # The choice itself is the key: whatever chose the samples, the result is that of training on them.
        chosen = [np.sort(np.argsort(-values, kind="stable")[: round(share * len(values))]) for share in shares]
        key = {**scored.key(f"train on the best: {name}"), "chosen": chosen, "repeats": config.repeats}
        work.tell(f"train on the best: {name}", work.seeds.index(scored.seed), len(work.seeds))
        found[name] = work.cell(key, partial(_trained_on_each, scored, chosen, config.repeats))
    return found


def _trained_on_each(scored: Scored, chosen: list[npt.NDArray[np.int64]], repeats: int) -> list[float]:
    return [_trained_on(scored, positions, repeats) for positions in chosen]


def _trained_on(scored: Scored, positions: npt.NDArray[np.int64], repeats: int) -> float:
    """Return the mean test accuracy of networks trained on some samples, in several orders."""
    subject = scored.subject
    runs = [subject.trained(positions, 1000 * (scored.seed + 1) + k) for k in range(repeats)]
    return float(np.mean([accuracy(model, subject.task.test) for model in runs]))


def _label(name: str) -> str:
    if name.startswith(BY_LABEL):
        return f"{label_of(name.removeprefix(BY_LABEL))}, equal shares of labels"
    return "oracle (true labels)" if name == ORACLE else label_of(name)


def _table(config: SelectionConfig, found: dict[str, list[list[float]]]) -> Table:
    columns = ["method"]
    for share in config.shares:
        columns += [f"{share:.0%}", f"{share:.0%}, paper"]
    rows = []
    for name, by_seed in found.items():
        row: list[object] = [_label(name)]
        for k, values in enumerate(zip(*by_seed, strict=True)):
            paper = "{:.3f} ({:.3f})".format(*PAPER[name][k]) if name in PAPER and k < len(PAPER[name]) else None
            row += [shown_mean(list(values)), paper]
        rows.append(row)
    caption = (
        "Test accuracy after training on the samples with the highest scores, mean and standard deviation over corrupted sets. The "
        "paper's is a ResNet-18 from ImageNet weights; ours is the small net from scratch: levels differ, what to compare is the "
        "distance to random."
    )
    return Table("Accuracy on the best samples", columns, rows, caption)


def _notes(config: SelectionConfig, everything: list[float]) -> list[str]:
    s, t = config.setting, config.setting.training
    notes = [
        f"{s.samples} samples, {s.changed:.0%} of the labels changed; small net of width {s.net.width} from scratch, "
        f"{t.epochs} epochs of Adam, rate {t.lr:g}, a tenth every {t.decay_every}, batch {t.batch}; "
        f"{config.repeats} run(s) per share and set.",
        f"Training on all samples: {shown_mean(everything)}. Scores know {s.validation} test images, accuracy is of the others.",
    ]
    if s.retraining:
        notes.append(
            f"Retraining methods: {s.budget.permutations} permutation(s), {s.budget.subsets} subsets (the paper: 1,000 runs each)."
        )
    return notes


#: What the figure shows: a line each is all that can be told apart.
_DRAWN = (
    "random",
    "influence_function",
    "knn_shapley",
    "data_shapley",
    "in_run_first",
    "whole",
    BY_LABEL + "whole",
    "mean_loss",
    ORACLE,
)


def _draw(path: Path, shares: tuple[float, ...], found: dict[str, list[list[float]]], everything: list[float]) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    drawn = [name for name in _DRAWN if name in found]
    for k, name in enumerate(drawn):
        means, errors = zip(*(mean_and_std(list(v)) for v in zip(*found[name], strict=True)), strict=True)
        at = [100 * share + 0.6 * (k - len(drawn) / 2) for share in shares]
        axes.errorbar(at, means, errors, marker="o", markersize=4, capsize=2, linewidth=1.2, label=_label(name))
    axes.axhline(float(np.mean(everything)), color="grey", linewidth=0.8, linestyle=":", label="all samples")
    axes.set_xticks([100 * share for share in shares])
    axes.set_xlabel("samples kept, the highest scores (%)")
    axes.set_ylabel("test accuracy")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=110)
    plt.close(figure)

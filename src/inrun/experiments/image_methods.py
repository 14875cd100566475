"""All methods on one subject: scores of every sample, higher = the sample helps more."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from inrun import baselines
from inrun.engine import Accountant
from inrun.experiments.image_training import State, Subject, accuracy, adam, train
from inrun.statistics import ranks

Vector = npt.NDArray[np.float64]
Scores = dict[str, Vector]

#: Ours by name: what the accountant is asked for. The first two are the paper's: its SGD proxy, first and second order.
IN_RUN: dict[str, dict[str, str]] = {
    "in_run_first": {"method": "first"},
    "in_run_second": {"method": "second"},
    "step": {"method": "step"},
    # Sketches cost less; on ResNet-18, trained as roughly as here, they are off by an eighth of what credits differ by.
    "whole": {"method": "whole", "sketch": "exact"},
}
#: How tables name methods.
LABELS = {
    "in_run_first": "in-run, first order (SGD proxy)",
    "in_run_second": "in-run, second order (SGD proxy)",
    "step": "in-run, Adam's step",
    "whole": "in-run, whole credit",
    "own_step": "in-run, whole credit, its own step's part",
    "influence_function": "influence function",
    "tracin_cp": "TracIn-CP",
    "less": "LESS",
    "gradient_cosine": "gradient cosine at the end",
    "knn_shapley": "KNN-Shapley, start net's features",
    "knn_shapley_pixels": "KNN-Shapley, pixels",
    "data_shapley": "retraining-based Shapley",
    "empirical_influence": "empirical influence",
    "datamodels": "datamodels",
    "leave_one_out": "leave-one-out",
    "loss_at_end": "loss at the end",
    "mean_loss": "mean loss over training",
    "random": "random",
    "first_and_loss": "first order (proxy) + mean loss, ranks",
    "whole_and_loss": "whole credit + mean loss, ranks",
}


def label_of(name: str) -> str:
    """Return how tables name a method."""
    if name.startswith("trak_"):
        count = name.removeprefix("trak_")
        return f"TRAK ({count} checkpoint{'s' if count != '1' else ''})"
    return LABELS[name]


def in_run(subject: Subject, name: str, seed: int) -> Scores:
    """Train once with an accountant, and return the scores ``[n]``: by how much the sample lowered the validation loss.

    Whole credit gives the part that uses earn in their own step as well: ``own_step``.
    """
    model = subject.model()
    optimizer = adam(model, subject.training)
    options: dict[str, Any] = IN_RUN[name]
    accountant = Accountant(model, optimizer, subject.validation_loss, audit_every=0, **options)
    train(model, optimizer, subject.task.train, subject.training, seed, lambda chosen: accountant.step(chosen.tolist()))
    accountant.close()
    table, n = accountant.scores(), len(subject.task.ids)
    own = {"own_step": _ordered(table, n, "step_score")} if name == "whole" else {}
    return {name: _ordered(table, n), **own}


def _ordered(table: Any, n: int, column: str = "score") -> Vector:
    """Return the scores of samples 0 … n − 1 of a table with one validation set."""
    scores = np.zeros(n)
    scores[table["sample_id"].to_numpy()] = table[column].to_numpy()
    return scores


@dataclass
class Trace:
    """What a run leaves for methods that look back: checkpoints spread evenly over it, the last one at its end."""

    model: nn.Module
    checkpoints: list[State] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    second_moments: list[State] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def last(self, count: int) -> list[State]:
        """Return the last checkpoints."""
        return self.checkpoints[-count:]

    def spread(self, count: int) -> dict[str, Any]:
        """Return some checkpoints spread over the run, with what LESS wants to know of them."""
        total = len(self.checkpoints)
        at = sorted({-(-total * (k + 1) // count) - 1 for k in range(count)})
        lists: dict[str, list[Any]] = {
            "checkpoints": self.checkpoints,
            "lrs": self.lrs,
            "second_moments": self.second_moments,
            "steps": self.steps,
        }
        return {name: [values[k] for k in at] for name, values in lists.items()}


def follow(subject: Subject, checkpoints: int, seed: int) -> Trace:
    """Train once without scores, and keep checkpoints."""
    model = subject.model()
    trace = Trace(model)
    total = subject.training.steps(len(subject.task.ids))
    kept = {-(-total * (k + 1) // checkpoints) for k in range(checkpoints)}

    def keep(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step in kept:
            trace.checkpoints.append(_copied(model.state_dict()))
            trace.lrs.append(optimizer.param_groups[0]["lr"])
            trace.second_moments.append(_copied({n: optimizer.state[p]["exp_avg_sq"] for n, p in model.named_parameters()}))
            trace.steps.append(step)

    train(model, adam(model, subject.training), subject.task.train, subject.training, seed, after=keep)
    return trace


def _copied(state: Mapping[str, Tensor]) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def looking_back(subject: Subject, counts: Sequence[int], dimension: int, seed: int) -> tuple[Scores, float]:
    """Return the scores of all methods that look at one finished run, and its accuracy on test images.

    Args:
        subject: The set and the network.
        counts: Checkpoints that TRAK takes, the last of the run; the most there are in all.
        dimension: Of random projections.
        seed: Of the training run.
    """
    most = max(counts)
    trace = follow(subject, most, seed)
    model = {"model": trace.model, "sample_loss": subject.sample_loss}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "influence_function": ("influence_function", {}),
        "tracin_cp": ("tracin_cp", {"checkpoints": trace.checkpoints, "lrs": trace.lrs}),
        "less": ("less", {**trace.spread(5), "dimension": dimension}),
        "gradient_cosine": ("gradient_cosine", {}),
        "loss_at_end": ("loss_at_end", {}),
        "mean_loss": ("mean_loss", {"checkpoints": trace.checkpoints}),
        **{f"trak_{count}": ("trak", {"checkpoints": trace.last(count), "dimension": dimension}) for count in counts},
    }
    validation = {"validation": subject.validation_loss}
    n = len(subject.task.ids)
    found = {
        name: _ordered(baselines.run(baseline, subject.task.ids, validation, **model, **given), n)
        for name, (baseline, given) in asked.items()
    }
    return found, accuracy(trace.model, subject.task.test)


def without_training(subject: Subject, seed: int) -> Scores:
    """Return the scores of methods that need no run: nearest neighbours, in two spaces, and chance."""
    model = subject.model().eval()
    spaces: dict[str, Callable[[Tensor], Tensor]] = {"knn_shapley": model.features, "knn_shapley_pixels": lambda x: x.flatten(1)}
    (x, labels), (held, truth) = subject.task.train, subject.task.validation
    n = len(labels)
    found = {}
    with torch.no_grad():
        for name, space in spaces.items():
            given = {"features": space(x).numpy(), "labels": labels.numpy()}
            validation = {"validation": (space(held).numpy(), truth.numpy())}
            found[name] = _ordered(baselines.run("knn_shapley", subject.task.ids, validation, **given), n)
    found["random"] = _ordered(baselines.run("random", subject.task.ids, {"validation": None}, seed=seed), n)
    return found


@dataclass(frozen=True)
class Utility:
    """Train on some samples from the same start; return the validation loss, negated, so that higher is better."""

    subject: Subject
    #: Samples that are always trained on, beside those at the positions that are asked for.
    always: tuple[int, ...] = ()
    #: Which samples positions count; all, unless given.
    among: tuple[int, ...] | None = None
    #: Of torch, where it was made: joblib gives its processes others, and sums depend on them.
    threads: int = field(default_factory=torch.get_num_threads)

    def __call__(self, positions: npt.NDArray[np.int64], seed: int) -> dict[str, float]:
        """Return minus the validation loss after training."""
        own = np.asarray(positions) if self.among is None else np.asarray(self.among)[positions]
        chosen = np.sort(np.concatenate([own, np.asarray(self.always, np.int64)])).astype(np.int64)
        # Training seeds are below 2³² and serve torch's generators as they are.
        with _threads(self.threads):
            model = self.subject.trained(chosen, seed).eval()
            with torch.no_grad():
                return {"validation": -float(self.subject.validation_loss(model))}


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Budget:
    """How often the methods that train again may do so."""

    #: Of truncated Monte Carlo; each costs up to n + 1 runs.
    permutations: int = 1
    #: A permutation ends where the utility is this close to that of all samples.
    tolerance: float = 0.05
    #: Shared by empirical influence and datamodels.
    subsets: int = 100
    #: Samples that leave-one-out is asked for, half of them with changed labels; 0 for none.
    left_out: int = 60


def training_again(subject: Subject, name: str, budget: Budget, seed: int, jobs: int, cells: Path | None, tell: Any) -> Vector:
    """Return the scores of a method that trains again, ``[n]``; NaN for samples that leave-one-out was not asked for."""
    n = len(subject.task.ids)
    utility, ids = Utility(subject), subject.task.ids
    given: dict[str, Any]
    if name == "data_shapley":
        given = {"permutations": budget.permutations, "tolerance": budget.tolerance}
    elif name == "leave_one_out":
        ids = _asked(subject.task.changed, budget.left_out, seed)
        others = np.setdiff1d(subject.task.ids, ids)
        utility, given = Utility(subject, tuple(others.tolist()), tuple(ids.tolist())), {}
    else:
        given = {"subsets": budget.subsets}
    table = baselines.run(name, ids, {"validation": None}, utility=utility, seed=seed, jobs=jobs, cells=cells, tell=tell, **given)
    scores = np.full(n, np.nan)
    scores[table["sample_id"].to_numpy()] = table["score"].to_numpy()
    return scores


def _asked(changed: npt.NDArray[np.bool_], count: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw samples to leave out, half of them with changed labels as far as there are."""
    rng = np.random.default_rng([seed, 1])
    wrong, right = rng.permutation(np.flatnonzero(changed)), rng.permutation(np.flatnonzero(~changed))
    half = min(count // 2, len(wrong))
    return np.sort(np.concatenate([wrong[:half], right[: count - half]]))


@contextlib.contextmanager
def shared_cells(kept: Path | None) -> Iterator[Path]:
    """Yield a folder where training runs are kept: for good, or, where nothing is to be kept, as long as they are shared."""
    if kept is not None:
        yield kept
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def together(*scores: Vector) -> Vector:
    """Combine methods by the mean of their ranks."""
    return np.mean([ranks(s) for s in scores], axis=0)

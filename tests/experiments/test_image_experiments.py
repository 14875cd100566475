"""The experiments on images at their smallest, twice: they run, and say the same again."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from inrun.experiments.image_methods import Trace, Utility, follow, in_run, together
from inrun.experiments.image_scores import Scored, Setting
from inrun.experiments.image_training import Net, Training, adam, make_subject, train
from inrun.experiments.images import corrupt, load_images
from inrun.experiments.mislabel import PAPER, SIZES, auroc, mean_and_std, within_label
from inrun.experiments.outputs import page, save
from inrun.experiments.recipes import Work, run
from inrun.experiments.selection import places_in_label


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["mislabel", "selection", "stability"])
def test_smoke_runs_and_goes_on_from_its_cells(name: str, tmp_path: Path) -> None:
    work = Work(name, seeds=(0,), cells=tmp_path / "cells")
    found = run(name, "smoke", work)
    save(found, work, tmp_path / "a", 1.0)
    assert (tmp_path / "a" / "figure.png").stat().st_size > 5000
    kept = Work(name, seeds=(0,), cells=tmp_path / "cells")
    assert run(name, "smoke", kept).data == found.data and not kept.seconds  # nothing was computed
    assert "digits" in page(found, work)


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("mislabel", "selection", "stability")]


@pytest.mark.parametrize("name", SLOWLY)
def test_computed_again_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    text = []
    for place, seconds in (("a", 1.0), ("b", 2.0)):
        work = Work(name, seeds=(0,))
        text.append(save(run(name, "smoke", work), work, tmp_path / place, seconds)[0].read_text())
    assert text[0] == text[1]


def test_auroc_counts_pairs() -> None:
    changed = np.array([True, True, False, False, False])
    assert auroc(np.array([-2.0, -1.0, 0.0, 1.0, 2.0]), changed) == 1.0
    assert auroc(np.array([0.0, 3.0, 0.0, 1.0, 2.0]), changed) == pytest.approx((2 + 0.5) / 6)
    assert auroc(np.array([np.nan, -1.0, 0.0, np.nan, -2.0]), changed) == 0.5
    assert math.isnan(auroc(np.zeros(3), np.zeros(3, bool)))


def test_small_statistics() -> None:
    assert mean_and_std([1.0]) == (1.0, 0.0) and mean_and_std([1.0, 3.0]) == (2.0, math.sqrt(2))
    assert together(np.array([1.0, 2.0, 3.0]), np.array([30.0, 20.0, 10.0])).tolist() == [2.0, 2.0, 2.0]


def test_the_papers_methods_are_asked_for_in_full() -> None:
    settings = SIZES["full"].settings
    small = settings["small net, from scratch"]
    asked = {
        *small.in_run,
        *small.retraining,
        *(f"trak_{k}" for k in small.checkpoints),
        "knn_shapley",
        "influence_function",
        "less",
    }
    assert set(PAPER) <= asked
    assert (
        small.samples == 1000 and small.changed == 0.1 and {s.start for s in settings.values()} == {"clean", "features", "scratch"}
    )


def test_equal_shares_of_labels() -> None:
    labels = np.repeat([0, 1], 10)
    scores = np.r_[np.arange(10.0), 100 + np.arange(10.0)]
    best = np.argsort(-places_in_label(scores, labels), kind="stable")[:8]
    assert np.bincount(labels[best]).tolist() == [4, 4] and set(best) == {6, 7, 8, 9, 16, 17, 18, 19}
    assert np.bincount(labels[np.argsort(-scores)[:8]], minlength=2).tolist() == [0, 8]


def subject(start: str = "scratch"):
    images = load_images(Work("mislabel"))
    task = corrupt(images, 40, 0.2, 30, seed=0)
    return make_subject(images, task, Net(width=4, start_epochs=2), Training(epochs=3, batch=16, decay_every=2), start, 0)


def test_scoring_leaves_training_as_it_was() -> None:
    """Utility, trace and scored run are one training run: same start, same order, same end."""
    s = subject()
    trained = s.trained(s.task.ids, 5).state_dict()
    trace = follow(s, 3, 5)
    assert trace.steps == [3, 6, 9] and trace.lrs == [1e-3, 1e-3, 1e-4]
    assert all(torch.equal(trained[name], value) for name, value in trace.checkpoints[-1].items())
    scores = in_run(s, "whole", 5)["whole"]
    model = s.model()
    before = float(s.validation_loss(model).detach())
    train(model, adam(model, s.training), s.task.train, s.training, 5)
    fall = before - float(s.validation_loss(model).detach())
    assert scores.sum() == pytest.approx(fall, abs=0.05 * abs(fall) + 0.02)  # every push belongs to a sample
    assert Utility(s)(s.task.ids, 5)["validation"] == pytest.approx(-(before - fall))
    assert Utility(s)(s.task.ids[:0], 5)["validation"] == pytest.approx(-before)


def test_leave_one_out_keeps_all_others() -> None:
    s = subject()
    part = Utility(s, tuple(range(38)), (38, 39))
    assert part(np.array([0, 1]), 1) == Utility(s)(s.task.ids, 1)
    assert part(np.array([1]), 1) == Utility(s)(np.r_[np.arange(38), 39], 1)


def test_spread_takes_the_end_and_even_parts() -> None:
    trace = Trace(torch.nn.Linear(1, 1), [{}] * 25, [0.0] * 25, [{}] * 25, list(range(1, 26)))
    assert trace.spread(5)["steps"] == [5, 10, 15, 20, 25] and trace.spread(2)["steps"] == [13, 25]
    assert trace.spread(30)["steps"] == list(range(1, 26))


def test_starts_differ_and_repeat() -> None:
    clean, again, scratch = subject("clean"), subject("clean"), subject()
    assert all(torch.equal(clean.state[k], again.state[k]) for k in clean.state)
    assert float(clean.validation_loss(clean.model()).detach()) < float(scratch.validation_loss(scratch.model()).detach())
    new = subject("features")
    assert {k for k in clean.state if not torch.equal(clean.state[k], new.state[k])} == {"head.weight", "head.bias"}
    with pytest.raises(ValueError, match="clean, features or scratch"):
        subject("imagenet")


def test_wrong_labels_score_lower_on_digits() -> None:
    """The claim itself, at the smallest size where it must hold."""
    setting = Setting(samples=200, validation=100, training=Training(epochs=5), net=Net(width=8, start_epochs=3))
    scored = Scored(setting, Work("mislabel"), load_images(Work("mislabel")), 0)
    scores = in_run(scored.subject, "whole", 0)["whole"]
    assert auroc(scores, scored.task.changed) > 0.75


def test_label_means_are_taken_off() -> None:
    scores, labels = np.array([1.0, 3.0, 10.0, np.nan]), np.array([0, 0, 1, 1])
    assert within_label(scores, labels)[:3].tolist() == [-1.0, 1.0, 0.0]
    assert scores[0] == 1.0


class CountsThreads:
    """In the place of a subject: its loss is the number of threads that it was trained with."""

    def trained(self, positions: np.ndarray, seed: int) -> torch.nn.Module:
        self.seen = torch.get_num_threads()
        return torch.nn.Identity()

    def validation_loss(self, model: torch.nn.Module) -> torch.Tensor:
        assert torch.get_num_threads() == self.seen
        return torch.tensor(float(self.seen))


def test_training_again_takes_the_threads_of_the_process_that_asked() -> None:
    """joblib gives its processes as many as there are cores for each, and sums in torch depend on them."""
    torch.set_num_threads(3)
    utility = Utility(CountsThreads())
    torch.set_num_threads(2)  # as in a worker
    assert utility(np.array([0]), 0) == {"validation": -3.0} and torch.get_num_threads() == 2
    assert Utility(CountsThreads())(np.array([0]), 0) == {"validation": -2.0}  # the control

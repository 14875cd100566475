"""Baselines that train again, on games whose answers are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from games import Additive, gloves, majority, only, shapley
from inrun.baselines import run
from inrun.baselines.retraining import random_subsets
from inrun.errors import ConfigurationError, ValidationError

WEIGHTS = [0.5, -1.0, 2.0, 0.0, 0.25, 1.5]
N = len(WEIGHTS)
IDS = np.array([40, 10, 30, 20, 60, 50])
BOTH = {"a": None, "b": None}
#: Every retraining baseline, small.
ALL = {
    "data_shapley": {"permutations": 4, "tolerance": 0.0},
    "empirical_influence": {"subsets": 12},
    "datamodels": {"subsets": 12, "regression": "ridge"},
    "leave_one_out": {"repeats": 2},
}


def scores(table: pa.Table, name: str = "validation", ids: np.ndarray = IDS) -> np.ndarray:
    """Scores in the order of ``ids``."""
    found = {row["sample_id"]: row["score"] for row in table.to_pylist() if row["validation"] == name}
    return np.array([found[i] for i in ids.tolist()])


# Known answers


@pytest.mark.parametrize("base", [0.0, 3.0])
def test_an_additive_game_gives_its_weights(base: float) -> None:
    utility = Additive(WEIGHTS, base)
    for name, options in (
        ("data_shapley", {"permutations": 2, "tolerance": 0.0}),
        ("leave_one_out", {}),
        ("datamodels", {"subsets": 60, "draw": "coins", "regression": "ridge", "strength": 1e-6}),
    ):
        table = run(name, IDS, BOTH, utility=utility, **options)
        assert scores(table, "a") == pytest.approx(WEIGHTS, abs=1e-5), name
        assert scores(table, "b") == pytest.approx(WEIGHTS[::-1], abs=1e-5), name


def test_subsets_of_one_size_compare_with_the_average() -> None:
    """A sample that is in has taken the place of another; the control is the formula without that."""
    centred = WEIGHTS - np.mean(WEIGHTS)
    table = run("datamodels", IDS, BOTH, utility=Additive(WEIGHTS, 3.0), subsets=60, regression="ridge", strength=1e-6)
    assert scores(table, "a") == pytest.approx(centred, abs=1e-5)
    for draw, expected, wrong in (("size", centred * N / (N - 1), np.array(WEIGHTS)), ("coins", np.array(WEIGHTS), centred)):
        found = scores(run("empirical_influence", IDS, BOTH, utility=Additive(WEIGHTS), subsets=6000, draw=draw), "a")
        assert np.abs(found - expected).max() < 0.15
        assert np.abs(found - wrong).max() > 0.3


def test_empirical_influence_is_the_difference_of_means() -> None:
    utility, drawn = Additive(WEIGHTS), random_subsets(N, 12, 0.5, "size", 0)
    found = scores(run("empirical_influence", IDS, BOTH, utility=utility, subsets=12), "a")
    for k in range(N):
        values = {
            inside: [utility(np.flatnonzero(s.mask), 0)["a"] for s in drawn if s.mask[k] == inside] for inside in (True, False)
        }
        assert found[k] == pytest.approx(np.mean(values[True]) - np.mean(values[False]))


@pytest.mark.parametrize("regression", ["lasso", "ridge"])
def test_datamodels_choose_their_penalty(regression: str) -> None:
    """Of 30 samples three matter, in noise: they are found, and lasso leaves most others at 0."""
    n, strong = 30, {3: 1.0, 11: -1.0, 20: 0.5}
    weights = np.array([strong.get(i, 0.0) for i in range(n)])
    ids = np.arange(n)

    def utility(positions: np.ndarray, seed: int) -> dict[str, float]:
        return {"validation": weights[positions].sum() + 0.1 * np.random.default_rng(seed).standard_normal()}

    found = scores(run("datamodels", ids, None, utility=utility, subsets=200, draw="coins", regression=regression), ids=ids)
    assert np.abs(found - weights).max() < 0.1
    assert regression == "ridge" or (found == 0).sum() >= 10
    # Control: utilities that belong to other subsets tell nothing of the weights.
    shuffled = run(
        "datamodels", ids, None, utility=lambda p, s: utility((p * 7 + s) % n, s), subsets=200, draw="coins", regression=regression
    )
    assert np.abs(scores(shuffled, ids=ids) - weights).max() > 0.3


def test_datamodels_of_a_constant_are_zero() -> None:
    assert not scores(run("datamodels", IDS, None, utility=only(lambda s: 0.7), subsets=10)).any()


def test_data_shapley_of_known_games() -> None:
    """Gloves: one left and two right are worth 2/3, 1/6, 1/6. Majority: all the same. Both sum to V(all) exactly."""
    ids = np.arange(3)
    pair = gloves({0})
    assert shapley(3, pair) == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    found = scores(run("data_shapley", ids, None, utility=only(pair), permutations=3000), ids=ids)
    assert found.sum() == pytest.approx(1)
    assert found == pytest.approx([2 / 3, 1 / 6, 1 / 6], abs=0.03)
    # The control that must fail: leave-one-out is not the Shapley value; no right glove is missed while there is another.
    alone = scores(run("leave_one_out", ids, None, utility=only(pair)), ids=ids)
    assert alone == pytest.approx([1, 0, 0])
    found = scores(run("data_shapley", IDS[:5], None, utility=only(majority(5)), permutations=3000), ids=IDS[:5])
    assert found == pytest.approx([0.2] * 5, abs=0.03)


def test_data_shapley_of_a_game_with_interactions() -> None:
    game = lambda s: np.sqrt(sum(i + 1 for i in s)) - 0.5 * (1 in s and 3 in s)  # noqa: E731
    expected = shapley(N, game)
    found = scores(run("data_shapley", IDS, None, utility=only(game), permutations=1500, tolerance=0))
    assert found == pytest.approx(expected, abs=0.02)
    assert found.sum() == pytest.approx(game(range(N)))


# Truncation and seeds


def test_truncation_saves_training_and_cuts_each_set_by_itself(tmp_path: Path) -> None:
    """Of 20 samples the first three that come decide ``a`` (V = min(3, |S|)/3); ``b`` is decided by one more."""
    calls: list[int] = []

    def utility(positions: np.ndarray, seed: int) -> dict[str, float]:
        calls.append(len(positions))
        return {"a": min(3, len(positions)) / 3, "b": min(4, len(positions)) / 4}

    ids = np.arange(20)
    both = run("data_shapley", ids, BOTH, utility=utility, permutations=5, tolerance=0.01)
    assert calls == [20, 0, 1, 2, 3, 4] * 5
    assert scores(both, "a", ids).sum() == pytest.approx(1) and scores(both, "b", ids).sum() == pytest.approx(1)
    calls.clear()
    run("data_shapley", ids, BOTH, utility=utility, permutations=5, tolerance=0.0)
    assert calls == [20, 0, *range(1, 20)] * 5
    calls.clear()
    patient = run("data_shapley", ids, BOTH, utility=utility, permutations=1, tolerance=0.01, patience=3)
    assert calls == [20, 0, *range(1, 7)]
    assert scores(patient, "a", ids).sum() == pytest.approx(1)
    one = run("data_shapley", ids, {"a": None}, utility=lambda p, s: {"a": utility(p, s)["a"]}, permutations=5)
    assert (scores(one, "a", ids) == scores(both, "a", ids)).all()


def test_truncation_that_is_too_coarse_is_seen() -> None:
    """The control: a tolerance above V(all) − V(∅) leaves nothing."""
    assert not scores(run("data_shapley", IDS, BOTH, utility=Additive(WEIGHTS), permutations=2, tolerance=100.0), "a").any()


def test_seeds(tmp_path: Path) -> None:
    """Noise that depends on the seed alone cancels within a permutation and a pair; subsets have it each their own."""

    def utility(positions: np.ndarray, seed: int) -> dict[str, float]:
        assert 0 <= seed < 2**32
        return {"validation": sum(WEIGHTS[i] for i in positions) + np.random.default_rng(seed).standard_normal()}

    for name in ("data_shapley", "leave_one_out"):
        assert scores(run(name, IDS, None, utility=utility, **ALL[name])) == pytest.approx(WEIGHTS)
    for name in ("data_shapley", "empirical_influence", "datamodels"):
        first, again, other = (
            run(name, IDS, None, utility=only(lambda s: len(s) + 0.1 * sum(s) ** 2), seed=s, **ALL[name]) for s in (1, 1, 2)
        )
        assert first.equals(again) and not first.equals(other)
    assert len({s.seed for s in random_subsets(N, 50, 0.5, "size", 0)}) == 50


def test_drawn_subsets() -> None:
    drawn = random_subsets(10, 400, 0.3, "size", 5)
    assert {int(s.mask.sum()) for s in drawn} == {3}
    assert np.mean([s.mask for s in drawn], 0) == pytest.approx(0.3, abs=0.08)
    assert all(
        (x.mask == y.mask).all() and x.seed == y.seed for x, y in zip(drawn[:5], random_subsets(10, 5, 0.3, "size", 5), strict=True)
    )
    assert len({int(s.mask.sum()) for s in random_subsets(10, 50, 0.3, "coins", 5)}) > 3
    assert {int(s.mask.sum()) for s in random_subsets(3, 5, 0.01, "size", 5)} == {1}


# Keeping, resuming, sharing, jobs


@pytest.mark.parametrize("name", ALL)
def test_an_interrupted_run_goes_on(name: str, tmp_path: Path) -> None:
    whole = run(name, IDS, BOTH, utility=Additive(WEIGHTS, log=tmp_path / "whole"), **ALL[name])
    total = Additive([], log=tmp_path / "whole").calls()
    per_cell = N + 1 if name == "data_shapley" else 1  # a permutation is kept when it is done
    stopped = 2 * per_cell + per_cell // 2
    options = {"cells": tmp_path / "cells", **ALL[name]}
    with pytest.raises(KeyboardInterrupt):
        run(name, IDS, BOTH, utility=Additive(WEIGHTS, log=tmp_path / "log", stop_after=stopped), **options)
    kept = stopped // per_cell
    assert len(list((tmp_path / "cells").iterdir())) == kept
    told: list[tuple[str, int, int]] = []
    (tmp_path / "log").unlink()
    rest = Additive(WEIGHTS, log=tmp_path / "log")
    assert run(name, IDS, BOTH, utility=rest, tell=lambda *t: told.append(t), **options).equals(whole)
    assert rest.calls() == total - kept * per_cell
    cells = total // per_cell
    assert [t[1:] for t in told] == [(k, cells) for k in range(kept, cells + 1)] and told[0][0].startswith(name)
    assert run(name, IDS, BOTH, utility=Additive(WEIGHTS, log=tmp_path / "log", stop_after=0), **options).equals(whole)
    # Control: other samples at the same positions are another question.
    with pytest.raises(KeyboardInterrupt):
        run(name, IDS[::-1], BOTH, utility=Additive(WEIGHTS, log=tmp_path / "log", stop_after=0), **options)


def test_influence_and_datamodels_share_what_was_trained(tmp_path: Path) -> None:
    options = {"subsets": 12, "cells": tmp_path / "cells"}
    utility = Additive(WEIGHTS, log=tmp_path / "log")
    run("empirical_influence", IDS, BOTH, utility=utility, **options)
    assert utility.calls() == 12
    run("datamodels", IDS, BOTH, utility=utility, **options)
    assert utility.calls() == 12
    run("datamodels", IDS, BOTH, utility=utility, **{**options, "subsets": 15})
    assert utility.calls() == 15
    run("datamodels", IDS, BOTH, utility=utility, seed=1, **options)
    assert utility.calls() == 27


def test_a_damaged_cell_is_trained_again_and_a_foreign_one_refused(tmp_path: Path) -> None:
    options = {"subsets": 12, "cells": tmp_path / "cells"}
    utility = Additive(WEIGHTS, log=tmp_path / "log")
    whole = run("empirical_influence", IDS, BOTH, utility=utility, **options)
    first, second, third, *_ = (tmp_path / "cells").iterdir()
    assert json.loads(first.read_bytes())["found"].keys() == {"a", "b"}
    first.write_text("{")
    second.write_text("[]")
    third.write_text(json.dumps({"key": json.loads(third.read_bytes())["key"]}))
    assert run("empirical_influence", IDS, BOTH, utility=utility, **options).equals(whole)
    assert utility.calls() == 15
    with pytest.raises(ConfigurationError, match="kept for 'a', 'b', not for 'validation'.*folder of its own"):
        run("empirical_influence", IDS, None, utility=utility, **options)


def test_numbers_of_numpy_are_as_good_as_plain_ones_where_cells_are_kept(tmp_path: Path) -> None:
    plain, numpys = {"tolerance": 0.5, "patience": 2}, {"tolerance": np.float32(0.5), "patience": np.int64(2)}
    tables = [run("data_shapley", IDS, BOTH, utility=Additive(WEIGHTS), cells=tmp_path, **o) for o in (numpys, plain)]
    assert tables[0].equals(tables[1]) and len(list(tmp_path.iterdir())) == 100  # the same cells
    run("data_shapley", IDS, BOTH, utility=Additive(WEIGHTS), cells=tmp_path, tolerance=0.25, patience=2)
    assert len(list(tmp_path.iterdir())) == 200  # the control


@pytest.mark.parametrize("name", ALL)
def test_two_jobs_find_the_same(name: str, tmp_path: Path) -> None:
    """A closure, arrays that are large, and noise by seed: all as in one process."""
    large = np.random.default_rng(0).standard_normal((N, 30_000))

    def utility(positions: np.ndarray, seed: int) -> dict[str, float]:
        assert large.flags.writeable  # workers must not get a read-only map of a file
        noise = np.random.default_rng(seed).standard_normal(large.shape[1])
        return {"validation": float((large[positions].sum(0) * noise).sum())}

    one = run(name, IDS, None, utility=utility, **ALL[name])
    two = run(name, IDS, None, utility=utility, jobs=2, cells=tmp_path / "cells", **ALL[name])
    assert one.equals(two)
    assert one.equals(run(name, IDS, None, utility=utility, cells=tmp_path / "cells", **ALL[name]))


def test_an_interrupted_run_with_two_jobs_goes_on(tmp_path: Path) -> None:
    options = {"cells": tmp_path / "cells", "subsets": 12}
    whole = run("empirical_influence", IDS, BOTH, utility=Additive(WEIGHTS), subsets=12)

    def stop(what: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("empirical_influence", IDS, BOTH, utility=Additive(WEIGHTS), jobs=2, tell=stop, **options)
    kept = len(list((tmp_path / "cells").glob("*.json")))
    assert kept >= 4
    rest = Additive(WEIGHTS, log=tmp_path / "log")
    assert run("empirical_influence", IDS, BOTH, utility=rest, **options).equals(whole)
    assert rest.calls() <= 12 - 4


# What is wrong is named


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Additive(WEIGHTS)
    for name, options, error, words in (
        ("data_shapley", {"permutations": 0}, ConfigurationError, "permutations=0"),
        ("data_shapley", {"tolerance": float("nan")}, ConfigurationError, "tolerance=nan"),
        ("data_shapley", {"jobs": 0}, ConfigurationError, "jobs is 0"),
        ("data_shapley", {"utility": lambda p, s: {"a": 1.0}}, ValidationError, "6 samples.*numbers for 'a';.*each of 'a', 'b'"),
        ("leave_one_out", {"utility": lambda p, s: 1.0}, ValidationError, "got a float"),
        ("leave_one_out", {"utility": lambda p, s: {"a": 1.0, "b": np.nan}}, ValidationError, "'b' is nan"),
        ("leave_one_out", {"utility": lambda p, s: {"a": 1.0, "b": None}}, ValidationError, "'b' is a NoneType, not a number"),
        ("leave_one_out", {"utility": lambda p, s: {"a": "x", "b": 1}}, ValidationError, "'a' is a str, not a number"),
        ("leave_one_out", {"utility": lambda p, s: {"a": np.ones(2), "b": 1}}, ValidationError, "'a' is a ndarray"),
        ("leave_one_out", {"repeats": 0}, ConfigurationError, "repeats=0"),
        ("empirical_influence", {"subsets": 1}, ConfigurationError, "of 1 subsets, sample .*draw more"),
        ("empirical_influence", {"share": 1.0}, ConfigurationError, "share=1.0"),
        ("empirical_influence", {"draw": "dice"}, ConfigurationError, "'size' or 'coins'"),
        ("datamodels", {"regression": "forest"}, ConfigurationError, "lasso, ridge"),
        ("datamodels", {"strength": -1.0, "utility": None}, ConfigurationError, "strength=-1.0"),  # before training
        ("datamodels", {"strength": np.nan, "utility": None}, ConfigurationError, "strength=nan"),
        ("datamodels", {"subsets": 9}, ConfigurationError, "draw 10 or more"),
    ):
        with pytest.raises(error, match=words):
            run(name, IDS, BOTH, **{"utility": right, **options})
    for package, name, options in (("joblib", "leave_one_out", {"jobs": 2}), ("sklearn", "datamodels", {})):
        with monkeypatch.context() as m:
            m.setitem(sys.modules, package, None)
            with pytest.raises(ConfigurationError, match=r"pip install 'inrun\[baselines\]'"):
                run(name, IDS, BOTH, utility=right, **options)


def test_the_extra_is_imported_when_asked_for() -> None:
    code = "import sys, inrun.baselines; assert not {'joblib', 'sklearn', 'bm25s', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_docs_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "baselines-retraining.md").read_text(encoding="utf-8")
    blocks = text.split("```python\n")[1:]
    assert blocks
    for block in blocks:
        subprocess.run([sys.executable, "-W", "error", "-c", block.split("```")[0]], check=True)

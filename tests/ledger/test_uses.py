"""Scores from uses: against sums by hand, and the ledger on disk against its twin in memory."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty_files import QuickFiles
from inrun.ledger import Ledger, MemoryLedger, SettledCredits, StepRecord
from inrun.ledger.schema import SCORES
from inrun.ledger.scores import VIEWS

WHOLE = {"method": "whole"}


def record(step: int, ids: list[int], values: dict[str, list[float]], settled=(), lr: float = 0.5) -> StepRecord:
    accounts = [{"step": step, "validation": label, "lr": lr} for label in values]
    return StepRecord(step, np.array(ids, np.int64), {k: np.float32(v) for k, v in values.items()}, accounts, tuple(settled))


def settled(step: int, ids: list[int], credit: dict[str, list[float]], error: dict[str, list[float]]) -> SettledCredits:
    as32 = [{k: np.float32(v) for k, v in given.items()} for given in (credit, error)]
    return SettledCredits(step, np.array(ids, np.int64), *as32, np.ones(len(ids), np.float32))


#: Step 0 is settled, step 1 is not. Sample 7 is used twice in step 0, and again in step 1.
STEPS = [
    record(0, [7, 8, 7], {"v": [1, 2, 4], "f#0": [1, 1, 1], "f#1": [3, 1, 1]}),
    record(
        1,
        [7, 9],
        {"v": [8, 16], "f#0": [0, 0], "f#1": [2, 4]},
        [
            settled(
                0,
                [7, 8, 7],
                {"v": [10, 20, 30], "f#0": [1, 2, 3], "f#1": [5, 2, 3]},
                {"v": [3, 1, 4], "f#0": [3, 0, 4], "f#1": [1, 0, 0]},
            )
        ],
    ),
]


def by_sample(table: pa.Table, name: str) -> dict[int, dict]:
    assert table.schema.equals(SCORES)
    return {row["sample_id"]: row for row in table.to_pylist() if row["validation"] == name}


def both(tmp_path: Path, records, about=WHOLE) -> list[Ledger | MemoryLedger]:
    disk, memory = Ledger(tmp_path / "run", flush_every=10**6, about=about, files=QuickFiles()), MemoryLedger(about)
    for r in records:
        disk.write(r)
        memory.write(r)
    return [disk, memory]


def test_scores_by_hand(tmp_path) -> None:
    for ledger in both(tmp_path, STEPS):
        v = by_sample(ledger.scores(), "v")
        assert v[7] | {"score": 48.0, "step_score": 13.0, "pending": 1, "times_used": 3, "estimate_error": 5.0} == v[7]
        assert v[8] | {"score": 20.0, "step_score": 2.0, "pending": 0, "times_used": 1, "estimate_error": 1.0} == v[8]
        assert v[9] | {"score": 16.0, "step_score": 16.0, "pending": 1, "times_used": 1, "estimate_error": None} == v[9]
        assert (v[7]["first_step"], v[7]["last_step"]) == (0, 1)
        f = by_sample(ledger.scores(), "f")
        # Folds: 1 + 3 + 0 and 5 + 3 + 2; the estimates' squares are 9 + 16 and 1.
        assert f[7]["score"] == 7.0 and f[7]["step_score"] == (2 + 6) / 2 and f[7]["pending"] == 1
        assert math.isclose(f[7]["estimate_error"], math.sqrt((25 + 1) / 2))
        assert math.isclose(f[7]["standard_error"], 3.0)


def test_every_use_is_pending_until_it_is_settled(tmp_path) -> None:
    for ledger in both(tmp_path, [STEPS[0]]):
        rows = ledger.scores().to_pylist()
        assert all(row["pending"] == row["times_used"] and row["score"] == row["step_score"] for row in rows)
        assert all(row["estimate_error"] is None for row in rows)


def test_the_step_game_has_nothing_pending(tmp_path) -> None:
    for ledger in both(tmp_path, [STEPS[0]], about={}):
        scores = ledger.scores()
        assert scores["score"].equals(scores["step_score"])
        assert set(scores["pending"].to_pylist()) == {0} and scores["estimate_error"].null_count == len(scores)


@pytest.mark.parametrize("view", VIEWS)
def test_the_step_game_is_the_contributions_to_the_bit(tmp_path, view: str) -> None:
    """Whole credit with credits that repeat the contributions gives the same numbers; scaled ones do not."""
    rng = np.random.default_rng(0)
    records = [record(t, rng.integers(0, 9, 5), {"v": rng.standard_normal(5), "f#0": rng.standard_normal(5)}) for t in range(9)]
    plain = Ledger(tmp_path / "plain", flush_every=7, files=QuickFiles())
    same = Ledger(tmp_path / "same", flush_every=7, files=QuickFiles(), about=WHOLE)
    other = Ledger(tmp_path / "other", flush_every=7, files=QuickFiles(), about=WHOLE)
    for r in records:
        zero = {label: np.zeros(5) for label in r.contributions}
        plain.write(r)
        for ledger, scale in ((same, 1), (other, -2)):
            credit = {label: scale * c for label, c in r.contributions.items()}
            ledger.write(
                StepRecord(r.step, r.sample_ids, r.contributions, r.accounts, (settled(r.step, r.sample_ids, credit, zero),))
            )
    alike = ["sample_id", "validation", "score", "standard_error", "times_used", "first_step", "last_step", "step_score", "pending"]
    assert plain.scores(view=view).select(alike).equals(same.scores(view=view).select(alike))
    assert not plain.scores(view=view)["score"].equals(other.scores(view=view)["score"])  # the control
    assert plain.scores(view=view)["score"].equals(other.scores(view=view)["step_score"])


def test_views_show_error_and_own_part_alike(tmp_path) -> None:
    disk, _ = both(tmp_path, STEPS)
    per_lr = by_sample(disk.scores("v", "per_lr"), "v")[7]
    assert (per_lr["score"], per_lr["step_score"], per_lr["estimate_error"], per_lr["pending"]) == (96.0, 26.0, 10.0, 1)
    standardised = by_sample(disk.scores("v", "standardised"), "v")[7]
    assert standardised["score"] == pytest.approx(40 / 20 + 8 / 12)  # mean absolute values: of credits 20, of step 1 12
    assert standardised["step_score"] == pytest.approx(5 / (7 / 3) + 8 / 12)
    assert standardised["estimate_error"] == pytest.approx(5 / 20)
    rank = by_sample(disk.scores("v", "rank"), "v")[7]
    assert (rank["score"], rank["step_score"]) == (pytest.approx((-1 + 1 - 1) / 3), pytest.approx((-1 + 1 - 1) / 3))
    assert rank["estimate_error"] is None and rank["pending"] == 1


def test_open_credits_stand_in_for_open_windows_and_stay_pending(tmp_path) -> None:
    open_ = settled(1, [7, 9], {"v": [100, 200], "f#0": [0, 0], "f#1": [0, 0]}, {"v": [12, 1], "f#0": [0, 0], "f#1": [0, 0]})
    late = settled(0, [7, 8, 7], {"v": [-1, -1, -1]}, {"v": [0, 0, 0]})  # settled meanwhile: what is settled stands
    for ledger in both(tmp_path, STEPS):
        before = ledger.scores()
        v = by_sample(ledger.scores(open_credits=[open_, late]), "v")
        assert v[7] | {"score": 140.0, "step_score": 13.0, "pending": 1, "times_used": 3, "estimate_error": 13.0} == v[7]
        assert v[9] | {"score": 200.0, "pending": 1, "estimate_error": 1.0} == v[9]
        assert v[8]["score"] == 20.0
        assert ledger.scores().equals(before) and ledger.credits()["step"].to_pylist() == [0] * 9  # nothing was settled by asking


def test_open_credits_of_a_run_without_any_settled(tmp_path) -> None:
    open_ = settled(0, [7, 8, 7], {"v": [1, 1, 1]}, {"v": [0, 0, 0]})
    for ledger in both(tmp_path, [record(0, [7, 8, 7], {"v": [5, 5, 5]})], about={}):
        assert [row["score"] for row in ledger.scores(open_credits=[open_]).to_pylist()] == [2.0, 1.0]
        assert [row["pending"] for row in ledger.scores(open_credits=[open_]).to_pylist()] == [2, 1]
        assert [row["score"] for row in ledger.scores().to_pylist()] == [10.0, 5.0]


def test_a_rank_that_settled_before_another(tmp_path) -> None:
    """Both ranks use step 0, one sample on both. Its credits count when both have settled it, and none is taken for the other's."""
    zero = Ledger(tmp_path / "run", world=2, flush_every=10**6, about=WHOLE, files=QuickFiles())
    one = Ledger(tmp_path / "run", rank=1, world=2, flush_every=10**6, files=QuickFiles())
    zero.write(record(0, [1, 2], {"v": [1, 2]}))
    one.write(record(0, [2, 4], {"v": [3, 4]}))
    one.settle([replace(settled(0, [2, 4], {"v": [30, 40]}, {"v": [0, 0]}), rows=np.array([2, 3]))])
    for ledger in (zero, one):
        ledger.flush()
    scores = by_sample(zero.scores(), "v")
    assert {i: (row["score"], row["pending"], row["times_used"]) for i, row in scores.items()} == {
        1: (1.0, 1, 1),
        2: (5.0, 2, 2),
        4: (4.0, 1, 1),
    }
    zero.settle([settled(0, [1, 2], {"v": [10, 20]}, {"v": [0, 0]})])
    scores = by_sample(zero.scores(), "v")
    assert {i: (row["score"], row["pending"], row["times_used"]) for i, row in scores.items()} == {
        1: (10.0, 0, 1),
        2: (50.0, 0, 2),
        4: (40.0, 0, 1),
    }
    assert zero.credits()["row"].to_pylist() == [0, 1, 2, 3]


FLOAT = st.floats(-4, 4, width=32)


@st.composite
def a_run(draw) -> tuple[list[StepRecord], list[SettledCredits], list[SettledCredits], dict]:
    """Steps with repeated ids, some settled with a later step or at the end, some open; rows that come late."""
    labels = draw(st.sampled_from([["v"], ["f#0", "f#1"], ["v", "f#0", "f#1", "p[0]"]]))
    ids, waiting, records, closing, open_ = {}, [], [], [], []
    for step in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 4))
        ids[step] = draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))

        def columns(n=n, low=-4.0):
            return {x: draw(st.lists(st.floats(low, 4, width=32), min_size=n, max_size=n)) for x in labels}

        waiting.append((step, columns(), columns(low=0.0)))
        done = [settled(s, ids[s], c, e) for s, c, e in waiting if draw(st.booleans())]
        waiting = [w for w in waiting if w[0] not in {s.step for s in done}]
        records.append(record(step, ids[step], columns(), done))
    for step, credit, error in waiting:
        where = draw(st.sampled_from([closing, open_, []]))
        where.append(settled(step, ids[step], credit, error))
    return records, closing, open_, draw(st.sampled_from([{}, WHOLE]))


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_is_the_twin_of_a_saved_ledger(examples: int) -> None:
    settings(max_examples=examples, deadline=None)(given(a_run())(check_twin))()


def check_twin(found) -> None:
    records, closing, open_, about = found
    memory = MemoryLedger(about)
    for r in records:
        memory.write(r)
    memory.settle(closing)
    folder = Path(tempfile.mkdtemp())
    try:
        reader = Ledger.open(memory.save(folder / "run", {}))
        assert reader.credits().equals(memory.credits())
        for given_ in ([], open_):
            disk = reader.scores(open_credits=given_)
            twin = memory.scores(open_credits=given_).sort_by([("validation", "ascending"), ("sample_id", "ascending")])
            assert disk.schema.equals(twin.schema)
            for name in SCORES.names:
                a, b = disk[name], twin[name]
                if not pa.types.is_floating(SCORES.field(name).type):
                    assert a.equals(b), name
                    continue
                assert a.is_null().equals(b.is_null()), name
                assert np.allclose(a.to_numpy(), b.to_numpy(), rtol=1e-12, atol=1e-12, equal_nan=True), name
    finally:
        shutil.rmtree(folder)

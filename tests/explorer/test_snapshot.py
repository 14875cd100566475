"""What the explorer adds up is what the ledger adds up, also step by step while the run is written."""

from __future__ import annotations

import duckdb
import numpy as np
import pyarrow.compute as pc
import pytest

from explorer_runs import Written, samples
from inrun.explorer import Snapshot, Store
from inrun.explorer.sums import MEASURES
from inrun.ledger import Ledger, LedgerReader


@pytest.fixture
def store():
    with Store() as made:
        yield made


def same_as_ledger(snapshot: Snapshot) -> None:
    """Every figure of every sample and set, and nothing else."""
    truth = snapshot.reader.scores()
    view, con = snapshot.view, snapshot.store.cursor()
    assert list(view.sets) == sorted(set(truth["validation"].to_pylist()))
    for place, name in enumerate(view.sets):
        want = truth.filter(pc.equal(truth["validation"], name))
        columns = ", ".join(f"{m}_{place}" for m in MEASURES)
        sql = f"SELECT sample_id, {columns} FROM {snapshot.schema}.items WHERE times_used_{place} > 0 ORDER BY 1"  # noqa: S608
        got = con.execute(sql).fetchall()
        assert [r[0] for r in got] == want["sample_id"].to_pylist()
        for k, measure in enumerate(MEASURES, 1):
            mine = np.array([np.nan if r[k] is None else r[k] for r in got], float)
            theirs = want[measure].to_numpy(zero_copy_only=False).astype(float)
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-12, err_msg=f"{name} {measure}")
    con.close()


@pytest.mark.parametrize("window", [None, 3])
def test_scores_are_those_of_the_ledger_at_every_flush(tmp_path, store, window) -> None:
    run = Written(tmp_path / "run", window=window)
    run.ledger.register_samples(samples())
    run.steps(1)
    snapshot = Snapshot(store, LedgerReader(run.path), 0)
    assert snapshot.refresh() and snapshot.error is None
    same_as_ledger(snapshot)
    for count in (1, 5, 2, 1, 1):
        run.steps(count)
        assert snapshot.refresh(), snapshot.error
        assert snapshot.view.last_step == run.step - 1
        same_as_ledger(snapshot)
    assert not snapshot.refresh()  # nothing new
    run.ledger.close()
    snapshot.refresh()
    same_as_ledger(snapshot)


def test_only_new_steps_are_read(tmp_path, store, monkeypatch) -> None:
    from inrun.explorer import reading

    run = Written(tmp_path / "run")
    run.steps(10)
    snapshot = Snapshot(store, LedgerReader(run.path), 0)
    snapshot.refresh()
    asked, sums = [], reading.sums
    monkeypatch.setattr(reading, "sums", lambda tables, where: asked.append(where) or sums(tables, where))
    run.steps(2)
    snapshot.refresh()
    assert asked == ["step > 9"]
    same_as_ledger(snapshot)


@pytest.mark.parametrize("window", [None, 3])
def test_a_run_resumed_from_an_older_mark_starts_afresh(tmp_path, store, window) -> None:
    run = Written(tmp_path / "run", window=window)
    run.ledger.register_samples(samples())
    run.steps(6)
    mark = run.ledger.mark()
    run.steps(5)
    snapshot = Snapshot(store, LedgerReader(run.path), 0)
    snapshot.refresh()
    assert snapshot.view.last_step == 10
    run.ledger.close()
    run.ledger, run.step = Ledger.resume(run.path, mark), 6
    run.steps(2)
    snapshot.refresh()
    assert snapshot.view.last_step == 7
    same_as_ledger(snapshot)


def test_late_samples_sets_and_columns(tmp_path, store) -> None:
    run = Written(tmp_path / "run", labels=("docs",))
    snapshot = Snapshot(store, LedgerReader(run.path), 0)
    assert snapshot.refresh()
    assert snapshot.view.samples == 0 and snapshot.view.sets == ()  # a run that has just begun
    run.steps(3)
    snapshot.refresh()
    used = snapshot.view.samples
    assert used > 0 and snapshot.view.columns == ()
    run.ledger.register_samples(samples())
    run.ledger.flush()
    snapshot.refresh()
    assert snapshot.view.samples == 12 and [c.name for c in snapshot.view.columns][:2] == ["id", "domain"]
    run.steps(2, labels=("another", "docs"))
    snapshot.refresh()
    assert snapshot.view.sets == ("another", "docs")
    same_as_ledger(snapshot)
    run.ledger.register_samples([{"sample_id": 99, "id": "late", "domain": "math", "tokens": 1, "good": True, "text": "late"}])
    run.ledger.flush()
    snapshot.refresh()
    assert snapshot.view.samples == 13 and snapshot.view.scored <= 12
    same_as_ledger(snapshot)


def test_ranks_that_are_behind(tmp_path, store) -> None:
    """Steps that not every rank has written are not shown."""
    first = Written(tmp_path / "run", rank=0, world=2)
    second = Written(tmp_path / "run", rank=1, world=2)
    first.steps(4)
    second.steps(2)
    snapshot = Snapshot(store, LedgerReader(first.path), 0)
    snapshot.refresh()
    assert snapshot.view.last_step == 1
    same_as_ledger(snapshot)
    second.steps(2)
    snapshot.refresh()
    assert snapshot.view.last_step == 3
    same_as_ledger(snapshot)


def test_damage_is_told_and_what_was_read_stays(tmp_path, store) -> None:
    run = Written(tmp_path / "run")
    run.steps(3)
    snapshot = Snapshot(store, LedgerReader(run.path), 0)
    snapshot.refresh()
    run.steps(1)
    part = max((run.path / "contributions").iterdir())
    whole = part.read_bytes()
    part.write_bytes(whole[:-5])
    assert not snapshot.refresh()
    assert "verify" in snapshot.error and snapshot.view.last_step == 2
    part.write_bytes(whole)
    assert snapshot.refresh() and snapshot.error is None and snapshot.view.last_step == 3


def test_large_ids_and_the_store_goes(tmp_path) -> None:
    with Store() as store:
        run = Written(tmp_path / "run")
        run.ledger.register_samples([{"sample_id": 2**63 - 1, "text": "far"}, {"sample_id": -(2**63), "text": "near"}])
        run.steps(1)
        snapshot = Snapshot(store, LedgerReader(run.path), 0)
        snapshot.refresh()
        same_as_ledger(snapshot)
        assert store.folder.is_dir()
    assert not store.folder.exists()


SORTED = """
SELECT count(*), max(place) FROM (SELECT a, row_number() OVER (ORDER BY b) AS place FROM (
    SELECT hash(range)::VARCHAR AS a, hash(range + 1)::VARCHAR AS b FROM range(1_500_000)))
"""


def test_the_store_goes_to_its_own_folder_beyond_its_memory() -> None:
    """It may reach no other file; what does not fit into memory must still find room."""
    with Store(memory_limit="60MB", threads=1) as store:
        assert store.cursor().execute(SORTED).fetchall() == [(1_500_000, 1_500_000)]
        assert (store.folder / "spill").exists()
    config = {"memory_limit": "60MB", "threads": 1, "temp_directory": ""}
    with duckdb.connect(":memory:", config=config) as control, pytest.raises(duckdb.OutOfMemoryException):
        control.execute(SORTED)

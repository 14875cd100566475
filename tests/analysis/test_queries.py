"""Questions to the ledger against plain sums."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from inrun.analysis import queries
from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.schema import SCORES
from inrun.ledger.scores import VIEWS, _parts

LABELS = ("math#0", "math#1", "math#2", "code", "point[0]", "point[1]")


def account(step, label, lr=1e-3, **more):
    empty = dict.fromkeys(("loss_after", "optimizer", "momentum", "decay", "residual", "skipped"))
    return {
        "step": step,
        "validation": label,
        "loss_before": 2.0,
        "data": 0.1,
        "spread": 1.0,
        "lr": lr,
        "clip": 1.0,
        "n_samples": 4,
    } | (empty | more)


def records(steps=30, batch=6, samples=25, labels=LABELS, seed=0):
    """Steps with repeated ids, ties, a skipped step, steps without a learning rate and rows that settle late."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        ids = rng.integers(-3, samples - 3, batch)
        values = {x: np.round(rng.standard_normal(batch) / (1 + step), 1 + step % 3).astype(np.float32) for x in labels}
        if step == 7:
            yield StepRecord(step, ids, {}, [account(step, x, skipped="loss is nan") for x in labels])
            continue
        lr = None if step == 9 else 0.0 if step == 10 else 1e-3 / (1 + step)
        yield StepRecord(step, ids, values, [account(step, x, lr) for x in labels])
        if step % 8 == 5:  # late: an earlier step, without accounts
            yield StepRecord(step - 3, ids[:2], {x: v[:2] for x, v in values.items()})


def write(path, given, flush_every=250, samples=None):
    with Ledger(path, flush_every=flush_every, about={"method": "first"}) as ledger:
        for record in given:
            ledger.write(record)
        if samples is not None:
            ledger.register_samples(samples)
    return Ledger.open(path)


def metadata(ids=range(-3, 18)):
    return [{"sample_id": i, "domain": "abc"[i % 3], "owner": None if i % 4 == 0 else f"o{i % 4}", "text": f"t{i}"} for i in ids]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    # The name has everything that globbing and SQL could trip over.
    return write(tmp_path_factory.mktemp("q") / "a [1]*? 'x' \"y\"; --", records(), samples=metadata())


def uses(given, view="plain"):
    """The rows of a run as (step, id, label, value), seen through a view, in plain Python."""
    rows = [
        (r.step, int(i), x, float(c))
        for r in given
        for x, v in r.contributions.items()
        for i, c in zip(r.sample_ids, v, strict=True)
    ]
    if view == "plain":
        return rows
    if view == "specific":
        return specifically(rows)
    by_step = {}
    for row in rows:
        by_step.setdefault((row[0], row[2]), []).append(row[3])
    lrs = {a["step"]: a["lr"] for r in given for a in r.accounts}
    seen = []
    for step, i, x, c in rows:
        of_step = np.array(by_step[step, x])
        if view == "per_lr":
            if lrs.get(step):
                seen.append((step, i, x, c / lrs[step]))
        elif view == "standardised":
            seen.append((step, i, x, c / np.abs(of_step).mean() if np.abs(of_step).mean() else 0.0))
        else:
            place = ((of_step < c).sum() + (of_step <= c).sum() + 1) / 2
            seen.append((step, i, x, 2 * (place - 1) / (len(of_step) - 1) - 1 if len(of_step) > 1 else 0.0))
    return seen


def specifically(rows):
    """Rows without what other sets predict: ridge regression as least squares with a row more per label, use by use."""
    labels = sorted({x for _, _, x, _ in rows})
    by_use, count = {}, {}
    for step, i, x, c in rows:
        use = by_use.setdefault((step, i), dict.fromkeys(labels, 0.0))
        use[x] += c
        count[step, i, x] = count.get((step, i, x), 0) + 1
    values = {x: np.array([use[x] for use in by_use.values()]) for x in labels}
    predicted = {}
    for name in {x.split("#")[0] for x in labels}:
        own, others = ([x for x in labels if (x.split("#")[0] == name) is mine] for mine in (True, False))
        sizes = [np.sqrt((values[x] ** 2).sum()) for x in others]
        a = np.concatenate([np.stack([values[x] for x in others], 1), np.diag(sizes)])
        y = np.concatenate([np.mean([values[x] for x in own], 0), np.zeros(len(others))])
        b = np.linalg.lstsq(a, y, rcond=None)[0]
        predicted[name] = {use: sum(w * by_use[use][x] for w, x in zip(b, others, strict=True)) for use in by_use}
    return [(step, i, x, c - predicted[x.split("#")[0]][step, i] / count[step, i, x]) for step, i, x, c in rows]


def expected(given, view="plain", upto=None, since=None):
    """Scores by dictionaries: {(set, id): (score, error, uses, first, last, sum over uses)}."""
    folds = {}
    for step, i, x, c in uses(given, view):
        if (upto is None or step <= upto) and (since is None or step >= since):
            folds.setdefault((x.split("#")[0], i), {}).setdefault(x, []).append((step, c))
    found = {}
    for key, by_label in folds.items():
        added = [math.fsum(c for _, c in rows) for rows in by_label.values()]
        count = len(next(iter(by_label.values())))
        values = [a / count for a in added] if view == "rank" else added
        error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
        steps = [s for rows in by_label.values() for s, _ in rows]
        found[key] = (np.mean(values), error, count, min(steps), max(steps), np.mean(added))
    return found


def near(a, b):
    return (a is None) == (b is None) and (a is None or a == pytest.approx(b, rel=1e-9, abs=1e-12))


@pytest.mark.parametrize("view", list(VIEWS))
def test_scores_are_the_plain_sums(run, view) -> None:
    truth = expected(list(records()), view)
    found = run.scores(view=view).to_pylist()
    assert [(r["validation"], r["sample_id"]) for r in found] == sorted(truth)
    for row in found:
        score, error, count, first, last, _ = truth[row["validation"], row["sample_id"]]
        assert near(row["score"], score)
        assert near(row["standard_error"], error)
        assert (row["times_used"], row["first_step"], row["last_step"]) == (count, first, last)


def test_the_views_differ(run) -> None:
    """A control: were a view ignored, the test above could not see it if they all agreed."""
    found = [run.scores(view=v, validation="code") for v in VIEWS]
    assert len({tuple(t["score"].to_pylist()) for t in found}) == len(VIEWS)
    assert queries.left_out(run, "per_lr") == (2 * 6 + 2) * len(LABELS)  # two late rows speak of step 10
    assert queries.left_out(run, "per_lr", "code") == 2 * 6 + 2
    assert queries.left_out(run, "rank") == 0


def test_memory_and_disk_agree_to_the_bit(run) -> None:
    memory = MemoryLedger()
    for record in records():
        memory.write(record)
    key = [("validation", "ascending"), ("sample_id", "ascending")]
    assert run.scores().sort_by(key).equals(memory.scores().sort_by(key))


def test_a_saved_memory_ledger_answers_too(tmp_path, run) -> None:
    memory = MemoryLedger()
    for record in records():
        memory.write(record)
    assert queries.scores(memory.save(tmp_path / "saved", {"method": "first"})).equals(run.scores())
    assert queries.info(tmp_path / "saved").rows == queries.info(run).rows


def test_the_same_question_twice_gives_the_same_bits(run) -> None:
    for view in VIEWS:
        assert queries.scores(run, view=view).equals(queries.scores(run.path, view=view))
    for ask in ({}, {"stages": 4}, {"stages": 4, "cumulative": True, "view": "rank"}):
        assert queries.groups(run, **ask).equals(queries.groups(run, **ask))
    assert queries.agreement(run, "math", "code") == queries.agreement(run, "math", "code")


def test_the_same_bits_with_many_rows_and_little_memory(tmp_path) -> None:
    """So many groups that DuckDB goes to disk; sums of mixed sizes, where the order of adding shows."""
    rng = np.random.default_rng(0)
    n = 300_000
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)
    ids = rng.integers(0, 60_000, n)
    steps = enumerate(zip(np.split(ids, 300), np.split(values, 300), strict=True))
    reader = write(tmp_path / "run", [StepRecord(s, i, {"v": c}) for s, (i, c) in steps], flush_every=60_000)
    found = reader.scores()
    assert found.equals(reader.scores())
    with reader.tables(memory_limit="40MB") as tables:
        assert tables.row("SELECT current_setting('enable_progress_bar')") == (False,)
        assert tables.row("SELECT current_setting('threads')") == (1,)  # several would add in any order
        again = tables.table("SELECT sample_id, sum(contribution::DOUBLE) AS score FROM contributions GROUP BY 1 ORDER BY 1")
    order = np.argsort(ids, kind="stable")
    truth = np.add.reduceat(values[order].astype(np.float64), np.unique(ids[order], return_index=True)[1])
    assert np.allclose(found["score"].to_numpy(), truth, rtol=1e-9)
    assert np.allclose(again["score"].to_numpy(), truth, rtol=1e-9)


def test_taking_samples_and_steps_in_parts_changes_nothing(run, monkeypatch) -> None:
    asks = [{"view": v} for v in VIEWS]
    whole = [run.scores(**ask) for ask in asks]
    groups = queries.groups(run, stages=4, cumulative=True, view="rank").to_pylist()
    monkeypatch.setattr("inrun.ledger.scores.GROUPS_AT_ONCE", 30)
    monkeypatch.setattr("inrun.ledger.scores.ROWS_AT_ONCE", 100)
    with run.tables() as tables:
        assert _parts(tables, 6, 1.0) > 3
    for ask, table in zip(asks, whole, strict=True):
        again = run.scores(**ask)
        if ask["view"] in ("plain", "per_lr"):
            assert again.equals(table)
        rounded = ["score", "standard_error", "step_score"]
        assert again.drop(rounded).equals(table.drop(rounded))
        assert np.allclose(again["score"].to_numpy(), table["score"].to_numpy(), rtol=1e-12, atol=1e-14)
    for a, b in zip(queries.groups(run, stages=4, cumulative=True, view="rank").to_pylist(), groups, strict=True):
        assert near(a["total"], b["total"])
        assert a["uses"] == b["uses"]


def test_memory_stays_small(tmp_path) -> None:
    """A million rows are answered in a process that must not take much more than DuckDB is allowed."""
    code = f"""
import numpy as np
from inrun.ledger import Ledger, StepRecord
with Ledger({str(tmp_path / "run")!r}, flush_every=500_000) as ledger:
    rng = np.random.default_rng(0)
    for step in range(20):
        ledger.write(StepRecord(step, rng.integers(0, 10**5, 50_000), {{"v": rng.standard_normal(50_000).astype(np.float32)}}))
table = Ledger.open({str(tmp_path / "run")!r}).scores(view="standardised")
assert table.num_rows > 99_000, table.num_rows
import sys; assert "torch" not in sys.modules
# Not ru_maxrss: a child begins with that of its parent, which here is a whole test run.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1_000_000  # kB


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_interleaving_and_any_id(tmp_path_factory, data) -> None:
    ids = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5, unique=True))
    given = []
    for step in range(data.draw(st.integers(1, 6))):
        batch = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=6))
        values = data.draw(st.lists(st.floats(-1e3, 1e3, width=32), min_size=len(batch), max_size=len(batch)))
        given.append(StepRecord(step, np.array(batch, np.int64), {x: np.array(values, np.float32) for x in ("a#0", "a#1", "b")}))
    order = data.draw(st.permutations(given))
    reader = write(
        tmp_path_factory.mktemp("h") / "run",
        order,
        flush_every=data.draw(st.integers(1, 20)),
        samples=[{"sample_id": i} for i in ids],
    )
    truth = expected(given)
    found = reader.scores().to_pylist()
    assert {(r["validation"], r["sample_id"]) for r in found} == set(truth)
    for row in found:
        score, _, count, first, last, _ = truth[row["validation"], row["sample_id"]]
        assert row["score"] == pytest.approx(score, rel=1e-9, abs=1e-9)
        assert (row["times_used"], row["first_step"], row["last_step"]) == (count, first, last)
    assert queries.info(reader).used_without_metadata == 0


# Groups


def group_truth(given, view="plain", upto=None, since=None, by="domain"):
    kinds = {r["sample_id"]: r[by] for r in metadata()}
    found = {}
    for (name, i), row in expected(given, view, upto, since).items():
        found.setdefault((kinds.get(i), name), []).append(row)
    return {
        key: {
            "total": sum(r[0] for r in rows),
            "mean_per_sample": sum(r[0] for r in rows) / len(rows),
            "mean_per_use": sum(r[5] for r in rows) / sum(r[2] for r in rows),
            "samples": len(rows),
            "uses": sum(r[2] for r in rows),
            "negative_share": share_below_zero([r[0] for r in rows]),
            "clear_share": share_below_zero([r[0] + 2 * r[1] for r in rows]) if rows[0][1] is not None else None,
        }
        for key, rows in found.items()
    }


def share_below_zero(values):
    """From and to: values that are zero but for rounding may be counted or not."""
    return sum(v < -1e-12 for v in values) / len(values), sum(v < 1e-12 for v in values) / len(values)


def same_groups(found, truth) -> None:
    assert {(r["group"], r["validation"]) for r in found} == set(truth)
    for row in found:
        for name, value in truth[row["group"], row["validation"]].items():
            if isinstance(value, tuple):
                assert value[0] <= row[name] <= value[1], (row, name, value)
            else:
                assert near(row[name], value), (row, name, value)


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("by", ["domain", "owner"])
def test_groups_are_the_plain_sums(run, view, by) -> None:
    same_groups(queries.groups(run, by, view=view).to_pylist(), group_truth(list(records()), view, by=by))


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("view", list(VIEWS))
def test_stages(run, view, cumulative) -> None:
    found = queries.groups(run, stages=7, cumulative=cumulative, view=view).to_pylist()
    stages = sorted({(r["stage"], r["first_step"], r["last_step"]) for r in found})
    assert len(stages) == 7
    assert stages[0][1] == 0
    assert stages[-1][2] == 29
    if not cumulative:
        assert all(b[1] == a[2] + 1 for a, b in pairwise(stages))
    for stage, first, last in stages:
        rows = [r for r in found if r["stage"] == stage]
        truth = group_truth(list(records()), view, last, first)
        same_groups([r for r in rows if r["samples"]], truth)
        assert all(r["total"] == 0 and r["mean_per_sample"] is None for r in rows if not r["samples"])


def test_the_last_cumulative_stage_is_the_whole_run_and_more_stages_than_steps_are_not_made(run) -> None:
    whole = {(r["group"], r["validation"]): r["total"] for r in queries.groups(run).to_pylist()}
    last = [r for r in queries.groups(run, stages=1000, cumulative=True).to_pylist() if r["last_step"] == 29]
    assert {r["stage"] for r in last} == {29}
    assert all(near(r["total"], whole[r["group"], r["validation"]]) for r in last)


def test_extremes_carry_metadata(run) -> None:
    every = run.scores(validation=["code", "math"]).to_pylist()
    meta = {r["sample_id"]: r for r in metadata()}
    for largest in (True, False):
        found = queries.extremes(run, 4, ["math", "code"], largest).to_pylist()
        for name in ("code", "math"):
            ranked = sorted(
                (r for r in every if r["validation"] == name),
                key=lambda r: (-r["score"] if largest else r["score"], r["sample_id"]),
            )
            mine = [r for r in found if r["validation"] == name]
            assert [r["sample_id"] for r in mine] == [r["sample_id"] for r in ranked[:4]]
            for r in mine:
                assert r["text"] == meta.get(r["sample_id"], {}).get("text")


def test_rank_agreement(run) -> None:
    def column(name):
        return run.scores(validation=name)["score"].to_numpy()

    found = queries.agreement(run, "math", "code")
    assert found.spearman == pytest.approx(stats.spearmanr(column("math"), column("code")).statistic)
    assert found.samples == len(column("math"))
    assert queries.agreement(run, "math", "math").spearman == pytest.approx(1)


def test_info(run) -> None:
    found = queries.info(run)
    given = list(records())
    assert found.steps == 30
    assert found.skipped == {"loss is nan": 1}
    assert found.rows == len(uses(given))
    assert found.validation == {"code": 1, "math": 3, "point[0]": 1, "point[1]": 1}
    used = {i for _, i, _, _ in uses(given)}
    assert found.samples_used == len(used)
    assert found.samples_registered == 21
    assert found.used_without_metadata == len(used - set(range(-3, 18)))
    assert found.lr_low == 0.0
    assert found.nbytes > 1000


def test_a_writer_can_be_asked_too(tmp_path) -> None:
    with Ledger(tmp_path / "run", flush_every=10**6) as ledger:
        ledger.write(StepRecord(0, np.array([1, 2]), {"v": np.array([1, -1], np.float32)}))
        assert ledger.scores()["score"].to_pylist() == [1, -1]
        assert queries.info(ledger).rows == 2


# Bad input


def test_an_empty_ledger(tmp_path) -> None:
    reader = write(tmp_path / "run", [], samples=metadata())
    assert reader.scores().equals(SCORES.empty_table())
    assert queries.info(reader).first_step is None
    for ask in (lambda: queries.groups(reader), lambda: queries.extremes(reader, 1)):
        with pytest.raises(LedgerError, match="no contributions yet"):
            ask()


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda r: queries.scores(r, "nosuch"), ConfigurationError, "no validation set 'nosuch'; it has 'code', 'math'"),
        (lambda r: queries.scores(r, ["math", "x' OR 1=1 --"]), ConfigurationError, "no validation set"),
        (lambda r: queries.scores(r, view="best"), ConfigurationError, "plain, rank, per_lr, standardised"),
        (lambda r: queries.groups(r, "colour"), ConfigurationError, "no column 'colour'; they have 'domain', 'owner', 'text'"),
        (lambda r: queries.groups(r, 'domain" FROM samples; DROP TABLE samples; --'), ConfigurationError, "no column"),
        (lambda r: queries.groups(r, "sample_id"), ConfigurationError, "no column"),
        (lambda r: queries.groups(r, stages=0), ConfigurationError, "stages is 0"),
        (lambda r: queries.groups(r, cumulative=True), ConfigurationError, "needs stages"),
        (lambda r: queries.extremes(r, 0), ConfigurationError, "n is 0"),
        (lambda r: queries.agreement(r, "math", "nosuch"), ConfigurationError, "nosuch"),
        (lambda r: queries.scores("/no/such/run"), LedgerError, "holds no run"),
    ],
)
def test_bad_questions(run, ask, error, words) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        ask(run)


def test_groups_without_any_metadata(tmp_path) -> None:
    reader = write(tmp_path / "run", records(steps=2))
    with pytest.raises(LedgerError, match="no sample metadata.*register_samples"):
        queries.groups(reader)


def test_damage_becomes_one_clear_error(tmp_path) -> None:
    reader = write(tmp_path / "run", records(steps=4))
    part = next((tmp_path / "run" / "contributions").iterdir())
    part.write_bytes(b"x" * part.stat().st_size)
    with pytest.raises(LedgerError, match="inrun verify"):
        reader.scores()
    part.unlink()
    with pytest.raises(LedgerError, match="missing"):
        reader.scores()


def test_a_lost_manifest_is_not_read_around(tmp_path) -> None:
    reader = write(tmp_path / "run", records(steps=4))
    (tmp_path / "run" / "manifest").rename(tmp_path / "elsewhere")
    with pytest.raises(LedgerError, match="lost its manifest"):
        reader.scores()


def test_two_parts_that_say_the_same_count_once(tmp_path) -> None:
    """Two ranks may register at the same moment; neither sees the other."""
    reader = write(tmp_path / "run", records(), samples=metadata())
    once = queries.groups(reader)
    original = Path(reader.files("samples")[0])
    copy = tmp_path / "copy.parquet"
    pq.write_table(pq.read_table(original), copy)
    reader.files = lambda table: [*Ledger.open(reader.path).files(table), *([str(copy)] if table == "samples" else [])]
    assert queries.groups(reader).equals(once)
    assert len(queries.extremes(reader, 3, "code")) == 3

"""What is kept, what is dropped, and who is paid."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inrun.analysis.curate import curate
from inrun.analysis.curation_rules import parse_rule
from inrun.analysis.shares import parse_pool, shares, split
from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger import Ledger, StepRecord

HOSTILE = "\x1b[31m=cmd()\u202e|<b>\n\x00\u2028"
#: sample: (score for a in two folds, score for b, uses)
SCORES = {
    7: ((1.0, 3.0), 5.0, 1),
    -2: ((-4.0, -4.5), -1.0, 2),
    2**62: ((-1.0, 0.5), 2.0, 2),
    0: ((-3.0, -3.5), 4.0, 1),
    5: ((0.5, 0.5), -6.0, 3),
    9: ((2.0, 2.5), 0.0, 1),
}
UNUSED = (100, -(2**63))
DOMAINS = {7: "web", -2: "web", 2**62: HOSTILE, 0: "web", 5: HOSTILE, 9: None, 100: "web", -(2**63): None}
OWNERS = {7: "anna", -2: "bert", 2**62: "=1+1", 0: "bert", 5: "anna", 9: None, 100: "carl", -(2**63): None}
ORDER = [9, 100, 7, -(2**63), 0, -2, 5, 2**62]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("c") / "run"
    with Ledger(path, about={"method": "step", "model": "<script>"}) as ledger:
        meta = [{"sample_id": i, "domain": DOMAINS[i], "owner": OWNERS[i], "text": f"{HOSTILE} {i}"} for i in ORDER]
        ledger.register_samples(meta[:3])
        ledger.register_samples(meta[3:])
        for step in range(3):
            ids = [i for i, (_, _, n) in SCORES.items() if n > step]
            part = [1.0 / SCORES[i][2] for i in ids]
            values = {
                "a#0": [SCORES[i][0][0] * p for i, p in zip(ids, part, strict=True)],
                "a#1": [SCORES[i][0][1] * p for i, p in zip(ids, part, strict=True)],
                "b": [SCORES[i][1] * p for i, p in zip(ids, part, strict=True)],
            }
            account = {
                "step": step,
                "loss_before": 2.0,
                "loss_after": 1.5,
                "data": 0.1,
                "spread": 0.2,
                "lr": 0.1,
                "n_samples": len(ids),
            }
            rows = [{**account, "validation": label} for label in values]
            ledger.write(StepRecord(step, np.array(ids), {k: np.array(v, np.float32) for k, v in values.items()}, rows))
        ledger.write(
            StepRecord(3, np.array([31337]), {x: np.array([-9.0], np.float32) for x in ("a#0", "a#1", "b")})
        )  # no metadata
    return path


def read(folder: Path, part: str):
    if (folder / f"{part}.parquet").exists():
        return pq.read_table(folder / f"{part}.parquet").to_pylist()
    return [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]


def mean(i, name):
    return sum(SCORES[i][0]) / 2 if name == "a" else SCORES[i][1]


def error(i):
    a, b = SCORES[i][0]
    return math.sqrt((a - b) ** 2 / 2) / math.sqrt(2)


A, B = {"validation": "a"}, {"validation": "b"}
RULES = [
    # what is dropped, worked out by hand from the table above
    (A, {i for i in SCORES if mean(i, "a") + 2 * error(i) < 0}),
    ({**A, "z": 0.0}, {-2, 0, 2**62}),
    ({**A, "z": 100.0}, set()),
    (B, {-2, 5}),
    ({**B, "keep": "score >= 2"}, {-2, 5, 9}),
    ({**B, "keep": "score > 0 and times_used >= 2"}, {-2, 5, 9, 7, 0}),
    ({**B, "keep": "score > 4.5 or times_used == 3 and score < 0 or standard_error.a > 100"}, {-2, 2**62, 0, 9}),
    ({**B, "keep": '(score > 4.5 or times_used==3) and score."a" > 1'}, {-2, 2**62, 0, 9, 5}),
    ({**A, "keep": "standard_error <= 0.25"}, {7, 2**62}),
    ({**A, "keep": "score.b > -1e0"}, {-2, 5}),
    ({**B, "top_fraction": 0.5}, {9, -2, 5}),
    ({**B, "top_fraction": 0.34}, {9, -2, 5}),  # 6 x 0.34 = 2.04, rounded up
    ({**B, "top_fraction": 1.0}, set()),
    ({**B, "top_fraction": 0.0}, set(SCORES)),
    ({**B, "quota": ["domain=0.5"]}, {-2, 5}),
    ({**B, "quota": ["domain:web=0.1"]}, {0, -2}),
    ({**B, "quota": ["domain=0", "domain:web=1"]}, {9, 5, 2**62}),
    ({"combine": "any"}, {-2, 5, 0}),
    ({"combine": "all"}, {-2}),
    ({"combine": "mean"}, {-2, 5}),
    ({"combine": "mean", "drop_unused": True}, {-2, 5, *UNUSED}),
]


@pytest.mark.parametrize(("options", "dropped"), [*RULES, *(({**o, "fmt": "parquet"}, d) for o, d in RULES[-4:])])
def test_rules(run, tmp_path, options, dropped) -> None:
    result = curate(run, tmp_path / "out", **options)
    kept_rows, dropped_rows = read(tmp_path / "out", "kept"), read(tmp_path / "out", "dropped")
    assert [r["sample_id"] for r in dropped_rows] == [i for i in ORDER if i in dropped]
    assert [r["sample_id"] for r in kept_rows] == [i for i in ORDER if i not in dropped]
    assert (result.kept, result.dropped) == (len(kept_rows), len(dropped_rows))
    assert result.unused == 2
    assert result.without_metadata == 1
    for row in kept_rows + dropped_rows:
        assert row["domain"] == DOMAINS[row["sample_id"]]
        assert row["text"] == f"{HOSTILE} {row['sample_id']}"
    # Shares are of what has a score: nothing speaks for or against the rest.
    assert sum(n for n, _ in result.groups.values()) == result.scored == len(ORDER) - len(UNUSED)
    assert sum(d for _, d in result.groups.values()) == sum(r["sample_id"] not in UNUSED for r in dropped_rows)


def test_score_columns(run, tmp_path) -> None:
    curate(run, tmp_path / "a", validation="a")
    rows = {r["sample_id"]: r for part in ("kept", "dropped") for r in read(tmp_path / "a", part)}
    for i in SCORES:
        assert rows[i]["score"] == pytest.approx(mean(i, "a"))
        assert rows[i]["standard_error"] == pytest.approx(error(i), abs=1e-9)
        assert rows[i]["times_used"] == SCORES[i][2]
    assert [rows[100][k] for k in ("score", "standard_error", "times_used")] == [None, None, 0]
    curate(run, tmp_path / "both", combine="mean")
    rows = {r["sample_id"]: r for part in ("kept", "dropped") for r in read(tmp_path / "both", part)}
    for i in SCORES:
        assert rows[i]["score"] == pytest.approx((mean(i, "a") + mean(i, "b")) / 2)
        assert rows[i]["score.b"] == pytest.approx(mean(i, "b"))
        assert rows[i]["standard_error.b"] is None


@pytest.mark.parametrize(("view", "fmt"), [("plain", "jsonl"), ("rank", "parquet"), ("standardised", "jsonl")])
def test_the_same_bytes_again(run, tmp_path, view, fmt) -> None:
    for name in ("one", "two"):
        curate(run, tmp_path / name, view=view, fmt=fmt)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_the_card_says_how(run, tmp_path) -> None:
    curate(run, tmp_path / "out", validation="a")
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("method step", "2 standard errors", "judged by 'a'", "positive = the sample", "Steps covered: 0 to 3"):
        assert words in card
    assert "2 samples were never used" in card
    assert "1 samples were used and have no metadata" in card
    assert "| web | 3 | 2 | 66.7% |" in card
    for raw in ("\x1b", "\u202e", "\x00", "<b>", "<script>"):
        assert raw not in card
    assert not any("\u2028" in p.read_text() or "\x1b" in p.read_text() for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("options", [{}, {"fmt": "parquet"}, {"keep": "times_used > 0"}])
def test_datasets_can_load_it(run, tmp_path, options, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    curate(run, tmp_path / "out", **options)
    kept = [r["sample_id"] for r in read(tmp_path / "out", "kept")]
    assert datasets.load_dataset(str(tmp_path / "out"), split="kept", cache_dir=str(tmp_path / "cache"))["sample_id"][:] == kept
    kind, file = ("parquet", "kept.parquet") if options.get("fmt") else ("json", "kept.jsonl")
    loaded = datasets.load_dataset(kind, data_files=str(tmp_path / "out" / file), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["text"][:] == [f"{HOSTILE} {i}" for i in kept]


def test_the_folder_is_not_overwritten(run, tmp_path) -> None:
    out = tmp_path / "out"
    curate(run, out, fmt="parquet")
    (out / "mine.txt").write_text("keep me")
    with pytest.raises(ConfigurationError, match="not empty"):
        curate(run, out)
    with pytest.raises(ConfigurationError, match="no folds|not in folds"):
        curate(run, out, validation="b", keep="standard_error > 0", force=True)
    assert (out / "kept.parquet").exists()  # a failed --force leaves what was there
    curate(run, out, force=True)
    assert sorted(p.name for p in out.iterdir()) == ["README.md", "curation.json", "dropped.jsonl", "kept.jsonl", "mine.txt"]
    for bad in (run, run / "samples" / "x", out / "mine.txt"):
        with pytest.raises(ConfigurationError):
            curate(run, bad, force=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"keep": "score > 0", "top_fraction": 0.5}, ConfigurationError, "give one of them"),
        ({"top_fraction": 1.5}, ConfigurationError, "0 to 1"),
        ({"top_fraction": float("nan")}, ConfigurationError, "0 to 1"),
        ({"quota": ["domain=x"]}, ConfigurationError, "0 to 1"),
        ({"quota": ["domain"]}, ConfigurationError, "COLUMN=FRACTION"),
        ({"quota": ["colour=0.5"]}, ConfigurationError, "no column 'colour'"),
        ({"quota": ["domain:nosuch=0.5"]}, ConfigurationError, "no sample has 'nosuch'"),
        ({"combine": "most"}, ConfigurationError, "mean, any, all"),
        ({"fmt": "xml"}, ConfigurationError, "jsonl, parquet"),
        ({"view": "best"}, ConfigurationError, "no view"),
        ({"validation": "c"}, ConfigurationError, "no validation set 'c'"),
        ({"keep": "score.c > 0"}, ConfigurationError, "no validation set 'c'"),
        ({"by": "colour"}, ConfigurationError, "no column 'colour'"),
        ({"z": -1.0}, ConfigurationError, "z is -1.0"),
    ],
)
def test_bad_options_leave_no_folder(run, tmp_path, options, error, words) -> None:
    with pytest.raises(error, match=words):
        curate(run, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "score",
        "score >",
        "score > x",
        "0 < score",
        "score > 0 and",
        "score > 0 score > 1",
        "(score > 0",
        "score > 0)",
        "not score > 0",
        "domain == 1",
        "score > 0; import os",
        "__import__('os').system('x') > 0",
        "score.__class__ > 0 > 1",
        "scores > 0",
        "score = 0",
        "score > 1e",
        "(" * 500 + "score > 0" + ")" * 500,
    ],
)
def test_rules_that_are_none(text) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse_rule(text)


def test_without_metadata_or_rows_there_is_nothing_to_curate(tmp_path) -> None:
    with Ledger(tmp_path / "bare") as ledger:
        ledger.write(StepRecord(0, np.array([1]), {"v": np.array([1], np.float32)}))
    with pytest.raises(LedgerError, match="register_samples"):
        curate(tmp_path / "bare", tmp_path / "out")
    with Ledger(tmp_path / "empty") as ledger:
        ledger.register_samples([{"sample_id": 1}])
    with pytest.raises(LedgerError, match="no contributions yet"):
        curate(tmp_path / "empty", tmp_path / "out")


# Money


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.integers(1, 10**12))
def test_parts_sum_to_the_pool(totals, cents) -> None:
    if max(totals) <= 0:
        with pytest.raises(ValueError, match="no total is positive"):
            split(totals, cents)
        return
    parts = split(totals, cents)
    assert sum(parts) == cents
    positive = math.fsum(t for t in totals if t > 0)
    for total, part in zip(totals, parts, strict=True):
        assert part == 0 if total <= 0 else abs(part - cents * total / positive) <= 1 + 1e-9 * cents


def test_largest_remainders_by_hand() -> None:
    assert split([1, 1, 1], 100) == [34, 33, 33]
    assert split([1, 1, 1], 10000) == [3334, 3333, 3333]
    assert split([47, 16, 15.8, 12, 6.1, 3.1], 10) == [5, 2, 1, 1, 1, 0]
    assert split([5e-324, 1e308], 3) == [0, 3]
    assert split([-5, 0, 2], 7) == [0, 0, 7]
    rounded = [round(10000 * t / 3) for t in (1, 1, 1)]
    assert sum(rounded) != 10000  # the control: plain rounding loses a cent


def test_shares(run) -> None:
    found = shares(run, 1_000_000, "owner", "b")
    totals = {"anna": 5.0 - 6.0, "bert": -1.0 + 4.0, "=1+1": 2.0, None: 0.0 - 9.0}
    assert {r.group: r.total for r in found.rows} == pytest.approx(totals)
    assert {r.group: r.cents for r in found.rows} == {"anna": 0, "bert": 600_000, "=1+1": 400_000, None: 0}
    assert found.unowned_samples == 2
    assert found.covered == pytest.approx(0.3 / 1.5)
    assert "20.0 %" in found.coverage()
    assert "momentum carries" in found.coverage()
    folds = shares(run, 100, "owner", "a")
    assert folds.covered == pytest.approx(0.2)
    assert sum(r.cents for r in folds.rows) == 100


def test_samples_without_owner_share_only_if_asked(tmp_path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        ledger.register_samples([{"sample_id": 1, "owner": "anna"}, {"sample_id": 2, "owner": None}])
        ledger.write(StepRecord(0, np.array([1, 2, 3]), {"v": np.array([1, 2, 1], np.float32)}))
    assert {r.group: r.cents for r in shares(tmp_path / "run", 400).rows} == {"anna": 400, None: 0}
    assert {r.group: r.cents for r in shares(tmp_path / "run", 400, include_unowned=True).rows} == {"anna": 100, None: 300}
    assert "not known" in shares(tmp_path / "run", 400).coverage()


def test_bad_shares(run, tmp_path) -> None:
    with pytest.raises(ConfigurationError, match="several validation sets.*'a', 'b'"):
        shares(run, 100)
    with pytest.raises(ConfigurationError, match="no column"):
        shares(run, 100, "nosuch", "a")
    with pytest.raises(ConfigurationError, match="positive integer"):
        shares(run, 0, "owner", "a")
    with Ledger(tmp_path / "run") as ledger:
        ledger.register_samples([{"sample_id": 1, "owner": "anna"}])
        ledger.write(StepRecord(0, np.array([1]), {"v": np.array([-1], np.float32)}))
    with pytest.raises(LedgerError, match="no 'owner' has a positive total"):
        shares(tmp_path / "run", 100)
    with pytest.raises(LedgerError, match="no contribution that the view 'per_lr' can use"):
        shares(tmp_path / "run", 100, view="per_lr")


@pytest.mark.parametrize(("text", "cents"), [("10000", 1_000_000), ("99.95", 9995), ("0.01", 1), ("1e3", 100_000)])
def test_pools(text, cents) -> None:
    assert parse_pool(text) == cents


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "1.005", "nan", "inf", "1e30", "1,000", "\x1b[31m"])
def test_pools_that_are_none(text) -> None:
    with pytest.raises(ConfigurationError, match="positive amount"):
        parse_pool(text)


def test_marks_on_samples_without_a_score_are_counted_apart(tmp_path: Path) -> None:
    """Shares stay shares of what has a score, whatever people mark among the rest."""
    with Ledger(tmp_path / "run", about={}) as ledger:
        ledger.register_samples([{"sample_id": i} for i in range(6)])
        ledger.write(StepRecord(0, np.array([0, 1]), {"v": np.array([1.0, -1.0], np.float32)}))
    marks = tmp_path / "marks.jsonl"
    for word, out, unused, said in (("drop", "a", False, "3 of them are dropped"), ("keep", "b", True, "1 of them are dropped")):
        marks.write_text("".join(json.dumps({"sample_id": i, "mark": word}) + "\n" for i in (2, 3, 4)))
        found = curate(tmp_path / "run", tmp_path / out, marks=marks, drop_unused=unused)
        assert (found.scored, found.scored_dropped, found.unused) == (2, 0, 4)
        assert said in (tmp_path / out / "README.md").read_text()

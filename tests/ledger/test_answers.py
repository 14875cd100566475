"""``scores(top=, bottom=, validation=, by=)`` of books on disk and in memory, against plain sums over the whole table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from inrun.analysis import queries
from inrun.errors import ConfigurationError, LedgerError
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.live import MemoryReader, live_reader
from inrun.ledger.schema import SCORES

LABELS = ("math#0", "math#1", "code")


def domain(sample_id: int) -> str | None:
    return None if sample_id == 3 else "ab"[sample_id % 2]


def fill(ledger: Any) -> Any:
    rng = np.random.default_rng(0)
    ledger.register_samples([{"sample_id": i, "domain": domain(i), "text": f"text {i}"} for i in range(20)])
    for step in range(12):
        ids = rng.integers(0, 20, 6)
        values = {label: np.round(rng.standard_normal(6), 1).astype(np.float32) for label in LABELS}
        ledger.write(StepRecord(step, ids, values, [{"step": step, "validation": label, "lr": 0.1} for label in LABELS]))
    return ledger


@pytest.fixture(params=["disk", "memory", "saved"])
def books(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "disk":
        fill(Ledger(tmp_path / "run")).close()
        return Ledger.open(tmp_path / "run")
    memory = fill(MemoryLedger())
    return memory if request.param == "memory" else Ledger.open(memory.save(tmp_path / "run", {}))


def by_hand(books: Any, name: str) -> list[dict[str, Any]]:
    return sorted((r for r in books.scores().to_pylist() if r["validation"] == name), key=lambda r: (-r["score"], r["sample_id"]))


def test_top_and_bottom_are_the_ends_of_every_set(books: Any) -> None:
    for name in ("math", "code"):
        rows = by_hand(books, name)
        top = books.scores(name, top=4)
        assert top.select(SCORES.names).to_pylist() == rows[:4]
        assert top["text"].to_pylist() == [f"text {r['sample_id']}" for r in rows[:4]]
        low = sorted(rows, key=lambda r: (r["score"], r["sample_id"]))[:3]
        assert books.scores(name, bottom=3).select(SCORES.names).to_pylist() == low
        both = books.scores(validation=[name], top=4, bottom=3).select(SCORES.names).to_pylist()
        assert both[:4] == rows[:4] and sorted(r["sample_id"] for r in both[4:]) == sorted(r["sample_id"] for r in low)
        assert [r["score"] for r in both] == sorted((r["score"] for r in both), reverse=True)


def test_both_ends_of_a_short_table_name_nobody_twice(books: Any) -> None:
    every = books.scores("code", top=50, bottom=50)
    assert every["sample_id"].to_pylist() == [r["sample_id"] for r in by_hand(books, "code")]
    assert books.scores(top=2, bottom=1)["validation"].to_pylist() == ["code"] * 3 + ["math"] * 3


def test_groups_are_those_of_the_command(books: Any) -> None:
    source = MemoryReader(books) if isinstance(books, MemoryLedger) else books
    found = books.scores(by="domain")
    assert found.equals(queries.groups(source, "domain"))
    for row in found.to_pylist():
        rows = [r for r in by_hand(books, row["validation"]) if domain(r["sample_id"]) == row["group"]]
        assert row["total"] == pytest.approx(sum(r["score"] for r in rows)) and row["samples"] == len(rows)
    math = [r for r in found.to_pylist() if r["validation"] == "math"]
    assert books.scores("math", by="domain", top=1).to_pylist() == math[:1]
    assert books.scores("math", by="domain", bottom=1).to_pylist() == math[-1:]
    assert books.scores("math", by="domain", top=1, bottom=1).to_pylist() == [math[0], math[-1]]


def test_without_arguments_nothing_has_changed(books: Any) -> None:
    found = books.scores()
    assert type(found) is pa.Table and found.schema.equals(SCORES) and found.num_rows == len(by_hand(books, "math")) * 2
    assert books.scores(validation=["code"]).equals(found.filter(pa.compute.equal(found["validation"], "code")))
    assert found.schema.metadata == {b"inrun": b"scores"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"validation": "maths"}, "no validation set 'maths'; it has 'code', 'math'"),
    ({"validation": ["code", "x"], "top": 3}, "no validation set 'x'; it has 'code', 'math'"),
    ({"by": "domian"}, "no column 'domian'; they have 'domain', 'text'"),
    ({"by": "sample_id"}, "no column 'sample_id'"),
    ({"top": 0}, "top is 0; it must be an integer of at least 1"),
    ({"bottom": -1, "by": "domain"}, "bottom is -1"),
    ({"top": True}, "top is True"),
    ({"top": 2.0}, "top is 2.0"),
    ({"view": "best"}, "there is no view 'best'"),
]


@pytest.mark.parametrize(("asked", "words"), REFUSED)
def test_what_is_not_there_is_said(books: Any, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        books.scores(**asked)


def empty_disk(path: Path) -> Any:
    Ledger(path / "run").close()
    return Ledger.open(path / "run")


@pytest.mark.parametrize("make", [empty_disk, lambda path: MemoryLedger()])
def test_empty_books(make: Callable[[Path], Any], tmp_path: Path) -> None:
    books = make(tmp_path)
    assert books.scores().num_rows == 0
    with pytest.raises(LedgerError, match="no contributions yet"):
        books.scores(top=1)
    with pytest.raises(LedgerError, match="no sample metadata.*register_samples"):
        books.scores(by="domain")


def test_memory_has_views_of_its_own_as_on_disk(tmp_path: Path) -> None:
    memory = fill(MemoryLedger())
    disk = Ledger.open(memory.save(tmp_path / "run", {}))
    for view in ("rank", "standardised", "per_lr", "specific"):
        assert memory.scores(view=view).equals(disk.scores(view=view))
    assert disk.samples().equals(memory.samples())


def test_standardised_scores_have_the_same_bits_in_any_order(tmp_path: Path) -> None:
    """Rows of a step in another order, in memory, on disk and asked again: sums must not round otherwise."""
    rng = np.random.default_rng(1)
    found = []
    steps = [(rng.permutation(40), 10.0 ** rng.uniform(-9, 3, 40) * rng.choice([-1, 1], 40)) for _ in range(30)]
    for run in ("a", "b"):
        memory = MemoryLedger()
        with Ledger(tmp_path / run, flush_every=3) as disk:
            for step, (ids, values) in enumerate(steps):
                order = rng.permutation(40) if run == "b" else np.arange(40)
                for books in (memory, disk):
                    accounts = [{"step": step, "validation": "v"}]
                    books.write(StepRecord(step, ids[order], {"v": values[order].astype(np.float32)}, accounts))
        found += [books.scores(view="standardised") for books in (memory, disk, memory, Ledger.open(tmp_path / run))]
    assert all(table.equals(found[0]) for table in found)
    expected = np.zeros(40)
    for ids, values in steps:
        exact = values.astype(np.float32).astype(np.float64)
        expected[ids] += exact / np.abs(exact).mean()
    np.testing.assert_allclose(found[0]["score"].to_numpy(), expected, rtol=1e-9, atol=30 * 2.0**-36)


def test_samples_in_memory_are_checked_and_added() -> None:
    memory = MemoryLedger()
    assert memory.samples() is None
    assert memory.register_samples([{"sample_id": 1, "domain": "a"}]) == 1
    assert memory.register_samples([{"sample_id": 1, "domain": "a"}, {"sample_id": 2, "owner": "x"}]) == 1
    assert memory.samples().to_pylist()[1] == {"sample_id": 2, "domain": None, "owner": "x"}
    with pytest.raises(LedgerError):
        memory.register_samples([{"sample_id": 1, "domain": "b"}])
    with pytest.raises(LedgerError, match="registered as 'string' before"):
        memory.register_samples([{"sample_id": 3, "domain": 5}])


def test_books_that_only_write_are_named() -> None:
    with pytest.raises(LedgerError, match="the ledger list only writes"):
        live_reader([], ())


def test_pandas_gets_plain_columns(books: Any) -> None:
    pytest.importorskip("pandas")
    kinds = books.scores(top=5).to_pandas().dtypes
    assert kinds["score"] == kinds["standard_error"] == np.float64 and kinds["times_used"] == np.int64
    assert books.scores(by="domain").to_pandas().dtypes["samples"] == np.int64


def test_without_pandas_the_error_names_it() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
sys.meta_path.insert(0, Absent())
from inrun.ledger import MemoryLedger
try:
    MemoryLedger().scores().to_pandas()
except ModuleNotFoundError as error:
    assert "pandas" in str(error)
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True)

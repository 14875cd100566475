"""Samples tables from anywhere, and what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from inrun.errors import LedgerError
from inrun.ledger import Ledger
from inrun.ledger.samples import as_samples_table


def metadata(ids):
    return [{"sample_id": i, "domain": "abc"[i % 3], "owner": None if i % 4 == 0 else f"o{i % 4}", "text": f"t{i}"} for i in ids]


def test_samples_from_anywhere() -> None:
    import datasets
    import pandas
    import polars

    rows = [{"sample_id": 5 - i, "domain": f"d{i}", "weight": i / 2, "text": "x" * 50} for i in range(4)]
    truth = [{**r, "text": "x" * 10} for r in rows]
    table = pa.Table.from_pylist(rows)
    given = [
        rows,
        iter(rows),
        table,
        table.to_batches()[0],
        pandas.DataFrame(rows),
        pandas.DataFrame(rows).astype({"domain": "category"}),
        polars.DataFrame(rows),
        polars.DataFrame(rows).lazy(),
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list(rows[::-1]).select([3, 2, 1, 0]),
        {k: [r[k] for r in rows] for k in rows[0]},
    ]
    for data in given:
        found = as_samples_table(data, None, 10)
        assert found.to_pylist() == truth, type(data)
        assert found.schema.field("domain").type == pa.string()
    assert as_samples_table(rows, None, 0)["text"].to_pylist() == ["x" * 50] * 4


def test_string_ids_take_the_row_number() -> None:
    found = as_samples_table([{"id": "a"}, {"id": "b", "domain": "x"}], None, 0)
    assert found.to_pylist() == [{"sample_id": 0, "id": "a", "domain": None}, {"sample_id": 1, "id": "b", "domain": "x"}]
    assert as_samples_table([{"id": "a", "sample_id": 2**63 - 1}], None, 0)["sample_id"].to_pylist() == [2**63 - 1]


def test_the_second_time_nothing_is_new(tmp_path) -> None:
    with Ledger(tmp_path / "run") as ledger:
        assert ledger.register_samples(metadata(range(5))) == 5
        assert ledger.register_samples(metadata(range(5))) == 0
        assert ledger.register_samples([*metadata(range(3, 8))]) == 3
        assert ledger.register_samples([{"sample_id": 9, "domain": "a", "colour": 3, "ratio": float("nan")}]) == 1
        assert ledger.register_samples([{"sample_id": 9, "domain": "a", "colour": 3, "ratio": float("nan")}]) == 0
        assert ledger.samples()["sample_id"].to_pylist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
        before = sorted(p.name for p in (tmp_path / "run" / "samples").iterdir())
        with pytest.raises(LedgerError, match="another 'domain': sample_id 1, 2"):
            ledger.register_samples([{**r, "domain": "z" if r["sample_id"] else "a"} for r in metadata(range(3))])
        with pytest.raises(LedgerError, match="registered as 'string' before, and is 'int64' now"):
            ledger.register_samples([{"sample_id": 77, "domain": 3}])
        assert sorted(p.name for p in (tmp_path / "run" / "samples").iterdir()) == before


KNOWN = pa.table({"sample_id": [1], "id": ["a"]})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([{"sample_id": 1}, {"sample_id": 1}, {"sample_id": 2}], "1 values of 'sample_id' occur more than once.*: 1;"),
        ([{"id": "a"}, {"id": "a"}], "'id' occur more than once.*'a'"),
        ([{"domain": "a"}], "no column 'sample_id'.*'domain'"),
        ([{"id": 3}], "no column 'sample_id'"),
        ([{"sample_id": "a"}], "column 'id' beside it"),
        ([{"sample_id": 1.0}], "type double; integers are accepted"),
        ([{"sample_id": True}], "type bool"),
        ([{"sample_id": None}], "type null"),
        ([{"sample_id": 1}, {"domain": "x"}], "missing in 1 rows"),
        ([{"sample_id": 2**63}], "beyond 64 signed bits|cannot be stored"),
        (pa.table({"sample_id": pa.array([2**64 - 1], pa.uint64())}), "beyond 64 signed bits"),
        ([{"sample_id": 1, "score": 3}], "'score' is taken"),
        ([{"sample_id": 1, "Validation": 3}], "'Validation' is taken"),
        ([{"sample_id": 1, "score.math": 3}], "taken"),
        ([{"sample_id": 1, "a": 3, "A": 4}], "differ in nothing but case"),
        ([{"sample_id": 1, "a\x1b[31m": 3}], r"'a\\x1b\[31m' is empty or holds"),
        ([{"sample_id": 1, 7: 3}], "column names must be texts"),
        ([{"sample_id": 1, "tags": ["x"]}], "'tags' of the samples has the type 'list"),
        ([{"sample_id": 1, "more": {"x": 1}}], "'more' of the samples has the type 'struct"),
        ([{"sample_id": 1, "raw": b"x"}], "'raw' of the samples has the type 'binary"),
        ([{"sample_id": 1, "mixed": 1}, {"sample_id": 2, "mixed": "x"}], "'mixed' of the samples cannot be stored"),
        ([{"sample_id": 1, "text": "\ud800"}], "'text' of the samples cannot be stored"),
        ([[1, 2]], "row 0 is a list"),
        ("abc", "given as str"),
        (17, "given as int"),
        ({"sample_id": 1}, "not columns"),
        ({"train": 3}, "not columns"),
    ],
)
def test_bad_samples(data, words) -> None:
    with pytest.raises(LedgerError, match=words):
        as_samples_table(data, None, 100)


def test_ids_known_under_another_number() -> None:
    with pytest.raises(LedgerError, match="another sample_id: 'a'"):
        as_samples_table([{"sample_id": 2, "id": "a"}], KNOWN, 0)
    with pytest.raises(LedgerError, match="text_preview is -1"):
        as_samples_table([{"sample_id": 2}], None, -1)

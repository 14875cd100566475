"""What the user says about samples: any table-like thing, checked and brought into one form.

``sample_id`` holds the integers that training used. Ids that are texts go into a column ``id``; if there is no ``sample_id``
beside it, the row number is taken, as :func:`inrun.with_ids` does for the items of a dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from inrun.errors import LedgerError
from inrun.ledger.schema import SCORES

#: Names that answers use for their own columns (in any case: SQL does not tell "Score" from "score").
RESERVED = {name for name in SCORES.names if name != "sample_id"} | {"step", "contribution", "file_row_number", "filename"}
#: Columns that are cut to a preview.
TEXTS = ("text", "preview")
#: Beginnings of column names that ``inrun curate`` writes, one column per validation set.
PREFIXES = ("score.", "standard_error.", "times_used.")


def as_samples_table(data: Any, known: pa.Table | None, text_preview: int) -> pa.Table:
    """Return the rows of ``data`` that are new, as an Arrow table that Parquet and DuckDB take.

    Args:
        data: An Arrow table, a pandas or polars frame, a ``datasets.Dataset``, columns in a dict, or an iterable of dicts.
        known: What was registered before. A row with a known id must say the same again (it is left out), or LedgerError.
        text_preview: Characters that are kept of the columns ``text`` and ``preview``; 0 keeps all.
    """
    if isinstance(text_preview, bool) or not isinstance(text_preview, int) or text_preview < 0:
        raise LedgerError(f"text_preview is {text_preview!r}; it must be an integer of at least 0 (0 keeps texts whole)")
    try:
        table = _as_arrow(data)
        _check_names(table)
        table = _with_sample_id(table)
        columns = [_plain_column(name, table[name], text_preview) for name in table.column_names]
        table = pa.table(columns, names=table.column_names)
        table.validate(full=True)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"the samples cannot be read as a table: {str(error)!r}") from error
    _check_unique(table, "sample_id")
    if "id" in table.column_names:
        _check_unique(table, "id")
    return table if known is None or not known.num_rows else _new_rows(table, known)


def _as_arrow(data: Any) -> pa.Table:
    """Convert by what the object offers, so that no library has to be imported."""
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if hasattr(data, "with_format") and hasattr(data, "__len__") and not isinstance(data, Mapping):  # datasets.Dataset
        return data.with_format("arrow")[:]
    if hasattr(data, "collect") and hasattr(data, "lazy"):  # polars.LazyFrame
        data = data.collect()
    if hasattr(data, "__arrow_c_stream__"):  # pandas, polars, DuckDB
        return pa.table(data)
    if hasattr(data, "to_arrow"):
        return data.to_arrow()
    if hasattr(data, "iloc") and hasattr(data, "columns"):  # older pandas
        return pa.Table.from_pandas(data, preserve_index=False)
    if isinstance(data, Mapping):
        return _from_columns(data)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return _from_rows(data)
    raise LedgerError(
        f"samples were given as {type(data).__name__}; accepted are an Arrow table, a pandas or polars frame, a datasets.Dataset, "
        "or an iterable of dicts"
    )


def _from_columns(data: Mapping[Any, Any]) -> pa.Table:
    if any(hasattr(v, "with_format") or isinstance(v, str | bytes) or not isinstance(v, Iterable) for v in data.values()):
        raise LedgerError(
            f"samples were given as a {type(data).__name__} whose values are not columns; of a DatasetDict give one split, "
            "of a single sample a list with one dict"
        )
    return pa.table({_name(k): v if isinstance(v, pa.Array | pa.ChunkedArray) else _array(k, list(v)) for k, v in data.items()})


def _from_rows(data: Iterable[Any]) -> pa.Table:
    """Take every key of every row: pyarrow's own reader looks at the first row only."""
    rows = list(data)
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise LedgerError(f"samples must be dicts, one per sample; row {place} is a {type(row).__name__}")
    names = list(dict.fromkeys(key for row in rows for key in row))
    return pa.table({_name(name): _array(name, [row.get(name) for row in rows]) for name in names})


def _array(name: Any, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise LedgerError(f"column {name!r} of the samples cannot be stored: {str(error)!r}") from error


def _name(key: Any) -> str:
    if not isinstance(key, str):
        raise LedgerError(f"column names must be texts; {key!r} is a {type(key).__name__}")
    return key


def _check_names(table: pa.Table) -> None:
    seen: dict[str, str] = {}
    for name in table.column_names:
        if not name or not name.isprintable():
            raise LedgerError(f"column name {name!r} is empty or holds characters that cannot be shown; rename it")
        low = name.casefold()
        if low in seen:
            raise LedgerError(f"columns {seen[low]!r} and {name!r} differ in nothing but case; rename one")
        if low in RESERVED or low.startswith(PREFIXES) or (low == "sample_id" and name != low):
            raise LedgerError(f"column name {name!r} is taken by the ledger's own answers; rename it")
        seen[low] = name


def _with_sample_id(table: pa.Table) -> pa.Table:
    if "sample_id" not in table.column_names:
        if "id" not in table.column_names or not _is_text(table["id"].type):
            raise LedgerError(
                f"the samples have no column 'sample_id' (the integers given to accountant.step); their columns are "
                f"{', '.join(repr(n) for n in table.column_names[:12]) or 'none'}"
            )
        table = table.add_column(0, "sample_id", pa.array(np.arange(table.num_rows, dtype=np.int64)))
    column, place = table["sample_id"], table.column_names.index("sample_id")
    if not table.num_rows and pa.types.is_null(column.type):
        column = column.cast(pa.int64())
    if not pa.types.is_integer(column.type):
        what = "put texts into a column 'id' beside it" if _is_text(column.type) else "integers are accepted"
        raise LedgerError(f"sample_id has the type {column.type}; {what}")
    if column.null_count:
        raise LedgerError(f"sample_id is missing in {column.null_count} rows; every sample needs one")
    if pa.types.is_uint64(column.type) and table.num_rows and pc.max(column).as_py() > 2**63 - 1:
        raise LedgerError(f"sample_id {pc.max(column).as_py()} is beyond 64 signed bits, the largest is {2**63 - 1}")
    return table.set_column(place, "sample_id", column.cast(pa.int64()))


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()


def _plain_column(name: str, column: pa.ChunkedArray, text_preview: int) -> pa.ChunkedArray:
    """Bring a column to a type that every reader knows."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
        kind = kind.value_type
    if pa.types.is_null(kind):
        return column.cast(pa.string())
    if _is_text(kind):
        column = column.cast(pa.large_string())
        if name in TEXTS and text_preview:
            column = pc.utf8_slice_codeunits(column, 0, text_preview)
        return column.cast(pa.string())
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    tests = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_date, pa.types.is_timestamp)
    if any(test(kind) for test in tests) or pa.types.is_decimal128(kind):
        return column
    raise LedgerError(
        f"column {name!r} of the samples has the type {str(kind)!r}; accepted are texts, numbers, truth values and dates. "
        "Drop it, or turn it into text first"
    )


def _check_unique(table: pa.Table, name: str) -> None:
    counts = pc.value_counts(table[name].combine_chunks())
    twice = counts.filter(pc.greater(counts.field("counts"), 1)).field("values").drop_null()
    if len(twice):
        shown = ", ".join(repr(v) for v in twice[:5].to_pylist())
        raise LedgerError(
            f"{len(twice)} values of {name!r} occur more than once among the samples: {shown}; each sample counts once"
        )


def _new_rows(table: pa.Table, known: pa.Table) -> pa.Table:
    """Leave out rows that are known; LedgerError where one says something else than before."""
    table = _like(table, known)
    here, there = table["sample_id"].to_numpy(), known["sample_id"].to_numpy()
    order = np.argsort(there, kind="stable")
    place = np.minimum(np.searchsorted(there[order], here), len(there) - 1)
    old = there[order][place] == here
    _check_same(table.filter(pa.array(old)), known.take(pa.array(order[place[old]])))
    fresh = table.filter(pa.array(~old))
    if "id" in fresh.column_names and "id" in known.column_names:
        taken = fresh.filter(pc.and_(pc.is_in(fresh["id"], known["id"].combine_chunks()), pc.is_valid(fresh["id"])))
        if taken.num_rows:
            shown = ", ".join(repr(v) for v in taken["id"][:5].to_pylist())
            raise LedgerError(f"{taken.num_rows} ids were registered before with another sample_id: {shown}")
    return fresh


def _like(table: pa.Table, known: pa.Table) -> pa.Table:
    """Cast to the types of what was registered before."""
    spelt = {name.casefold(): name for name in known.column_names}
    for place, name in enumerate(table.column_names):
        was = spelt.get(name.casefold())
        if was is None:
            continue
        if was != name:
            raise LedgerError(f"column {name!r} was registered as {was!r} before; use one spelling")
        kind, column = known.schema.field(name).type, table[name]
        if column.type == kind:
            continue
        numbers = pa.types.is_integer(kind) and pa.types.is_integer(column.type)
        floats = pa.types.is_floating(kind) and pa.types.is_floating(column.type)
        if not (numbers or floats or column.null_count == len(column)):
            raise LedgerError(f"column {name!r} was registered as {str(kind)!r} before, and is {str(column.type)!r} now")
        try:
            table = table.set_column(place, name, column.cast(kind))
        except pa.ArrowInvalid as error:
            raise LedgerError(f"column {name!r} was registered as {str(kind)!r} before: {str(error)!r}") from error
    return table


def _check_same(again: pa.Table, before: pa.Table) -> None:
    for name in dict.fromkeys([*again.column_names, *before.column_names]):
        same = _same(again[name] if name in again.column_names else None, before[name] if name in before.column_names else None)
        if not same.all():
            ids = again["sample_id"].filter(pa.array(~same))
            shown = ", ".join(str(v) for v in ids[:5].to_pylist())
            raise LedgerError(
                f"{len(ids)} samples were registered before with another {name!r}: sample_id {shown}. The first word holds; "
                "give new samples new ids"
            )


def _same(a: pa.ChunkedArray | None, b: pa.ChunkedArray | None) -> npt.NDArray[np.bool_]:
    """Compare values; null equals null (and a missing column), NaN equals NaN."""
    if a is None or b is None:
        present = a if a is not None else b
        assert present is not None
        return present.is_null().to_numpy()
    equal = pc.fill_null(pc.equal(a, b), False)
    if pa.types.is_floating(a.type):
        equal = pc.or_(equal, pc.fill_null(pc.and_(pc.is_nan(a), pc.is_nan(b)), False))
    return pc.or_(equal, pc.and_(a.is_null(), b.is_null())).to_numpy()


class SeenIds:
    """The sample ids of pieces, so that one that comes twice is found without all pieces at once.

    Attributes:
        count: How many there are.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._sorted: list[npt.NDArray[np.int64]] = []
        self.count = 0

    def add(self, ids: npt.NDArray[np.int64]) -> None:
        """Add the ids of a piece, which are unique among themselves; LedgerError if an earlier piece had one of them."""
        ids = np.sort(ids)
        for other in self._sorted:
            twice = np.intersect1d(ids, other, assume_unique=True)[:1] if _overlap(ids, other) else ids[:0]
            if len(twice):
                raise LedgerError(f"sample_id {twice[0]} occurs more than once among the samples; each sample counts once")
        # Pieces in order, the usual case, grow one array: then nothing is compared but ends.
        last = self._sorted[-1] if self._sorted else ids[:0]
        if len(ids) and len(last) and last[-1] < ids[0]:
            self._sorted[-1] = np.concatenate([last, ids])
        else:
            self._sorted.append(ids)
        self.count += len(ids)


def _overlap(a: npt.NDArray[np.int64], b: npt.NDArray[np.int64]) -> bool:
    """Whether the ranges of two sorted arrays meet."""
    return bool(len(a) and len(b) and a[0] <= b[-1] and b[0] <= a[-1])

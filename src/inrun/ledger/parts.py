"""One Parquet part: its bytes, how it is read, and what is wrong with it at first sight."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from inrun.errors import LedgerError
from inrun.ledger.manifest import Part, check_relative
from inrun.ledger.schema import ACCOUNTS, CONTRIBUTIONS, CREDITS

#: Bytes of a part from which reading it in several threads pays.
THREADS_FROM = 1 << 20
#: Tables whose columns are fixed; the user chooses those of the samples.
FIXED = {"contributions": CONTRIBUTIONS, "credits": CREDITS, "accounts": ACCOUNTS}
#: Columns of the accounts that books of an older release may lack.
NEWEST = ("lr_by_optimizer", "clip_by_optimizer", "inherited", "points", "rounding", "tensors", "tensor_shares")
#: Columns that parts of an older release may have.
GONE = ("optimizer", "norm", "cosine")


def to_parquet(table: pa.Table) -> bytes:
    """Return a table as Parquet with page checksums: without them bit flips pass unseen."""
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def parse_part(data: bytes) -> pa.Table:
    """Read the bytes of a part, checksums included."""
    opened = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    return opened.read(use_threads=len(data) > THREADS_FROM)


def read_part(table: str, file: str) -> pa.Table:
    """Read the file of a part of a table, checksums included, with that table's columns."""
    with pq.ParquetFile(file, page_checksum_verification=True) as opened:
        found = opened.read(use_threads=os.path.getsize(file) > THREADS_FROM)
    return _with_columns(found, FIXED[table]) if table in FIXED else found


def steps_of(run: Path, part: Part) -> list[int]:
    """Return the steps that a part has rows of, in order; LedgerError if it cannot be read."""
    file = run / check_relative(part.path)
    try:
        steps = pq.read_table(file, columns=["step"], page_checksum_verification=True)["step"].to_numpy()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise LedgerError(
            f"{file} cannot be read: {error}. `inrun verify` names all damage, `inrun repair` saves the rest"
        ) from error
    return [int(step) for step in np.unique(steps)]


def complete_rows(table: pa.Table, end: int | None) -> pa.Table:
    """Leave out the rows of steps from ``end`` on, which not every rank has written; None keeps all."""
    return table if end is None or "step" not in table.column_names else table.filter(pc.less(table["step"], end))


def has_columns(table: str, schema: pa.Schema) -> bool:
    """Whether a part has the columns of its table; an older release left out some of the newest, and had others."""
    wanted = FIXED.get(table)
    if wanted is None or schema.equals(wanted):
        return True
    older = [field for field in wanted if table != "accounts" or field.name not in NEWEST or field.name in schema.names]
    return pa.schema([field for field in schema if field.name not in GONE]).equals(pa.schema(older))


def _with_columns(found: pa.Table, schema: pa.Schema) -> pa.Table:
    """Give a table the columns of a schema; books of an older release lack the newest, which are null then."""
    for field in schema:
        if field.name not in found.column_names:
            found = found.append_column(field, pa.nulls(len(found), field.type))
    return found.select(schema.names).cast(schema)


def flaw_of(run: Path, part: Part) -> str | None:
    """Say what is wrong with the file of a part at first sight: its size, or that it is a link; None if nothing is."""
    file = run / check_relative(part.path)
    if file.is_symlink() or file.parent.is_symlink():
        return "is a link; the parts of a run must be inside of it"
    size = file.stat().st_size if file.is_file() else None
    if size == part.nbytes:
        return None
    return "is missing" if size is None else f"has {size} bytes instead of {part.nbytes}"

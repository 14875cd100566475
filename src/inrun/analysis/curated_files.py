"""The files of a curation: rows that are kept and rows that are dropped, each file whole or absent."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.analysis.curation_rules import Mask, Values
from inrun.errors import ConfigurationError, LedgerError
from inrun.files import DurableStream

FORMATS = ("jsonl", "parquet")

#: Tells whoever reads the folder which of its files are kept (see ``corpus/sources.py``).
MARK = "curation.json"


def check_out(out: Path, run: Path, force: bool) -> None:
    """Refuse a folder that holds something, and the run itself."""
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"{str(out)!r} is a file; give a folder")
    if out.resolve() == run.resolve() or run.resolve() in out.resolve().parents:
        raise ConfigurationError(f"{str(out)!r} is the run, or inside of it; give another folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise ConfigurationError(f"{str(out)!r} is not empty; give a new folder, or --force to replace an earlier curation in it")


def pieces_of(files: list[str], copies: Mask | None) -> Iterator[pa.Table]:
    """Read the samples again, piece by piece, in order of registration and with the same columns in every piece."""
    schema = pa.unify_schemas([pq.read_schema(f) for f in files], promote_options="default").remove_metadata()
    at = 0
    for file in files:
        with pq.ParquetFile(file, page_checksum_verification=True) as part:
            for batch in part.iter_batches(batch_size=4096):
                table = pa.concat_tables([schema.empty_table(), pa.Table.from_batches([batch])], promote_options="default")
                if copies is not None:
                    table = table.filter(pa.array(~copies[at : at + len(batch)]))
                at += len(batch)
                yield table.select(schema.names)


def placed(pieces: Iterable[pa.Table]) -> Iterator[tuple[pa.Table, slice]]:
    """Give pieces with the places of their rows."""
    at = 0
    for piece in pieces:
        yield piece, slice(at, at + piece.num_rows)
        at += piece.num_rows


def with_scores(piece: pa.Table, added: dict[str, Values]) -> pa.Table:
    """Append score columns; what has no score is null."""
    for name, values in added.items():
        if name.startswith("times_used"):
            column = pa.array(values.astype(np.int64))
        else:
            column = pa.array(values, pa.float64(), from_pandas=True)
        piece = piece.append_column(name, column)
    return piece


def write_curation(
    out: Path, fmt: str, pieces: Iterable[pa.Table | list[dict[str, Any]]], kept: Mask, card: bytes, chunks: pa.Table | None
) -> list[str]:
    """Write the files of a curation; an earlier one goes only when the new one is whole."""
    writers: list[_Writer] = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [f"kept.{fmt}", f"dropped.{fmt}"]
        writers = [_Writer(out / name, fmt) for name in names] + [_Writer(out / name, "text") for name in ("README.md", MARK)]
        at = 0
        for piece in pieces:
            here = kept[at : at + len(piece)]
            at += len(piece)
            for writer, wanted in zip(writers[:2], (here, ~here), strict=True):
                if isinstance(piece, list):
                    writer.write_rows([row for row, want in zip(piece, wanted, strict=True) if want])
                else:
                    writer.write(piece.filter(pa.array(wanted)))
        if at != len(kept):
            raise LedgerError("samples were registered, or files changed, while the curation was written; run it again")
        writers[2].stream.write(card)
        writers[3].stream.write((json.dumps({"written_by": "inrun curate", "kept": names[0], "dropped": names[1]}) + "\n").encode())
        if chunks is not None:
            writers.append(_Writer(out / "chunks.parquet", "parquet"))
            writers[-1].write(chunks)
        for writer in writers:
            writer.finish()
        stale = [f"{part}.{other}" for part in ("kept", "dropped") for other in FORMATS if other != fmt]
        for name in [*stale, *(["chunks.parquet"] if chunks is None else [])]:
            (out / name).unlink(missing_ok=True)
    except (OSError, pa.ArrowException) as error:
        raise LedgerError(f"{str(out)!r} cannot be written: {error}") from error
    finally:
        for writer in writers:
            writer.abandon()
    return [writer.path.name for writer in writers if writer.path.name != MARK]


class _Writer(DurableStream):
    """Writes rows in a format to a file that is whole or absent."""

    def __init__(self, path: Path, fmt: str) -> None:
        super().__init__(path)
        self.fmt = fmt
        self.parquet: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Add rows."""
        if self.fmt == "jsonl":
            self.write_rows(table.to_pylist())
            return
        if self.parquet is None:
            self.parquet = pq.ParquetWriter(self.stream, table.schema, compression="zstd", write_page_checksum=True)
        if table.num_rows:
            self.parquet.write_table(table)

    def write_rows(self, rows: list[dict[str, Any]]) -> None:
        """Add rows as lines of JSON."""
        self.stream.write("".join(_line(row) for row in rows).encode())

    def finish(self) -> None:
        """Give the file its name."""
        if self.parquet is not None:
            self.parquet.close()
        super().finish()

    def abandon(self) -> None:
        """Close and remove what was not finished."""
        with contextlib.suppress(OSError, ValueError, pa.ArrowException):
            if self.parquet is not None:
                self.parquet.close()
        super().abandon()


#: Characters that JSON allows raw, and terminals and line splitters take for something else.
_RISKY = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")


def _line(row: dict[str, Any]) -> str:
    text = json.dumps({k: _plain(v) for k, v in row.items()}, ensure_ascii=False, allow_nan=False)
    return _RISKY.sub(lambda c: f"\\u{ord(c.group()):04x}", text) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime.date):
        return value.isoformat()
    return str(value) if isinstance(value, decimal.Decimal) else value

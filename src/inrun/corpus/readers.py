"""The rows of one file, whatever its format: streamed, numbered, and able to go on from a place reached before."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from inrun.corpus.problems import Problems
from inrun.corpus.sources import SourceFile
from inrun.errors import DataError

#: Bytes of the longest line or text that is read; beyond it a file is damaged or no text.
LONGEST = 64 << 20
#: Rows that are taken from a columnar file at once. Few: a row may be a whole book.
ROWS = 256
BLOCK = 1 << 20


class Row(NamedTuple):
    """One row of a file.

    Attributes:
        line: Its number, counted from 1.
        after: Where reading goes on behind it; its meaning is the reader's own.
        done: Bytes of the file on disk that have been read so far, about.
        value: The object that the row is; for a text file its text.
    """

    line: int
    after: int
    done: int
    value: Any


def read_rows(file: SourceFile, columns: Sequence[str] | None, problems: Problems, after: int = 0, line: int = 0) -> Iterator[Row]:
    """Yield the rows of a file; what cannot be read is counted among the problems.

    Args:
        file: The file.
        columns: Top-level names that are wanted, None for all; only columnar files make use of it.
        problems: Where bad rows are counted.
        after: ``Row.after`` of the last row that is already known, to go on behind it.
        line: ``Row.line`` of that row.
    """
    try:
        match file.kind:
            case "lines":
                yield from _json_rows(file, problems, after, line)
            case "parquet":
                yield from _arrow_rows(file, columns, problems, after, _parquet_batches)
            case "arrow":
                yield from _arrow_rows(file, columns, problems, after, _ipc_batches)
            case _:
                yield from _whole_text(file, problems, after)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}; make it readable, or leave it out") from error


def _is_damage(error: Exception) -> bool:
    """Tell a broken stream from a disk that fails: gzip and pyarrow raise OSError for both, without a number for the former."""
    return not isinstance(error, OSError) or error.errno is None


class _AtOnce(io.RawIOBase):
    """Hands on what a decompressor has: asked for more it would raise at damage, and lose what it had before."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.source.read1(min(len(buffer), 1 << 16))
        buffer[: len(data)] = data
        return len(data)


@contextlib.contextmanager
def _open_lines(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a possibly compressed file; return it with a function that tells how much of the file on disk was read."""
    with contextlib.ExitStack() as stack:
        name = path.name.lower()
        disk = stack.enter_context(open(path, "rb", buffering=BLOCK))
        plain: Any = disk
        if name.endswith(".zst"):
            plain = io.BufferedReader(_AtOnce(pa.CompressedInputStream(disk, "zstd")), BLOCK)
        elif name.endswith(".gz"):
            plain = io.BufferedReader(_AtOnce(gzip.GzipFile(fileobj=disk)), BLOCK)
        stack.callback(plain.close)
        yield plain, disk.tell


def _json_rows(file: SourceFile, problems: Problems, after: int, line: int) -> Iterator[Row]:
    with _open_lines(file.path) as (stream, done):
        try:
            _skip(stream, after)
            while raw := stream.readline(LONGEST + 1):
                line += 1
                after += len(raw)
                where = f"{file.name}:{line}"
                if len(raw) > LONGEST and not raw.endswith(b"\n"):
                    after += _skip_line(stream)
                    problems.add("too long", where, f"more than {LONGEST:,} bytes in one line")
                    continue
                if line == 1:
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                value = _parse(raw, where, problems)
                if value is not None:
                    yield Row(line, after, done(), value)
        except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
            if not _is_damage(error):
                raise
            problems.add("broken file", f"{file.name}:{line + 1}", f"{error}; nothing is read from here on")


def _skip(stream: BinaryIO, count: int) -> None:
    if count and isinstance(getattr(stream, "raw", None), io.FileIO):
        stream.seek(count)
        return
    while count > 0:
        block = stream.read(min(count, BLOCK))
        if not block:
            raise EOFError("the file is shorter than before")
        count -= len(block)


def _skip_line(stream: BinaryIO) -> int:
    count = 0
    while block := stream.readline(BLOCK):
        count += len(block)
        if block.endswith(b"\n"):
            break
    return count


def _parse(raw: bytes, where: str, problems: Problems) -> dict[str, Any] | None:
    """Return the object of a line; None for a blank or bad one."""
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        problems.add("not UTF-8", where, f"byte {raw[error.start]:#04x} at place {error.start} of the line")
    except (ValueError, RecursionError) as error:
        if raw.strip():
            problems.add("unreadable JSON", where, str(error))
    else:
        if isinstance(value, dict):
            return value
        problems.add("unreadable JSON", where, f"a {type(value).__name__}, not an object; one JSON object per line is read")
    return None


Batches = Iterator[tuple[int, Any]]


def _arrow_rows(
    file: SourceFile,
    columns: Sequence[str] | None,
    problems: Problems,
    after: int,
    batches: Callable[[SourceFile, Sequence[str] | None, int], Batches],
) -> Iterator[Row]:
    """Yield rows from behind row ``after``; a batch comes with the number of rows before it."""
    line, size = after, max(1, file.path.stat().st_size)
    try:
        total = max(1, _count_rows(file))
        for first, batch in batches(file, columns, after):
            rows = _as_dicts(batch, file.name, first, problems)
            for line, value in enumerate(rows, first + 1):
                if line > after and value is not None:
                    yield Row(line, line, size * line // max(line, total), value)
    except (OSError, ValueError, pa.ArrowException) as error:
        if not _is_damage(error):
            raise
        problems.add("broken file", f"{file.name}:{line + 1}", f"{error}; nothing is read from here on")


def _count_rows(file: SourceFile) -> int:
    """Return the number of rows where a footer says it, else 0."""
    return int(pq.read_metadata(file.path).num_rows) if file.kind == "parquet" else 0


def _parquet_batches(file: SourceFile, columns: Sequence[str] | None, after: int) -> Batches:
    # A small buffer makes pyarrow stream the pages; else it loads whole column chunks.
    with pq.ParquetFile(file.path, buffer_size=BLOCK, pre_buffer=False) as parquet:
        wanted = [name for name in parquet.schema_arrow.names if columns is None or name in columns]
        first = 0
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            if first + rows <= after:
                first += rows
                continue
            if not wanted:  # each row is then one without text
                yield first, [{} for _ in range(rows)]
                first += rows
                continue
            for batch in parquet.iter_batches(ROWS, row_groups=[group], columns=wanted, use_threads=False):
                yield first, batch
                first += batch.num_rows


def _ipc_batches(file: SourceFile, columns: Sequence[str] | None, after: int) -> Batches:
    with pa.OSFile(str(file.path), "rb") as stream:
        reader = _ipc_reader(stream)
        first = 0
        for batch in reader:
            if first + batch.num_rows > after:
                chosen = batch.select([name for name in batch.schema.names if columns is None or name in columns])
                for begin in range(0, batch.num_rows, ROWS):
                    part = chosen.slice(begin, ROWS)
                    yield first + begin, part if part.num_columns else [{} for _ in range(min(ROWS, batch.num_rows - begin))]
            first += batch.num_rows


def _ipc_reader(stream: Any) -> Iterator[Any]:
    """Read Arrow's stream format, which datasets writes, or its file format."""
    magic = stream.read(6)
    stream.seek(0)
    if magic != b"ARROW1":
        return iter(pa.ipc.open_stream(stream))
    reader = pa.ipc.open_file(stream)
    return (reader.get_batch(i) for i in range(reader.num_record_batches))


def _as_dicts(batch: Any, name: str, first: int, problems: Problems) -> list[dict[str, Any] | None]:
    """Return the rows of a batch; one that holds text which is not UTF-8 is counted, and None."""
    if isinstance(batch, list):
        return batch
    try:
        batch.validate(full=True)  # Arrow trusts what a file says about lengths; Python would read beyond the buffers
        return batch.to_pylist()
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    rows: list[dict[str, Any] | None] = []
    for place in range(batch.num_rows):
        row = batch.slice(place, 1)
        try:
            row.validate(full=True)
            rows.append(row.to_pylist()[0])
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise
            problems.add("not UTF-8", f"{name}:{first + place + 1}", str(error))
            rows.append(None)
    return rows


def _whole_text(file: SourceFile, problems: Problems, after: int) -> Iterator[Row]:
    if after:
        return
    size = os.stat(file.path).st_size
    if size > LONGEST:
        problems.add("too long", file.name, f"{size:,} bytes; a text file may have {LONGEST:,}")
        return
    raw = file.path.read_bytes()
    if b"\0" in raw[:8192]:
        problems.add("binary file", file.name, "it holds zero bytes")
        return
    try:
        text = raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        problems.add("not UTF-8", file.name, f"byte {error.object[error.start]:#04x} at place {error.start}")
        return
    yield Row(1, 1, size, text)

"""A corpus as tokens on disk: made once per content, memory mapped ever after.

::

    tokens.bin          uint16 or uint32, flat; every document followed by the end id
    offsets.bin         int64, one more than documents: where each begins and the last one ends
    documents.parquet   id, domain, source, owner, split, where, tokens, preview
    tokenizer/          what made the tokens
    meta.json           schema, counts, fields, problems, source files with size and sha256
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.corpus.build import DOCUMENTS, SCHEMA, Builder, Tell
from inrun.corpus.documents import Fields, Problems, SourceFile, find_files
from inrun.corpus.fingerprints import Content, contents
from inrun.corpus.tokenizers import Tokenizer, load_tokenizer
from inrun.errors import ConfigurationError, DataError
from inrun.files import Files, alone, make_folder_durably, put_folder

log = logging.getLogger("inrun")
#: Columns of documents that have few values, and that data can be chosen by.
CODED = ("domain", "source", "owner", "split")


def build_store(
    paths: str | Path | Sequence[str | Path],
    fields: Fields,
    tokenizer: Tokenizer,
    cache: str | Path,
    tell: Tell | None = None,
) -> TokenStore:
    """Tokenise a corpus, or find it tokenised: the same content, fields and tokenizer are never tokenised twice.

    Killed at any moment, the next call goes on from the last commit, and ends in the same bytes as an unbroken one. Of several
    processes one builds and the others wait for it.

    Args:
        paths: Files and folders, see :func:`inrun.corpus.documents.find_files`.
        fields: Where a row keeps its text and what is known about it.
        tokenizer: Makes the tokens.
        cache: The folder that stores are kept in.
        tell: Called now and then with bytes done, bytes in all and documents.

    Raises:
        DataError: No document can be used, or a file changes while it is read.
    """
    cache, problems = Path(cache), Problems()
    try:
        files = find_files(paths, problems)  # first: a path that is wrong leaves no folder behind
        make_folder_durably(Files(), cache)
        read = contents(files, cache)
        fingerprint = _fingerprint(files, read, fields, tokenizer)
        final = cache / fingerprint
        if not (final / "meta.json").is_file():
            with alone(cache / f"{fingerprint}.lock", waiting=_say_waiting):
                if not (final / "meta.json").is_file():
                    _build(final, Builder(_aside(final), files, read, fields, tokenizer, problems, tell), fingerprint)
    except OSError as error:
        raise DataError(f"tokens cannot be written to {cache}: {error}; choose another cache, or make room") from error
    return TokenStore.open(final)


def _fingerprint(files: Sequence[SourceFile], read: Sequence[Content], fields: Fields, tokenizer: Tokenizer) -> str:
    """Return what the store is called: a hash of all that decides its content."""
    about = {"schema": SCHEMA, "fields": asdict(fields), "tokenizer": tokenizer.fingerprint}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for file, content in zip(files, read, strict=True):
        digest.update(json.dumps([file.name, file.kind, file.split, content.sha256]).encode())
    return digest.hexdigest()[:32]


def _aside(final: Path) -> Path:
    return final.with_name(final.name + ".building")


def _build(final: Path, builder: Builder, fingerprint: str) -> None:
    """Build beside the final name, and take it when all is on disk: a store that has its name is whole."""
    aside, disk = builder.folder, Files()
    make_folder_durably(disk, aside)
    if not (aside / "meta.json").is_file():
        builder.run(fingerprint)
    for path in [*aside.glob("part-*.parquet"), *aside.glob("*.tmp"), aside / "progress.json"]:
        disk.remove(path)
    if final.exists():  # without its meta.json: not from here
        shutil.rmtree(final)
    put_folder(disk, aside, final)


def _say_waiting() -> None:
    log.info("inrun: another process is tokenising this data; waiting for it")


class TokenStore:
    """A tokenised corpus, read-only. Made by :func:`build_store`, reopened by :meth:`open`.

    Attributes:
        folder: Where it is.
        about: What ``meta.json`` says.
        fingerprint: Its name: the same for the same content, fields and tokenizer.
        tokens: All tokens, memory mapped.
        offsets: Where each document begins in ``tokens``, and at last where the last one ends, memory mapped.
        count: Number of documents.
        problems: What was wrong with the data.
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        """Map the files; use :meth:`open`."""
        self.folder, self.about = folder, about
        self.fingerprint, self.count = str(about["fingerprint"]), int(about["documents"])
        self.problems = Problems.from_dict(about["problems"])
        self.tokens = _mapped(folder / "tokens.bin", np.dtype(about["dtype"]), int(about["tokens"]))
        self.offsets = _mapped(folder / "offsets.bin", np.dtype(np.int64), self.count + 1)
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens) or (np.diff(self.offsets) < 1).any():
            raise DataError(f"{folder} is damaged: its offsets do not fit its tokens; remove the folder to tokenise again")
        self._columns: dict[str, tuple[npt.NDArray[np.int32], list[str]]] = {}
        self._file = os.open(folder / "tokens.bin", os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Open a store; DataError if it is missing, damaged or of a newer version."""
        path = Path(folder) / "meta.json"
        try:
            about = json.loads(path.read_bytes())
            if about["schema"] != SCHEMA:
                raise DataError(f"{folder} has schema {about['schema']!r}; this inrun reads {SCHEMA}: tokenise again")
            if about["dtype"] not in ("uint16", "uint32"):
                raise ValueError(f"dtype {about['dtype']!r}")
            return cls(Path(folder), about)
        except DataError:
            raise
        except FileNotFoundError as error:
            raise DataError(f"{folder} holds no token store: {error.filename} is missing; build_store makes one") from None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{folder} is damaged ({error!r}); remove the folder to tokenise again") from None

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the tokens."""
        return load_tokenizer(self.folder / "tokenizer")

    def column(self, name: str) -> tuple[npt.NDArray[np.int32], list[str]]:
        """Return one code per document, -1 where nothing is known, and the values that codes stand for, in order of appearance."""
        if name not in CODED:
            raise ConfigurationError(f"documents have no column {name!r} to choose by; there are {', '.join(CODED)}")
        if name not in self._columns:
            self._columns[name] = self._coded(name)
        return self._columns[name]

    def _coded(self, name: str) -> tuple[npt.NDArray[np.int32], list[str]]:
        with self._documents() as parquet:
            codes: list[npt.NDArray[np.int32]] = []
            values: dict[str, int] = {}
            for group in range(parquet.num_row_groups):
                column = parquet.read_row_group(group, columns=[name])[name].combine_chunks().dictionary_encode()
                here = [values.setdefault(value, len(values)) for value in column.dictionary.to_pylist()]
                local = column.indices.fill_null(len(here)).to_numpy(zero_copy_only=False)
                codes.append(np.array([*here, -1], np.int32)[local])
        return np.concatenate(codes), list(values)

    @contextlib.contextmanager
    def _documents(self) -> Iterator[Any]:
        try:
            with pq.ParquetFile(self.folder / "documents.parquet", page_checksum_verification=True) as parquet:
                if parquet.metadata.num_rows != self.count:
                    raise DataError(f"{self.folder} is damaged: its documents are not as many as its tokens say; tokenise again")
                yield parquet
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.folder / 'documents.parquet'} cannot be read ({error}); remove {self.folder}") from error

    def documents(self, indices: npt.ArrayLike, columns: Sequence[str] | None = None) -> pa.Table:
        """Return what is known about some documents, in the order asked for; only the parts that hold them are read.

        Args:
            indices: Numbers of documents, ``[n]``, in any order, also repeated.
            columns: Names of ``documents.parquet``; all by default.
        """
        wanted, place = np.unique(np.asarray(indices, np.int64), return_inverse=True)
        if len(wanted) and not (wanted[0] >= 0 and wanted[-1] < self.count):
            raise DataError(f"documents are numbered 0 to {self.count - 1}; {wanted[0]} to {wanted[-1]} were asked for")
        names = DOCUMENTS.names if columns is None else list(columns)
        found, first = [pa.schema([DOCUMENTS.field(n) for n in names]).empty_table()], 0
        with self._documents() as parquet:
            for group in range(parquet.num_row_groups):
                after = first + parquet.metadata.row_group(group).num_rows
                here = wanted[np.searchsorted(wanted, first) : np.searchsorted(wanted, after)]
                if len(here):
                    found.append(parquet.read_row_group(group, columns=names).select(names).take(here - first))
                first = after
        return pa.concat_tables(found).combine_chunks().take(pa.array(place.ravel()))

    def gather(self, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        """Return stretches of tokens as rows, ``[n, width]``, with -1 behind the end of short ones.

        They are read, not mapped: pages of a mapping that random access touches count as memory of the process.
        """
        rows = np.zeros((len(starts), width), self.tokens.dtype)
        size = rows.itemsize
        for row, start, length in zip(rows, starts.tolist(), lengths.tolist(), strict=True):
            if not hasattr(os, "preadv"):
                row[:length] = self.tokens[start : start + length]
            elif os.preadv(self._file, [row[:length]], start * size) != length * size:
                raise DataError(f"{self.folder / 'tokens.bin'} was cut while it was in use; tokenise again")
        found = rows.astype(np.int64)
        found[np.arange(width) >= lengths[:, None]] = -1
        return found


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != count * dtype.itemsize or not size:
            raise DataError(
                f"{path} has {size:,} bytes, and should have {count * dtype.itemsize:,}; remove its folder to tokenise again"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.frombuffer(mapped, dtype)

"""Tokenising a corpus into files, so that a process killed at any moment can be followed by one that goes on.

A store is built in a folder of its own, ``<fingerprint>.building``. ``tokens.bin`` and ``offsets.bin`` only grow; what is known
about the documents goes into numbered parts. Every so many characters all of it is synced, and then ``progress.json`` is
replaced: it says how much of each file counts, and how far reading has come. Who finds the folder cuts the files back to what
counts and goes on. Batches and commits fall at places that the data alone decides, so the result is the same bytes however
often the work was broken off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.corpus.documents import Bookmark, Document, Fields, Problems, SourceFile, read_from
from inrun.corpus.fingerprints import Content, state_of
from inrun.corpus.problems import printable
from inrun.corpus.tokenizers import Tokenizer, id_dtype
from inrun.errors import DataError
from inrun.files import Files, write_durably

#: Called with bytes of the source files done, bytes in all, and documents so far.
Tell = Callable[[int, int, int], None]
SCHEMA = 1
DOCUMENTS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("domain", pa.string()),
        pa.field("source", pa.string()),
        pa.field("owner", pa.string()),
        pa.field("split", pa.string()),
        pa.field("where", pa.string(), nullable=False),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("preview", pa.string(), nullable=False),
    ]
)
#: A row of that table.
DocumentRow = tuple[str, str | None, str | None, str | None, str | None, str, int, str]
PARQUET: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": ["domain", "source", "owner", "split"],
    "write_page_checksum": True,
}
PREVIEW = 300
#: A batch is encoded at once.
BATCH_CHARACTERS, BATCH_DOCUMENTS = 1 << 20, 512
COMMIT_CHARACTERS, COMMIT_DOCUMENTS = 32 << 20, 16_384
#: Source files that are listed in ``meta.json``; a folder of texts may have a million.
LISTED_FILES = 1000


class SeenIds:
    """Remembers ids by hashes of 8 bytes: some 20 bytes per document. Two ids with one hash (never, in practice) look the same."""

    def __init__(self) -> None:
        """Begin with none."""
        self._old: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._new: set[int] = set()
        self._next: dict[int, int] = {}

    def unique(self, name: str) -> str:
        """Return the name, or with the first free of "#2", "#3" ... behind it if it was given before; and remember it."""
        key = number = _hash(name)
        count, found = self._next.get(key, 2), name
        while number in self._new or self._is_old(number):
            found = f"{name}#{count}"
            number, count = _hash(found), count + 1
        if found != name:
            self._next[key] = count
        self._new.add(number)
        if len(self._new) > max(1 << 16, len(self._old) // 8):
            self._old = np.sort(np.concatenate([self._old, np.fromiter(self._new, np.uint64, len(self._new))]))
            self._new.clear()
        return found

    def _is_old(self, number: int) -> bool:
        place = np.searchsorted(self._old, np.uint64(number))
        return bool(place < len(self._old) and self._old[place] == number)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


class Builder:
    """Builds one store, from the beginning or from where an earlier process stopped."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[SourceFile],
        read: Sequence[Content],
        fields: Fields,
        tokenizer: Tokenizer,
        problems: Problems,
        tell: Tell | None,
    ) -> None:
        """Take what is to be built; ``read`` is the content of the files as it was hashed."""
        self.folder, self.files, self.read, self.fields, self.tokenizer = folder, files, read, fields, tokenizer
        self.problems, self.tell = problems, tell
        self.dtype = np.dtype(id_dtype(tokenizer.vocab_size))
        self.place, self.tokens, self.documents, self.parts = Bookmark(), 0, 0, 0
        self.seen = SeenIds()
        self._disk = Files()
        self._rows: list[DocumentRow] = []
        self._batch: list[Document] = []
        self._characters = self._batched = self._checked = 0
        self._before = np.concatenate([[0], np.cumsum([c.size for c in read])]).tolist()

    def run(self, fingerprint: str) -> None:
        """Build all of it; afterwards the folder is whole, and has a ``meta.json``."""
        self._recover()
        start = self.place
        with open(self.folder / "tokens.bin", "r+b") as tokens, open(self.folder / "offsets.bin", "r+b") as offsets:
            self._out = (tokens, offsets)
            for file in self._out:
                file.seek(0, os.SEEK_END)
            for document, place in read_from(self.files, self.fields, self.problems, start):
                self._take(document, place)
            self._encode()
            self.place = Bookmark(len(self.files))  # behind bad rows at the very end too: they are counted
            self._commit()
        self._finish(fingerprint)

    def _recover(self) -> None:
        """Cut everything back to the last commit; without one, begin."""
        state = self._read_progress()
        tokens, offsets = self.folder / "tokens.bin", self.folder / "offsets.bin"
        if state is None:
            for path in self.folder.iterdir():
                if path.is_file():
                    path.unlink()
            tokens.write_bytes(b"")
            offsets.write_bytes(np.zeros(1, np.int64).tobytes())
            return
        self.place, self.problems = Bookmark(*state["place"]), Problems.from_dict(state["problems"])
        self.tokens, self.documents, self.parts = state["tokens"], state["documents"], state["parts"]
        os.truncate(tokens, self.tokens * self.dtype.itemsize)
        os.truncate(offsets, (self.documents + 1) * 8)
        for part in range(self.parts):
            for name in pq.read_table(self._part(part), columns=["id"])["id"].to_pylist():
                self.seen.unique(name)

    def _read_progress(self) -> dict[str, Any] | None:
        """Return the last commit, if what it counts on is there."""
        try:
            state = json.loads((self.folder / "progress.json").read_bytes())
            Bookmark(*map(int, state["place"])), Problems.from_dict(state["problems"])
            enough = (
                (self.folder / "tokens.bin").stat().st_size >= state["tokens"] * self.dtype.itemsize
                and (self.folder / "offsets.bin").stat().st_size >= (state["documents"] + 1) * 8
                and all(self._part(part).is_file() for part in range(state["parts"]))
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return state if enough else None

    def _part(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.parquet"

    def _take(self, document: Document, place: Bookmark) -> None:
        self._batch.append(document)
        self._batched += len(document.text)
        self.place = place
        if self._batched >= BATCH_CHARACTERS or len(self._batch) >= BATCH_DOCUMENTS:
            self._encode()
            if self._characters >= COMMIT_CHARACTERS or len(self._rows) >= COMMIT_DOCUMENTS:
                self._commit()

    def _encode(self) -> None:
        """Write the tokens of the batch, each document with its end."""
        if not self._batch:
            return
        encoded = self.tokenizer.encode_batch([d.text for d in self._batch])
        end = np.array([self.tokenizer.end], self.dtype)
        self._out[0].write(
            np.concatenate([part for ids in encoded for part in (ids, end)]).astype(self.dtype, copy=False).tobytes()
        )
        counts = np.array([len(ids) + 1 for ids in encoded], np.int64)
        self._out[1].write((self.tokens + np.cumsum(counts)).tobytes())
        for document, count in zip(self._batch, counts.tolist(), strict=True):
            name = self.seen.unique(document.id)
            if name != document.id:
                self.problems.add("duplicate id", document.where, f"{document.id!r} was given before; this one is {name!r}")
            known = (document.domain, document.source, document.owner, document.split)
            self._rows.append((name, *known, document.where, count, document.text[:PREVIEW]))
        self.tokens += int(counts.sum())
        self.documents += len(self._batch)
        self._characters += self._batched
        self._batch, self._batched = [], 0
        if self.tell is not None:
            self.tell(self._before[self.place.file] + self.place.done, self._before[-1], self.documents)

    def _commit(self) -> None:
        """Make everything so far count."""
        self._check_unchanged()
        if self._rows:
            aside = self.folder / "part.tmp"
            pq.write_table(_as_table(self._rows), aside, **PARQUET)
            self._disk.sync(aside)
            self._disk.rename(aside, self._part(self.parts))
            self.parts += 1
        for file in self._out:
            file.flush()
            os.fsync(file.fileno())
        self._disk.sync_folder(self.folder)
        self._rows, self._characters = [], 0
        self._checked = self.place.file
        state = {
            "place": list(self.place),
            "tokens": self.tokens,
            "documents": self.documents,
            "parts": self.parts,
            "problems": self.problems.as_dict(),
        }
        write_durably(self._disk, self.folder / "progress.json", json.dumps(state).encode())

    def _check_unchanged(self) -> None:
        """Refuse to go on with files that are not those that were hashed; what was built of them is thrown away."""
        for file, content in list(zip(self.files, self.read, strict=True))[self._checked : self.place.file + 1]:
            if _state(file.path) != content.state:
                self._disk.remove(self.folder / "progress.json")
                raise DataError(f"{file.path} was changed while it was read; nothing of it is kept. Start again when it is whole")

    def _named(self) -> str:
        """Name the first files."""
        named = [printable(str(file.path)) for file in self.files[:3]]
        return ", ".join(named) + (f" and {len(self.files) - 3:,} more" if len(self.files) > 3 else "")

    def _finish(self, fingerprint: str) -> None:
        if not self.documents:
            why = self.problems.lines() or ["it is empty"]
            raise DataError("\n".join([f"the data ({self._named()}) holds no document that can be used:", *why]))
        with pq.ParquetWriter(self.folder / "documents.parquet", DOCUMENTS, **PARQUET) as writer:
            for part in range(self.parts):
                writer.write_table(pq.read_table(self._part(part), schema=DOCUMENTS))
        self._disk.sync(self.folder / "documents.parquet")
        self.tokenizer.save(self.folder / "tokenizer")
        write_durably(self._disk, self.folder / "meta.json", json.dumps(self._about(fingerprint), indent=1).encode())

    def _about(self, fingerprint: str) -> dict[str, Any]:
        listed = list(zip(self.files, self.read, strict=True))[:LISTED_FILES]
        return {
            "schema": SCHEMA,
            "fingerprint": fingerprint,
            "dtype": self.dtype.name,
            "tokens": self.tokens,
            "documents": self.documents,
            "tokenizer": {
                "name": self.tokenizer.name,
                "fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "end": self.tokenizer.end,
            },
            "fields": asdict(self.fields),
            "problems": self.problems.as_dict(),
            "files_in_all": len(self.files),
            "files": [{"name": f.name, "size": c.size, "sha256": c.sha256} for f, c in listed],
        }


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        return state_of(path)
    except OSError:
        return None


def _as_table(rows: Sequence[DocumentRow]) -> pa.Table:
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), DOCUMENTS, strict=True)], DOCUMENTS
    )

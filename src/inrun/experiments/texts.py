"""Rows of text with domains, for the experiments on language models: from a file of documents, or from Python's own text.

    corpus = read_corpus(work, CorpusConfig(documents=2400, context=64), seed=0)
    corpus.train.tokens                       # [n, context + 1]
    corpus.validation.only({"code"}).tokens   # rows of one domain

Every document gives one row, its beginning. The same number of each domain is drawn, and what is drawn depends on the seed alone.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inrun.corpus.bpe import LibraryTokenizer
from inrun.corpus.bpe import train as train_vocabulary
from inrun.corpus.python_texts import DOMAINS as PYTHON_DOMAINS
from inrun.corpus.python_texts import pieces_of
from inrun.errors import ConfigurationError
from inrun.experiments.recipes import Work
from inrun.training.loss import PADDING

#: Where documents are looked for in the folder of data, in this order.
FILES = ("minipile.jsonl.gz", "corpus.jsonl.gz", "corpus.jsonl")
#: What splits are called in such files.
SPLITS = {"train": "train", "val": "validation", "validation": "validation", "test": "test"}
#: Domains of Python's own text stand in where there is no file; ``tables`` is the one of little use.
JUNK = ("junk", "tables")
#: Characters of a piece of Python's text, and pieces taken of one file.
PIECE, MOST = 600, 12
#: No row is longer than this many bytes per token.
BYTES_PER_TOKEN = 8


@dataclass(frozen=True)
class CorpusConfig:
    """What is drawn."""

    documents: int = 2400
    context: int = 64
    #: 256 takes bytes; more is a byte-level BPE of so many entries, trained on the documents that are drawn.
    vocab: int = 256
    #: Held-out rows of each domain.
    validation_rows: int = 8
    test_rows: int = 12


@dataclass(frozen=True)
class Rows:
    """Documents, one row each.

    Attributes:
        tokens: ``[n, context + 1]``, ``PADDING`` after the end of a short one.
        texts: What the row holds, as text.
        domains: Of each row.
    """

    tokens: Tensor
    texts: tuple[str, ...]
    domains: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.texts)

    def take(self, places: npt.NDArray[np.int64]) -> Rows:
        """Return some of the rows, in the order given."""
        chosen = places.tolist()
        return Rows(self.tokens[torch.from_numpy(places)], *(tuple(x[i] for i in chosen) for x in (self.texts, self.domains)))

    def only(self, domains: Collection[str], most: int | None = None) -> Rows:
        """Return the rows of some domains, at most so many, in turn: the first of every domain, then the second of each ..."""
        mine = [(sum(d == domain for d in self.domains[:i]), i) for i, domain in enumerate(self.domains) if domain in domains]
        return self.take(np.array([i for _, i in sorted(mine)][:most], np.int64))

    def and_also(self, other: Rows) -> Rows:
        """Return these rows and then the others."""
        return Rows(torch.cat([self.tokens, other.tokens]), self.texts + other.texts, self.domains + other.domains)


@dataclass(frozen=True)
class Corpus:
    """Rows of three splits that share no document."""

    train: Rows
    validation: Rows
    test: Rows
    vocab: int
    #: Where the text is from, for the notes.
    source: str
    encode: Encoder = field(repr=False)

    @property
    def domains(self) -> list[str]:
        """All domains, sorted."""
        return sorted(set(self.train.domains))

    @property
    def useful(self) -> list[str]:
        """The domains that somebody would want a model to know; all, where there are no others."""
        return [d for d in self.domains if d not in JUNK] or self.domains


@dataclass(frozen=True)
class Encoder:
    """Turns texts into rows."""

    context: int
    tokenizer: LibraryTokenizer | None

    def ids(self, text: str) -> list[int]:
        """Return the first ``context + 1`` ids of a text."""
        if self.tokenizer is None:
            return list(text.encode()[: self.context + 1])
        start = text[: BYTES_PER_TOKEN * (self.context + 1)]
        return [int(i) for i in self.tokenizer.encode_batch([start])[0][: self.context + 1]]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return bytes(ids).decode("utf-8", "ignore") if self.tokenizer is None else self.tokenizer.decode(ids)

    def rows(self, texts: Sequence[str], domains: Sequence[str]) -> Rows:
        """Cut each text to a row; the rest of a short one is padding."""
        found = [self.ids(text) for text in texts]
        tokens = torch.full((len(found), self.context + 1), PADDING)
        for i, ids in enumerate(found):
            tokens[i, : len(ids)] = torch.tensor(ids)
        return Rows(tokens, tuple(self.text(ids) for ids in found), tuple(domains))


def read_corpus(work: Work, config: CorpusConfig, seed: int) -> Corpus:
    """Draw documents of every domain, the same number of each, and held-out rows of other documents."""
    source, found, content = _documents(work.data)
    work.made_from(source, content)
    draw = np.random.default_rng([seed, 1])
    domains = sorted({domain for domain, split in found if split == "train"})
    if not 0 < len(domains) <= config.documents:
        raise ConfigurationError(
            f"{source} has documents of {len(domains)} domains to train on, where {config.documents} documents are drawn, the "
            "same number of each domain; there must be a domain with split 'train', and no more domains than documents"
        )
    wanted = {"train": config.documents // len(domains), "validation": config.validation_rows, "test": config.test_rows}
    drawn: dict[str, tuple[list[str], list[str]]] = {split: ([], []) for split in wanted}
    for domain in domains:
        for split, count in wanted.items():
            have = found.get((domain, split), [])
            if len(have) < count:
                raise ConfigurationError(
                    f"{source} has {len(have)} documents of domain {domain!r} in split {split!r}, {count} are needed"
                )
            drawn[split][0].extend(have[i] for i in draw.permutation(len(have))[:count])
            drawn[split][1].extend([domain] * count)
    tokenizer = None if config.vocab <= 256 else train_vocabulary(lambda: iter(drawn["train"][0]), config.vocab, None)
    encode = Encoder(config.context, tokenizer)
    vocab = 256 if tokenizer is None else tokenizer.vocab_size
    rows = {split: encode.rows(*drawn[split]) for split in wanted}
    for some in rows.values():
        _check_targets(source, some)
    return Corpus(rows["train"], rows["validation"], rows["test"], vocab, source, encode)


def _check_targets(source: str, rows: Rows) -> None:
    """Raise ConfigurationError if a row has no token that another comes before: it has no loss."""
    short = torch.nonzero((rows.tokens != PADDING).sum(1) < 2).ravel().tolist()
    if short:
        raise ConfigurationError(
            f"{source} has a document of domain {rows.domains[short[0]]!r} with fewer than two tokens ({rows.texts[short[0]]!r}), "
            "so that nothing is to be predicted; take such documents out of the file"
        )


@functools.cache
def _documents(folder: Path | None) -> tuple[str, dict[tuple[str, str], list[str]], str]:
    """Return where texts are from, all of them by domain and split, and a hash of them."""
    found: dict[tuple[str, str], list[str]] = {}
    if folder is None:
        for domain, split, text in _python_documents():
            found.setdefault((domain, split), []).append(text)
        return (
            "Python's own text (reference, source, docstrings and character tables of the installation); no --data was given",
            found,
            digest_of(found),
        )
    path = next((folder / name for name in FILES if (folder / name).exists()), None)
    if path is None:
        raise ConfigurationError(
            f"{folder} has none of {', '.join(FILES)}: documents with text, domain and split, one JSON object a line; "
            "leave --data out, and Python's own text serves instead"
        )
    for number, document in read_jsonl(path):
        kind, about, content = (document.get(name) for name in ("split", "domain", "text"))
        if not isinstance(kind, str) or kind not in SPLITS:
            continue
        if not isinstance(about, str) or not isinstance(content, str):
            kinds = f"domain is a {type(about).__name__} and text a {type(content).__name__}"
            raise ConfigurationError(f"{path}, line {number}: {kinds}; both must be text")
        found.setdefault((about, SPLITS[kind]), []).append(content)
    return path.name, found, digest_of(found)


def digest_of(found: Mapping[tuple[str, str], Sequence[str]]) -> str:
    """Return a hash of texts by domain and split, in their order."""
    hashed = hashlib.sha256()
    for (domain, split), texts in sorted(found.items()):
        for part in (domain, split, *texts):
            hashed.update(hashlib.sha256(part.encode()).digest())
        hashed.update(b".")
    return hashed.hexdigest()


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the objects of a file of one JSON object a line, perhaps compressed, with the numbers of their lines.

    Empty lines are left out. Half of a pair of surrogates, which no encoding has, becomes the character for what is unknown.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(path, number, line)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}; expected is UTF-8 text, one JSON object a line") from error


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}, line {number} is no JSON: {error}; expected is one JSON object a line") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{path}, line {number} is a JSON {type(found).__name__}; expected is one JSON object a line")
    return {name: _encodable(value) for name, value in found.items()}


def _encodable(value: Any) -> Any:
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(value, str) else value


def _python_documents() -> Iterator[tuple[str, str, str]]:
    """Yield domain, split and text of the installation; all pieces of a file are in one split."""
    for domain in PYTHON_DOMAINS:
        files: dict[str, list[str]] = {}
        for piece in pieces_of(domain, _cut, MOST):
            files.setdefault(piece.source, []).append(piece.content)
        for i, name in enumerate(sorted(files)):
            split = {3: "validation", 7: "test"}.get(i % 10, "train")
            yield from ((domain, split, text) for text in files[name])


def _cut(text: str) -> Iterator[str]:
    return (text[start : start + PIECE] for start in range(0, len(text) - PIECE, PIECE))

"""The data of a run: tokens, the samples to train on, and the samples of every validation set."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inrun.corpus.build import Tell
from inrun.corpus.chunks import Chunks, select
from inrun.corpus.documents import Fields, Problems, read_documents
from inrun.corpus.store import TokenStore, build_store
from inrun.corpus.tokenizers import ABOUT, Tokenizer, load_tokenizer, make_tokenizer
from inrun.errors import ConfigurationError, DataError
from inrun.ledger import Ledger
from inrun.training.config import TrainConfig, ValidationSet
from inrun.training.order import Ids, draw

log = logging.getLogger("inrun")


@dataclass(frozen=True)
class Held:
    """A validation set: samples that are not trained on."""

    name: str
    chunks: Chunks
    ids: Ids
    settings: ValidationSet
    seed: int

    def rows(self, step: int, device: str) -> Tensor:
        """Return the tokens that a step looks at, ``[m, context + 1]``; the same for the same step."""
        return self._tokens(self._even(draw(self.ids, self.settings.rows, self.seed, self.name, step)), device)

    def evaluation_rows(self, count: int, device: str) -> Tensor:
        """Return the tokens of an evaluation: always the same ones."""
        return self._tokens(draw(self.ids, count, self.seed, self.name, -1 & 0xFFFFFFFF), device)

    def _even(self, ids: Ids) -> Ids:
        """Drop the last few where folds would differ in size."""
        k = max(self.settings.folds, 1)
        return ids[: len(ids) - len(ids) % k]

    def _tokens(self, ids: Ids, device: str) -> Tensor:
        return torch.from_numpy(self.chunks.batch(ids)).to(device)


@dataclass(frozen=True)
class Prepared:
    """All that training needs of its data."""

    tokenizer: Tokenizer
    chunks: Chunks
    validation: dict[str, Held]

    def sample_tokens(self, ids: Ids, device: str) -> Tensor:
        """Return ``[n, context + 1]``, padded."""
        return torch.from_numpy(self.chunks.batch(ids)).to(device)

    @property
    def validation_fingerprints(self) -> dict[str, str]:
        """Return what the documents of every validation set were."""
        return {name: held.chunks.store.fingerprint for name, held in self.validation.items()}

    @cached_property
    def samples_fingerprint(self) -> str:
        """Return which pieces of the documents are trained on: ``data.pieces`` leaves some out."""
        return hashlib.sha256(self.chunks.ids.astype("<i8").tobytes()).hexdigest()

    def register(self, ledger: Ledger) -> None:
        """Tell the books what there is to know about the samples."""
        ledger.register_sample_pieces(self.chunks.sample_tables(tokenizer=self.tokenizer))


def fields_of(config: TrainConfig) -> Fields:
    """Return the names of the documents' fields."""
    d = config.data
    return Fields(text=d.text, id=d.id, domain=d.domain, source=d.source, owner=d.owner, split=d.split)


def cache_of(config: TrainConfig) -> Path:
    """Return the folder where tokens are kept."""
    return Path(config.data.cache) if config.data.cache else Path(config.run).parent / "tokens"


def tokenizer_of(config: TrainConfig, run: Path) -> Tokenizer:
    """Return the tokenizer of a run: the saved one where there is one, since a trained one belongs to the run."""
    saved = run / "tokenizer"
    if (saved / ABOUT).is_file():
        return load_tokenizer(saved)

    def texts() -> Iterator[str]:
        return (d.text for d in read_documents([Path(p) for p in config.data.paths], fields_of(config), Problems()))

    t = config.tokenizer
    made = make_tokenizer(t.kind, path=None if t.path is None else Path(t.path), vocab=t.vocab, texts=texts)
    made.save(saved)
    return made


def prepare(config: TrainConfig, tokenizer: Tokenizer, tell: Tell = lambda done, total, documents: None) -> Prepared:
    """Tokenise what is not in the cache yet, and share documents out between training and validation."""
    fields, cache = fields_of(config), cache_of(config)
    store = build_store([Path(p) for p in config.data.paths], fields, tokenizer, cache, tell)
    for line in store.problems.lines():
        log.warning("inrun: %s", line)
    validation, taken = {}, np.zeros(store.count, bool)
    for name, settings in config.validation.items():
        held = store
        with _naming(name, settings.paths or config.data.paths):
            if settings.paths:
                held = build_store([Path(p) for p in settings.paths], fields, tokenizer, cache, tell)
            chosen = select(held, settings.split, settings.where)
        if settings.paths:
            _check_apart(name, store, held)
        else:
            taken[chosen] = True
        validation[name] = _held(name, settings, held, chosen, config)
    mine = np.zeros(store.count, bool)
    split = _train_split(config, store)
    mine[select(store, split, {})] = True
    chunks = Chunks(store, config.model.context, np.flatnonzero(mine & ~taken))
    if config.data.pieces is not None:
        from inrun.training.curated import kept_pieces

        chunks.ids = np.intersect1d(chunks.ids, kept_pieces(Path(config.data.pieces), store, config))
    if not len(chunks):
        raise ConfigurationError(
            f"no document is left to train on: {store.count} were read, {int(taken.sum())} belong to validation sets"
            + (f", the split to train on is {split!r}" if split else "")
        )
    log.info("inrun: %d documents are trained on, %d are withheld for validation", int((mine & ~taken).sum()), int(taken.sum()))
    return Prepared(tokenizer, chunks, validation)


@contextlib.contextmanager
def _naming(name: str, files: Sequence[str]) -> Iterator[None]:
    """Say of errors which validation set they are about, and which files."""
    try:
        yield
    except (ConfigurationError, DataError) as error:
        raise type(error)(f"validation set {name!r} ({', '.join(files)}): {error}") from error


def _check_apart(name: str, mine: TokenStore, other: TokenStore) -> None:
    """Refuse files that are both trained on and validated with."""
    trained = {file["sha256"] for file in mine.about["files"]}
    both = next((file["name"] for file in other.about["files"] if file["sha256"] in trained), None)
    if both is not None:
        raise ConfigurationError(
            f"validation.{name}.paths: {both!r} is among the files of data.paths, and would be trained on too; leave it out there, "
            "or leave out paths here and choose by split or where"
        )


def _train_split(config: TrainConfig, store: TokenStore) -> str | None:
    """Return the split to train on; None for all documents."""
    if config.data.train_split == "auto":
        return "train" if "train" in store.column("split")[1] else None
    return None if config.data.train_split == "all" else config.data.train_split


def _held(name: str, settings: ValidationSet, store: TokenStore, documents: np.ndarray, config: TrainConfig) -> Held:
    chunks = Chunks(store, config.model.context, documents)
    if not len(chunks):
        files = ", ".join(settings.paths or config.data.paths)
        wanted = [*([f"split {settings.split!r}"] if settings.split else []), *(f"{k} {v!r}" for k, v in settings.where.items())]
        which = f"of {len(documents)} documents none has two tokens" if len(documents) else "no document matches"
        raise ConfigurationError(
            f"validation set {name!r} is empty: {which} ({' and '.join(wanted) or 'all documents'} of {files}); "
            f"look at validation.{name} and at these files"
        )
    ids = draw(chunks.ids, settings.limit, config.seed, name, 1 << 31)
    if len(ids) < max(settings.folds, 1):
        raise ConfigurationError(f"validation set {name!r} has {len(ids)} samples, and is to be scored in {settings.folds} folds")
    return Held(name, chunks, ids, settings, config.seed)

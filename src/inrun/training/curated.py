"""The documents that the samples of an `inrun train` run are pieces of, to be kept or dropped whole; and pieces to leave out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inrun.corpus.chunks import Chunks
from inrun.corpus.documents import Problems, find_files, read_whole
from inrun.corpus.store import TokenStore, build_store
from inrun.errors import ConfigurationError, InrunError
from inrun.training.checkpoint import whole_checkpoints
from inrun.training.config import TrainConfig, load_config
from inrun.training.prepare import cache_of, fields_of, tokenizer_of


def was_trained_here(run: Path) -> bool:
    """Whether a folder is a run of `inrun train`, which knows the documents of its samples."""
    return (run / "config.yaml").is_file() and (run / "tokenizer").is_dir()


class RunDocuments:
    """The documents of a run, in the order of their numbers; see :class:`inrun.analysis.curated_documents.Documents`."""

    def __init__(self, run: Path) -> None:
        """Find the documents again, and see that they are those that the run was trained on."""
        self.config = load_config(run / "config.yaml")
        try:
            store = build_store(
                [Path(p) for p in self.config.data.paths],
                fields_of(self.config),
                tokenizer_of(self.config, run),
                cache_of(self.config),
            )
        except InrunError as error:
            raise ConfigurationError(
                f"the documents of {run} cannot be read again: {error}. Put the files of data.paths back where "
                f"{run / 'config.yaml'} has them, or take --unit samples, which writes previews of samples and needs no files"
            ) from error
        self._check(run, store)
        chunks = Chunks(store, self.config.model.context)
        self.units = pa.table({"sample_id": chunks.ids, "unit": chunks.document_of(chunks.ids)})
        known = store.documents(np.arange(store.count), ["id", "domain", "source", "owner", "split"])
        columns = {"sample_id": pa.array(np.arange(store.count)), "document": known["id"]}
        columns |= {name: known[name] for name in known.column_names if name != "id" and known[name].null_count < len(known)}
        self.described = pa.table(columns)
        self.about = about_pieces(store, self.config)

    @staticmethod
    def _check(run: Path, store: TokenStore) -> None:
        checkpoint = next(whole_checkpoints(run), None)
        if checkpoint is not None and checkpoint.state["data"] != store.fingerprint:
            raise ConfigurationError(
                f"the documents of {run} have changed since it was trained, so its scores speak of others; put the original files "
                "back, or take --unit samples"
            )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Read the documents again, whole, with all their columns."""
        files = find_files([Path(p) for p in self.config.data.paths])
        return read_whole(files, fields_of(self.config), Problems())


def about_pieces(store: TokenStore, config: TrainConfig) -> dict[str, str]:
    """Return what must be the same for numbers of pieces to mean the same ones."""
    return {"documents": store.fingerprint, "context": str(config.model.context)}


def kept_pieces(path: Path, store: TokenStore, config: TrainConfig) -> np.ndarray:
    """Return the ids of the pieces that a curation keeps, as its ``chunks.parquet`` has them."""
    try:
        table = pq.read_table(path, columns=["sample_id", "kept"])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise ConfigurationError(
            f"data.pieces: {path} is no chunks.parquet of `inrun curate`: {str(error).splitlines()[0]}"
        ) from None
    said = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
    wanted = about_pieces(store, config)
    other = [name for name, value in wanted.items() if said.get(name) != value]
    if other:
        name = other[0]
        raise ConfigurationError(
            f"data.pieces: {path} was made for other {name} ({said.get(name, 'not said')!r}, here {wanted[name]!r}), so its "
            "numbers mean other pieces; train with the data, tokenizer and model.context of the run that was curated"
        )
    return np.sort(table["sample_id"].to_numpy()[table["kept"].to_numpy(zero_copy_only=False)])

"""The documents that the samples of an `inrun train` run are pieces of, to be kept or dropped whole; and pieces to leave out."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from inrun.corpus.chunks import Chunks
from inrun.corpus.documents import Problems, find_files, read_whole
from inrun.corpus.store import TokenStore, build_store
from inrun.errors import ConfigurationError, InrunError
from inrun.ledger import Ledger
from inrun.training.checkpoint import whole_checkpoints
from inrun.training.config import TrainConfig, load_config
from inrun.training.prepare import cache_of, fields_of, tokenizer_of


def was_trained_here(run: Path) -> bool:
    """Whether a folder is a run of `inrun train`, which knows the documents of its samples."""
    return (run / "config.yaml").is_file() and (run / "tokenizer").is_dir()


def trained_run(run: Path) -> Path | None:
    """Return the run of `inrun train` that has the documents of a folder's samples: itself, or the one that it is a replay of.

    Raises:
        ConfigurationError: The folder is a replay, and its run is gone.
    """
    if was_trained_here(run) or not Ledger.exists(run):
        return run if was_trained_here(run) else None
    replayed = Ledger.open(run).about.get("replay")
    if not isinstance(replayed, dict):
        return None
    recorded = Path(str(replayed.get("run", "")))
    # The folder around it comes first: run and replay may have been moved together.
    around = Path(os.path.abspath(run)).parent.parent
    for found in (*([around] if around.name == recorded.name else []), recorded):
        if was_trained_here(found) and _is_run(found, replayed.get("of")):
            return found
    raise ConfigurationError(
        f"{run} is a replay of {recorded}, which has its documents and is not there any more; put it back, or take --unit samples, "
        "which writes previews of samples and needs no files"
    )


def _is_run(run: Path, run_id: Any) -> bool:
    """Whether a folder holds the run of an id; one that was trained without scores has none."""
    return run_id is None or (Ledger.exists(run) and Ledger.open(run).about.get("run_id") == run_id)


def began_in(run: Path, config: TrainConfig) -> Path:
    """Return the folder that a run was begun in, where its relative paths start: this one, unless its own path tells another."""
    own, at = Path(config.run).parts, Path(os.path.abspath(run)).parts
    if Path(config.run).is_absolute() or ".." in own or at[-len(own) :] != own:
        return Path.cwd()
    return Path(*at[: -len(own)])


class RunDocuments:
    """The documents of a run, in the order of their numbers; see :class:`inrun.analysis.curated_documents.Documents`."""

    def __init__(self, run: Path) -> None:
        """Find the documents again, and see that they are those that the run was trained on."""
        self.run, self.config = run, load_config(run / "config.yaml")
        self.base = began_in(run, self.config)
        given = [Path(p) for p in self.config.data.paths]
        there = [self.base / p for p in given]
        self.paths = there if all(p.exists() for p in there) else given
        try:
            store = build_store(
                self.paths, fields_of(self.config), tokenizer_of(self.config, run), self.base / cache_of(self.config)
            )
        except InrunError as error:
            looked = (
                ""
                if all(p.is_absolute() for p in given)
                else (f"; paths are relative to where training began, and were looked for in {self.base} and in {Path.cwd()}")
            )
            raise ConfigurationError(
                f"the documents of {run} cannot be read again: {error}. Put the files of data.paths back where "
                f"{run / 'config.yaml'} has them{looked}; or take --unit samples, which writes previews and needs no files"
            ) from error
        self._check(run, store)
        chunks = Chunks(store, self.config.model.context)
        self.units = pa.table({"sample_id": chunks.ids, "unit": chunks.document_of(chunks.ids)})
        known = store.documents(np.arange(store.count), ["id", "domain", "source", "owner", "split"])
        columns = {"sample_id": pa.array(np.arange(store.count)), "document": known["id"]}
        columns |= {name: known[name] for name in known.column_names if name != "id" and known[name].null_count < len(known)}
        self.described = pa.table(columns)
        self.about = about_pieces(store, self.config)

    def command(self, out: str) -> str:
        """Return the command that trains on what a curation of these documents kept, as a shell takes it."""
        c = self.config
        others = [c.data.cache, c.tokenizer.path, c.model.path, *(p for v in c.validation.values() for p in v.paths)]
        run, out, cd = str(self.run), str(out), ""
        if self.base != Path.cwd() and any(p is not None and not Path(p).is_absolute() for p in others):
            run, out, cd = os.path.abspath(run), os.path.abspath(out), f"cd {shlex.quote(str(self.base))} && "
        words = [f"{run}/config.yaml", f"data.paths=[{_as_yaml(out, always=True)}]", f"run={_as_yaml(f'{run}-curated')}"]
        words += ["data.pieces=null"] if c.data.pieces is not None else []  # their numbers are those of other documents
        return f"{cd}inrun train {' '.join(map(shlex.quote, words))}"

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
        return read_whole(find_files(self.paths), fields_of(self.config), Problems())


def _as_yaml(text: str, always: bool = False) -> str:
    """Return a text as it is where YAML reads it so, else (or ``always``) in quotes: names may be numbers, or hold commas."""
    quoted = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(text, ensure_ascii=False))
    try:
        return quoted if always or yaml.safe_load(text) != text else text
    except yaml.YAMLError:
        return quoted


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

"""Checkpoints: everything a run needs to go on bit for bit, in safetensors and JSON.

::

    checkpoints/step-00000200/model.safetensors, optimizer.safetensors, random.safetensors, credit.safetensors, state.json

``credit.safetensors`` has the tensors of the accountant's state, such as the rows of open uses.
Of several processes rank 0 writes what is the same on all, and each other one its own ``random-r1.safetensors`` and
``credit-r1.safetensors``; any number of processes can go on from them.
A checkpoint is written aside, synced and renamed, so that it is whole or absent; ``state.json`` has the digests of the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from inrun.engine.processes import Processes
from inrun.engine.saved import join_state, split_state
from inrun.errors import TrainingError
from inrun.files import Files, put_folder
from inrun.training.parallel import is_split, split_like, whole

log = logging.getLogger("inrun")
VERSION = 1
_OWN = re.compile(r"(credit|random)(-r[1-9][0-9]*)?\.safetensors")
_NAME = re.compile(r"step-(\d{8,})")
RANDOM, CREDIT = "random.safetensors", "credit.safetensors"
_FILES = ("model.safetensors", "optimizer.safetensors", RANDOM)
_ALONE = Processes()


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk: the state before step ``step``."""

    folder: Path
    step: int
    state: dict[str, Any]

    def load_model(self, model: nn.Module) -> None:
        """Put the weights into a model of the same shape."""
        try:
            tensors = load_file(str(self.folder / "model.safetensors"))
            tensors |= {name: tensors[kept] for name, kept in self.state["tied"].items()}
            model.load_state_dict(tensors, strict=True)
        except (RuntimeError, SafetensorError, OSError, KeyError) as error:
            raise TrainingError(f"{self.folder} does not fit the model: {' '.join(str(error).split())[:300]}") from error

    def load_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Put state and options into an optimizer over the same parameters."""
        tensors = load_file(str(self.folder / "optimizer.safetensors"))
        saved = self.state["optimizer"]
        state: dict[int, dict[str, Any]] = {int(i): dict(values) for i, values in saved["values"].items()}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = split_like(tensor, parameters[int(index)])
        mine = optimizer.state_dict()["param_groups"]
        if [len(g["params"]) for g in mine] != [len(g["params"]) for g in saved["groups"]]:
            raise TrainingError(f"{self.folder} was saved with other parameter groups than this run has")
        groups = [{k: _like(v, now.get(k)) for k, v in g.items()} for g, now in zip(saved["groups"], mine, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def load_random(self, rank: int = 0) -> None:
        """Put back the state of torch's random numbers of a rank; a rank that was not there draws its own."""
        if _of_rank(RANDOM, rank) not in self.state["files"]:
            torch.manual_seed(1_000_003 * rank + self.step)
            return
        states = load_file(str(self.folder / _of_rank(RANDOM, rank)))
        torch.set_rng_state(states["cpu"])
        for name, state in states.items():
            if name.startswith("cuda") and torch.cuda.is_available():
                torch.cuda.set_rng_state(state, int(name[4:]))

    @property
    def world(self) -> int:
        """Return how many processes wrote it."""
        return 1 + len(self.state.get("accountants", ()))

    def accountant_state(self, rank: int = 0, world: int = 1, split: bool = False) -> dict[str, Any] | list[dict[str, Any]]:
        """Return what :meth:`inrun.Accountant.load_state_dict` takes.

        That is the state of a rank; or those of all, where their number is another now, or the parameters are split otherwise.
        """
        same = world == self.world and split == bool(self.state.get("split", False))
        return self._state_of(rank) if same else [self._state_of(r) for r in range(self.world)]

    def _state_of(self, rank: int) -> dict[str, Any]:
        plain, file = self.state["accountants"][rank - 1] if rank else self.state["accountant"], _of_rank(CREDIT, rank)
        return join_state(plain, load_file(str(self.folder / file)) if file in self.state["files"] else None)


def _of_rank(name: str, rank: int) -> str:
    """Return the name of a rank's own file: ``random-r1.safetensors``; rank 0 has the plain one."""
    return name.replace(".", f"-r{rank}.", 1) if rank else name


def _like(value: Any, now: Any) -> Any:
    return tuple(value) if isinstance(now, tuple) else value


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: dict[str, Any],
    accountant: dict[str, Any] | None = None,
    processes: Processes = _ALONE,
) -> Path:
    """Write the state before step ``step``; of several processes on all of them, and it is there when all have their part in it.

    Args:
        run: Folder of the run.
        step: The next step.
        model: Its weights are saved.
        optimizer: Its state and options are saved.
        more: Plain data that :class:`Checkpoint` gives back in ``state``.
        accountant: What an accountant's ``state_dict()`` returned; None without scores.
        processes: Those that train together.
    """
    home = run / "checkpoints"
    aside, final = home / f".step-{step:08d}.part", folder_of(run, step)
    first = processes.rank == 0
    try:
        with processes.barrier("the checkpoint's folder", step):
            if first:
                home.mkdir(parents=True, exist_ok=True)
                if aside.exists():
                    shutil.rmtree(aside)
                aside.mkdir()
        with processes.barrier("the checkpoint's parts", step):
            books, own = _write_own(aside, accountant, processes.rank)
        told = processes.gather_objects((books, own))
        tensors = _shared_tensors(model, optimizer, first)  # together: what is split is gathered
        with processes.barrier("the checkpoint", step):
            if first:
                digests = {name: digest for _, files in told for name, digest in files.items()}
                state = {"version": VERSION, "step": step, "accountant": books, "split": is_split(model), **more}
                if processes.several:
                    state["accountants"] = [books for books, _ in told[1:]]
                _write_shared(aside, model, tensors, state, digests)
                if final.exists():  # written before a kill, from the same state
                    _discard(final)
                put_folder(Files(), aside, final)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the checkpoint {final} cannot be written: {error}. Free space, then go on with --resume") from error
    return final


def _write_own(folder: Path, accountant: dict[str, Any] | None, rank: int) -> tuple[dict[str, Any] | None, dict[str, str]]:
    """Write what is a rank's own, durably; return the plain rest of an accountant's state, and the digests of the files."""
    books, tensors = (None, None) if accountant is None else split_state(accountant)
    written = {_of_rank(RANDOM, rank): _random_states()} | ({} if tensors is None else {_of_rank(CREDIT, rank): tensors})
    for name, some in written.items():
        save_file(some, str(folder / name))
        Files().sync(folder / name)
    return books, {name: _digest(folder / name) for name in written}


def _shared_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, keep: bool) -> tuple[Any, ...]:
    """Return weights and ties, tensors and values of the optimizer; without ``keep`` only take part in gathering them."""
    return *_split_weights(model, keep), *_split_optimizer(optimizer, keep)


def _write_shared(folder: Path, model: nn.Module, shared: tuple[Any, ...], state: dict[str, Any], digests: dict[str, str]) -> None:
    """Write weights and optimizer and, last, what is in the folder."""
    weights, tied, tensors, saved = shared
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    if hasattr(getattr(model, "config", None), "save_pretrained"):  # so that transformers can load a checkpoint
        model.config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    save_file(tensors, str(folder / "optimizer.safetensors"))
    digests = {name: _digest(folder / name) for name in _FILES if name != RANDOM} | digests
    described = {**state, "files": digests, "tied": tied, "optimizer": saved}
    (folder / "state.json").write_text(json.dumps(described, allow_nan=True), "utf-8")
    disk = Files()
    for file in folder.iterdir():
        disk.sync(file)


def _split_weights(model: nn.Module, keep: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every weight under its first name, and which names stand for one that has another."""
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[Any, str] = {}
    # What is split may have no memory of its own here: which names are of one parameter tells the model.
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} if is_split(model) else {}
    for name, tensor in model.state_dict().items():
        place = owners.get(name) or (tensor.data_ptr(), tuple(tensor.shape))
        kept = first.setdefault(place, name) if tensor.numel() else name
        if kept == name:
            found = whole(tensor)
            if keep:
                weights[name] = found.contiguous()
        else:
            tied[name] = kept
    return weights, tied


def _split_optimizer(optimizer: torch.optim.Optimizer, keep: bool = True) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state's tensors by name, and the rest as plain data."""
    given = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, state in given["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found = whole(value)
                if keep:
                    tensors[f"{index}.{key}"] = found.contiguous()
            else:
                values.setdefault(str(index), {})[key] = value
    return tensors, {"values": values, "groups": given["param_groups"]}


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


def folder_of(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint before a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints_of(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, oldest first."""
    home = run / "checkpoints"
    if not home.is_dir():
        return []
    found = [(int(m.group(1)), entry) for entry in home.iterdir() if (m := _NAME.fullmatch(entry.name)) and entry.is_dir()]
    return [folder for _, folder in sorted(found)]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check one checkpoint; TrainingError if it is damaged."""
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        version, step, digests = state["version"], int(state["step"]), state["files"]
        if version != VERSION:
            raise TrainingError(f"{folder} has version {version!r}; this inrun reads {VERSION}")
        for name in {*_FILES, *(name for name in digests if _OWN.fullmatch(name))}:
            if _digest(folder / name) != digests[name]:
                raise TrainingError(f"{folder / name} is damaged: its digest is not the one it was saved with")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise TrainingError(f"{folder} is damaged ({type(error).__name__}: {error})") from error
    return Checkpoint(folder, step, state)


def whole_checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Give the checkpoints that can be read, newest first; damaged ones are reported and skipped."""
    for folder in reversed(checkpoints_of(run)):
        try:
            yield read_checkpoint(folder)
        except TrainingError as error:
            log.warning("inrun: %s; looking for an older checkpoint", error)


def prune(run: Path, newest: int, keep: int | None, keep_every: int | None) -> None:
    """Remove checkpoints beyond the newest ``1 + keep``, but those at multiples of ``keep_every``."""
    home = run / "checkpoints"
    for leftover in [*home.glob(".*.part"), *home.glob(".*.gone")] if home.is_dir() else []:
        shutil.rmtree(leftover, ignore_errors=True)
    if keep is None:
        return
    old = [folder for folder in checkpoints_of(run) if int(folder.name[5:]) <= newest]  # later ones: damaged, from before a resume
    for folder in old[: -(1 + keep)]:
        if not keep_every or int(folder.name[5:]) % keep_every:
            _discard(folder)


def _discard(folder: Path) -> None:
    """Take the name away first: a folder that is half removed must not look like a checkpoint."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

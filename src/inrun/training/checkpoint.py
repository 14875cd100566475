"""Checkpoints: everything a run needs to go on bit for bit, in safetensors and JSON.

::

    checkpoints/step-00000200/model.safetensors, optimizer.safetensors, random.safetensors, credit.safetensors, state.json

``credit.safetensors`` is there under whole credit alone: the windows that are open, without which samples' later pay would be lost.
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

from inrun.engine.saved import join_state, split_state
from inrun.errors import TrainingError
from inrun.files import Files, put_folder

log = logging.getLogger("inrun")
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.safetensors", "random.safetensors")
CREDIT = "credit.safetensors"


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
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        mine = optimizer.state_dict()["param_groups"]
        if [len(g["params"]) for g in mine] != [len(g["params"]) for g in saved["groups"]]:
            raise TrainingError(f"{self.folder} was saved with other parameter groups than this run has")
        groups = [{k: _like(v, now.get(k)) for k, v in g.items()} for g, now in zip(saved["groups"], mine, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def load_random(self) -> None:
        """Put back the state of torch's random numbers."""
        states = load_file(str(self.folder / "random.safetensors"))
        torch.set_rng_state(states["cpu"])
        for name, state in states.items():
            if name.startswith("cuda") and torch.cuda.is_available():
                torch.cuda.set_rng_state(state, int(name[4:]))

    def accountant_state(self) -> dict[str, Any]:
        """Return what :meth:`inrun.Accountant.load_state_dict` takes, with the tensors of open windows where there are any."""
        plain = self.state["accountant"]
        has_windows = plain.get("credit") is not None and CREDIT in self.state["files"]
        return join_state(plain, load_file(str(self.folder / CREDIT)) if has_windows else None)


def _like(value: Any, now: Any) -> Any:
    return tuple(value) if isinstance(now, tuple) else value


def save_checkpoint(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    more: dict[str, Any],
    accountant: dict[str, Any] | None = None,
) -> Path:
    """Write the state before step ``step``.

    Args:
        run: Folder of the run.
        step: The next step.
        model: Its weights are saved.
        optimizer: Its state and options are saved.
        more: Plain data that :class:`Checkpoint` gives back in ``state``.
        accountant: What an accountant's ``state_dict()`` returned; None without scores.
    """
    home = run / "checkpoints"
    home.mkdir(parents=True, exist_ok=True)
    aside, final = home / f".step-{step:08d}.part", home / f"step-{step:08d}"
    if aside.exists():
        shutil.rmtree(aside)
    try:
        aside.mkdir()
        weights, tied = _split_weights(model)
        save_file(weights, str(aside / "model.safetensors"), metadata={"format": "pt"})
        if hasattr(getattr(model, "config", None), "save_pretrained"):  # so that transformers can load a checkpoint
            model.config.save_pretrained(aside)  # type: ignore[union-attr, operator]
        tensors, saved = _split_optimizer(optimizer)
        save_file(tensors, str(aside / "optimizer.safetensors"))
        save_file(_random_states(), str(aside / "random.safetensors"))
        books, windows = (None, None) if accountant is None else split_state(accountant)
        if windows is not None:
            save_file(windows, str(aside / CREDIT))
        digests = {name: _digest(aside / name) for name in (*_FILES, *([] if windows is None else [CREDIT]))}
        state = {"version": VERSION, "step": step, "files": digests, "tied": tied, "optimizer": saved, "accountant": books, **more}
        (aside / "state.json").write_text(json.dumps(state, allow_nan=True), "utf-8")
        disk = Files()
        for file in aside.iterdir():
            disk.sync(file)
        if final.exists():  # written before a kill, from the same state
            _discard(final)
        put_folder(disk, aside, final)
    except (OSError, SafetensorError) as error:
        raise TrainingError(f"the checkpoint {final} cannot be written: {error}. Free space, then go on with --resume") from error
    return final


def _split_weights(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return every weight under its first name, and which names stand for one that has another."""
    weights: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        kept = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
        if kept == name:
            weights[name] = tensor.contiguous()
        else:
            tied[name] = kept
    return weights, tied


def _split_optimizer(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state's tensors by name, and the rest as plain data."""
    given = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, state in given["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.contiguous()
            else:
                values.setdefault(str(index), {})[key] = value
    return tensors, {"values": values, "groups": given["param_groups"]}


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{i}": torch.cuda.get_rng_state(i) for i in range(torch.cuda.device_count())}
    return states


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
        for name in (*_FILES, *([CREDIT] if CREDIT in digests else [])):
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

"""An accountant's state inside a trainer's checkpoint: JSON and safetensors, one pair of files per process, no pickle."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from inrun.engine.processes import Processes
from inrun.engine.saved import join_state, split_state
from inrun.errors import TrainingError
from inrun.files import Files, write_durably
from inrun.integrations.scoring import State

VERSION = 2


def names(rank: int) -> tuple[str, str]:
    """Return the names of the two files of a process."""
    return f"inrun-{rank}.json", f"inrun-{rank}.safetensors"


def pack_state(state: dict[str, Any]) -> bytes:
    """Return an accountant's ``state_dict()`` in one piece, to be sent: the length of the JSON, the JSON, the tensors."""
    plain, tensors = split_state(state)
    text = json.dumps(plain, allow_nan=True).encode()
    return len(text).to_bytes(8, "little") + text + (b"" if tensors is None else save(tensors))


def unpack_state(packed: bytes) -> dict[str, Any]:
    """Undo :func:`pack_state`."""
    end = 8 + int.from_bytes(packed[:8], "little")
    return join_state(json.loads(packed[8:end]), load(packed[end:]) if packed[end:] else None)


def has_state(folder: Path, rank: int = 0) -> bool:
    """Whether a checkpoint holds the state of a process; the JSON file is written last."""
    return (folder / names(rank)[0]).is_file()


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint holds the states of all processes that saved."""
    try:
        saved = json.loads((folder / names(0)[0]).read_text("utf-8"))
        world = int(saved["world"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return all(has_state(folder, rank) for rank in range(world))


def save_state(folder: Path, state: dict[str, Any], processes: Processes) -> None:
    """Write an accountant's ``state_dict()`` into a checkpoint; whole or not at all."""
    plain_name, tensors_name = names(processes.rank)
    folder.mkdir(parents=True, exist_ok=True)  # of several processes, one may be here before the one that makes it
    plain, tensors = split_state(state)
    digest = None
    if tensors is not None:
        packed = save(tensors)
        digest = hashlib.sha256(packed).hexdigest()
        write_durably(Files(), folder / tensors_name, packed)
    text = json.dumps({"version": VERSION, "world": processes.world, "tensors": digest, "state": plain}, allow_nan=True)
    write_durably(Files(), folder / plain_name, text.encode())


def load_states(folder: Path, processes: Processes) -> State:
    """Read what this process goes on from: its own state, or those of all that saved, where their number was another.

    What is absent or damaged for one process is raised on all of them.
    """
    with processes.barrier("reading the state of inrun", 0):
        rank = processes.rank
        world, first = _load(folder, rank if has_state(folder, rank) else 0)
        if world != processes.world:
            return [_load(folder, r)[1] for r in range(world)]
        return first if has_state(folder, rank) else _load(folder, rank)[1]


def _load(folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
    """Return of how many processes a state is, and the state; TrainingError if it is absent or damaged, with what to do."""
    plain_name, tensors_name = names(rank)
    if not has_state(folder, rank):
        raise TrainingError(
            f"{folder} has no {plain_name}: it was saved without inrun, by another number of processes, or the run was killed "
            f"while saving. {_older(folder)}"
        )
    try:
        saved = json.loads((folder / plain_name).read_text("utf-8"))
        if saved["version"] != VERSION:
            raise TrainingError(f"{folder / plain_name} has version {saved['version']!r}; this inrun reads {VERSION}")
        tensors = None
        if saved["tensors"] is not None:
            packed = (folder / tensors_name).read_bytes()
            if hashlib.sha256(packed).hexdigest() != saved["tensors"]:
                raise TrainingError(f"{folder / tensors_name} is damaged: its digest is not the one it was saved with")
            tensors = load(packed)
        return int(saved["world"]), join_state(saved["state"], tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TrainingError(f"the state of inrun in {folder} is damaged ({type(error).__name__}: {error})") from error


def _older(folder: Path) -> str:
    """Say from which other checkpoint beside this one a run could go on: one that all processes came to write."""
    others = [f for f in folder.parent.glob("*") if f.is_dir() and f != folder and is_whole(f)]
    if not others:
        return "Begin the run anew, or go on without scores (do not attach)."
    return f"Resume from {max(others, key=lambda f: f.stat().st_mtime)}, which has one."

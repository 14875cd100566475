"""A saved run that goes on with another number of processes: open uses are shared out anew, split vectors are split anew.

Three kinds of things are in the states of the ranks that saved:

    replicated    the same on all: sums, sketched directions, what the optimizers remember. Taken from rank 0.
    by use        one row per sample: those of all ranks are laid end to end and divided among the ranks that load.
    by entry      the flat vectors of scored parameters, of which ``fully_shard`` leaves every rank its rows of every tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from inrun.engine.processes import Processes
from inrun.engine.shards import Shard
from inrun.errors import ConfigurationError

Saved = dict[str, Any]


def processes_state(processes: Processes) -> Saved:
    """Return whose state it is, as plain data."""
    return {"rank": processes.rank, "world": processes.world, "sharded": processes.sharded}


def state_of_rank(given: Sequence[Mapping[str, Any]], processes: Processes, shapes: list[torch.Size]) -> Saved:
    """Return the state that this rank goes on from.

    Args:
        given: Its own state alone, or those of all ranks that saved, in order.
        processes: Those that go on.
        shapes: The whole shapes of the scored parameters, by place.
    """
    states = [dict(s) for s in given]
    saved, here = [s["processes"] for s in states], processes_state(processes)
    if here in saved:
        return states[saved.index(here)]
    world = int(saved[0]["world"]) if saved else 0
    if not saved or [(s["rank"], s["world"]) for s in saved] != [(r, world) for r in range(world)]:
        those = ", ".join(f"rank {s['rank']} of {s['world']}" for s in saved) or "none"
        raise ConfigurationError(
            f"this is rank {processes.rank} of {processes.world}, and the given states are those of: {those}. Give load_state_dict "
            "the state that this rank saved. Where the number of processes or fully_shard has changed, give the list of all ranks' "
            "states, in their order."
        )
    if len({s["steps_done"] for s in states}) > 1:
        done = ", ".join(f"rank {r} after {s['steps_done']} steps" for r, s in enumerate(states))
        raise ConfigurationError(f"the given states are of different checkpoints: {done}. Give those of one checkpoint.")
    found = {**states[0], "processes": here, "ids": _ids(states, processes)}
    if states[0]["scorer"]:
        found["scorer"] = _scorer([s["scorer"] for s in states], saved[0]["sharded"], processes, shapes)
    return found


def _shared(parts: Sequence[Tensor], processes: Processes) -> Tensor:
    """Lay rows of all ranks that saved end to end; return those of this rank."""
    return torch.cat(list(parts)).tensor_split(processes.world)[processes.rank].clone()


def _ids(states: list[Saved], processes: Processes) -> Saved:
    """Share out ids and row numbers of open uses, by step."""
    found = {}
    for step in states[0]["ids"]:
        ids, rows = zip(*(s["ids"][step] for s in states), strict=True)
        numbers = [torch.arange(len(i)) if r is None else r for i, r in zip(ids, rows, strict=True)]
        found[step] = [_shared(ids, processes), _shared(numbers, processes)]
    return found


def _scorer(states: list[Saved], sharded: bool, processes: Processes, shapes: list[torch.Size]) -> Saved:
    def anew(parts: list[Tensor | None]) -> Tensor | None:
        vectors = [x for x in parts if x is not None]
        if not vectors:
            return None
        whole = _join(vectors, shapes) if sharded else vectors[0]
        return _split(whole, shapes, processes) if processes.sharded else whole

    first = states[0]
    carried = {name: anew([s["carried"][name] for s in states]) for name in ("decay", "inherited")}
    return {
        **first,
        "direction": anew([s["direction"] for s in states]),
        # Rounding is of the small tensors alone, which are whole on every rank.
        "carried": {**first["carried"], **carried},
        "window": _window([s["window"] for s in states], processes),
    }


# By entry


def _parts(shapes: list[torch.Size], rank: int, world: int) -> list[slice]:
    return [Shard(shape, rank, world).part for shape in shapes]


def _join(vectors: list[Tensor], shapes: list[torch.Size]) -> Tensor:
    """Return whole vectors ``[..., size]`` from the parts of all ranks."""
    pieces: list[list[Tensor]] = []
    for rank, x in enumerate(vectors):
        sizes = [part.stop - part.start for part in _parts(shapes, rank, len(vectors))]
        pieces.append(list(x.split(sizes, -1)))
    return torch.cat([piece for of_tensor in zip(*pieces, strict=True) for piece in of_tensor], -1)


def _split(whole: Tensor, shapes: list[torch.Size], processes: Processes) -> Tensor:
    """Return this rank's part of whole vectors ``[..., size]``."""
    tensors = whole.split([math.prod(shape) for shape in shapes], -1)
    parts = _parts(shapes, processes.rank, processes.world)
    return torch.cat([x[..., part] for x, part in zip(tensors, parts, strict=True)], -1)


# By use


def _window(states: list[Saved], processes: Processes) -> Saved:
    """Share out the rows of open steps."""
    first = states[0]
    held = {name: like for s in states for name, like in s["held"].items()}

    def rows_of(name: str, dim: int) -> Tensor:
        """Return ``[steps, rows, ...]`` of this rank; ``dim`` is where the rows are in what was saved."""
        of_ranks = [x.movedim(dim, 1) if (x := s["held"].get(name)) is not None else None for s in states]
        wide = [max(sizes) for sizes in zip(*(x.shape[2:] for x in of_ranks if x is not None), strict=True)]
        shared = []
        for j in range(len(first["slots"])):
            parts = []
            for s, x in zip(states, of_ranks, strict=True):
                rows = held[name].new_zeros(s["slots"][j][2], *wide)
                if x is not None:
                    rows[tuple(slice(size) for size in (len(rows), *x.shape[2:]))] = x[j, : len(rows)]
                parts.append(rows)
            shared.append(_shared(parts, processes))
        return torch.nn.utils.rnn.pad_sequence(shared, batch_first=True).movedim(1, dim)

    dims = {"errors.rows": 2, "errors.known": None, "errors.paid": None, "errors.entered": None}
    found = {name: like if (dim := dims.get(name, 1)) is None else rows_of(name, dim) for name, like in held.items()}
    slots = [_slot([s["slots"][j] for s in states], processes) for j in range(len(first["slots"]))]
    shape = [first["shape"][0], found["ring"].shape[1], first["shape"][2]] if slots else [0]
    return {**first, "held": found, "slots": slots, "shape": shape}


def _slot(of_ranks: list[list[Any]], processes: Processes) -> list[Any]:
    """Return this rank's part of an open step: its number, place, rows, epoch, and the ids of its rows where they are known."""
    (step, place, _, epoch, _), counts = of_ranks[0], [slot[2] for slot in of_ranks]
    rows = len(_shared([torch.zeros(n) for n in counts], processes))
    if any(slot[4] is None and slot[2] for slot in of_ranks):
        return [step, place, rows, epoch, None]
    ids = _shared([torch.tensor(slot[4] or [], dtype=torch.int64) for slot in of_ranks], processes)
    return [step, place, rows, epoch, ids.tolist()]

"""Open windows of a run that goes on with another number of processes: rows of several ranks as those of one.

What is by row (credit so far, sketches, gradients) is laid end to end; everything else is the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inrun.errors import ConfigurationError
from inrun.old.engine.processes import Processes

#: Tensors of a sketched step with one row per sample.
BY_ROW = ("sketch", "beyond", "spread_rows", "rest_rows")

Saved = dict[str, Any]


def of_ranks(rank: int, world: int, saved: int) -> list[int]:
    """Return which of the ``saved`` ranks' rows a rank of ``world`` goes on with."""
    return [r for r in range(saved) if r % world == rank]


def state_of_rank(states: list[Saved], processes: Processes) -> Saved:
    """Return the state that this rank goes on from, given its own or those of all ranks that saved, in order."""
    saved = [s.get("processes", {"rank": 0, "world": 1}) for s in states]
    world = int(saved[0]["world"])
    if len(states) == 1 and world == processes.world and saved[0]["rank"] == processes.rank:
        return states[0]
    if [(s["rank"], s["world"]) for s in saved] != [(r, world) for r in range(world)]:
        given = ", ".join(f"rank {s['rank']} of {s['world']}" for s in saved)
        raise ConfigurationError(
            f"this is rank {processes.rank} of {processes.world}, and the saved state is that of {given}. Every rank loads its own "
            "state; where the number of processes has changed, give load_state_dict the list of all ranks' states, in their order."
        )
    if processes.sharded:
        return {**states[0], "credit": None}  # what the optimizer remembers is split in another way: it is inherited
    mine = of_ranks(processes.rank, processes.world, world)
    if world == processes.world or states[0].get("credit") is None:
        return states[mine[0] if mine else 0]
    return {**states[0], "credit": join_states([s["credit"] for s in states], mine)}


def join_states(states: list[Saved], mine: list[int]) -> Saved:
    """Return the saved credit state of a rank that goes on with the rows of the ranks ``mine``, perhaps of none."""
    first = states[0]["plain"]
    tensors = {k: x for k, x in states[0]["tensors"].items() if not k.startswith(("open.", "entry."))}
    plain = {**first, "entries": []}
    for j in range(len(first["open"])):
        for name in ("ids", "credit", *(["rows"] if f"open.{j}.rows" in states[0]["tensors"] else [])):
            tensors[f"open.{j}.{name}"] = _rows([s["tensors"][f"open.{j}.{name}"] for s in states], mine)
        join = _join_exact if first["exact"] else _join_sketched
        plain["entries"].append(join(states, mine, j, tensors))
    return {"plain": plain, "tensors": tensors}


def _rows(of: list[Tensor], mine: list[int]) -> Tensor:
    return torch.cat([of[r] for r in mine]) if mine else of[0][:0].clone()


def _firsts(states: list[Saved], mine: list[int], j: int) -> list[int]:
    """Return where the rows of every rank begin among ours."""
    sizes = [len(states[r]["tensors"][f"open.{j}.ids"]) for r in mine]
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _join_sketched(states: list[Saved], mine: list[int], j: int, tensors: dict[str, Tensor]) -> Saved:
    entry = f"entry.{j}."
    for name, x in states[0]["tensors"].items():
        field = name.removeprefix(entry)
        if name.startswith(entry) and "." not in field:
            tensors[name] = _rows([s["tensors"][name] for s in states], mine) if field in BY_ROW else x
    rows: list[tuple[int, int]] = []
    for r, start in zip(mine, _firsts(states, mine, j), strict=True):
        for i, (parameter, first) in enumerate(states[r]["plain"]["entries"][j]["rows"]):
            for kind in ("rows", "values", "owner"):
                found = states[r]["tensors"].get(f"{entry}{kind}.{i}")
                if found is not None:
                    tensors[f"{entry}{kind}.{len(rows)}"] = found
            rows.append((parameter, first + start))
    return {**states[0]["plain"]["entries"][j], "rows": rows}


def _join_exact(states: list[Saved], mine: list[int], j: int, tensors: dict[str, Tensor]) -> Saved:
    held: list[Saved] = []
    entry = f"entry.{j}."
    for r, start in zip(mine, _firsts(states, mine, j), strict=True):
        for i, h in enumerate(states[r]["plain"]["entries"][j]["held"]):
            for part in (*map(str, range(h["parts"])), "owner"):
                found = states[r]["tensors"].get(f"{entry}{i}.{part}")
                if found is not None:
                    tensors[f"{entry}{len(held)}.{part}"] = found
            held.append({**h, "first": h["first"] + start})
    tensors |= {name: x for name, x in states[0]["tensors"].items() if name.startswith(f"{entry}factor.")}
    return {**states[0]["plain"]["entries"][j], "held": held, "n": sum(states[r]["plain"]["entries"][j]["n"] for r in mine)}

"""Ranks that write side by side: which of them a step waits for, and how they go on together.

Every rank has parts and a manifest of its own. What joins them is in the manifest of rank 0: its ``begin`` and ``resume`` entries
open a *session* and say how many ranks write in it (``world``; nothing where it is one). A step is complete when every rank of the
session has flushed it, and only complete steps are read. Before rank 0 opens a session it cuts all other manifests at the mark, so
that nothing of an earlier session is left in them; the others wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.files import Files
from inrun.ledger.lock import lock_rank
from inrun.ledger.manifest import Chain, chain_path, ranks_of, read_chain
from inrun.ledger.marks import position, resume_chain

#: Seconds in which rank 0 must have opened the session, and in which ranks of one start may hold each other's locks.
PATIENCE, LOCK_PATIENCE = 60.0, 10.0


@dataclass(frozen=True)
class Session:
    """Who writes now, and since which step."""

    world: int
    step: int
    #: Ranks whose books are lost: ``inrun repair`` lets steps count without them.
    without: frozenset[int] = frozenset()

    @property
    def members(self) -> list[int]:
        """Return the ranks that a step waits for."""
        return [rank for rank in range(self.world) if rank not in self.without]


def session_of(chains: Sequence[Chain]) -> Session:
    """Return the present session, by the manifest of the first rank that has one."""
    found = Session(1, 0)
    begun = [chain for chain in chains if chain.entries]
    for entry in begun[0].entries if begun else ():
        if entry.kind in ("begin", "resume"):
            found = Session(int(entry.more.get("world", 1)), entry.at_step)
        elif entry.kind == "drop":
            found = Session(found.world, found.step, found.without | frozenset(entry.more.get("without", ())))
    return found


def progress_of(chain: Chain | None, session: Session) -> int:
    """Return how many steps a rank has flushed."""
    ends = [] if chain is None else [e.at_step for e in chain.entries if e.kind in ("begin", "resume", "flush")]
    return max(session.step, ends[-1] if ends else 0)


def complete_steps(chains: Sequence[Chain]) -> int | None:
    """Return the first step that not every rank has flushed, before which all count; None where one process writes alone."""
    session = session_of(chains)
    if session.world == 1 and not session.without:
        return None
    by_rank = {chain.rank: chain for chain in chains}
    return min((progress_of(by_rank.get(rank), session) for rank in session.members), default=session.step)


def waiting_ranks(chains: Sequence[Chain]) -> list[int]:
    """Return the ranks for which steps of others wait; none where all have flushed as far."""
    session = session_of(chains)
    by_rank = {chain.rank: chain for chain in chains}
    reached = {rank: progress_of(by_rank.get(rank), session) for rank in session.members}
    return [rank for rank, step in reached.items() if step < max(reached.values())]


def check_ranks(rank: Any, world: Any) -> None:
    """LedgerError unless 0 <= rank < world."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        raise LedgerError(f"rank is {rank!r}; it must be an integer of at least 0")
    if isinstance(world, bool) or not isinstance(world, int) or world <= rank:
        raise LedgerError(f"rank is {rank} and world is {world!r}; world is the number of ranks that write, above every rank")


def wait_for_begin(run: Path, rank: int, world: int) -> None:
    """Wait until rank 0 has begun a run of so many ranks."""
    chains = _until(lambda: _begun(run), f"{run} was not begun by rank 0, which makes it")
    session = session_of(chains)
    if session.world != world:
        raise LedgerError(
            f"{run} is written by {session.world} ranks, and this is rank {rank} of {world}: another training has that folder. "
            "Choose another one, or go on with Ledger.resume(path, mark, rank=, world=) on all ranks"
        )


def _begun(run: Path) -> list[Chain]:
    chains = [read_chain(run, 0)] if chain_path(run, 0).exists() else []
    return [chain for chain in chains if chain.entries]


def wait_for_resume(run: Path, rank: int, world: int, mark: dict[str, Any] | None, step: int) -> None:
    """Wait until rank 0 has opened the session that goes on from a mark, and has cut the manifest of this rank."""

    def is_open() -> bool:
        session = session_of(_begun(run))
        return (session.world, session.step) == (world, step) and is_cut(run, rank, mark)

    _until(is_open, f"rank 0 did not go on with {run} from step {step} as one of {world} ranks")


def is_cut(run: Path, rank: int, mark: dict[str, Any] | None) -> bool:
    """Whether nothing that a rank wrote after a mark counts; also where it never wrote."""
    chain = read_chain(run, rank) if chain_path(run, rank).exists() else None
    if chain is None or not chain.entries:
        return True
    last, keep = chain.entries[-1], 0 if mark is None else position(run, chain, mark)
    return last.number == keep or (last.kind == "resume" and last.more["keep"] == keep)


def cut_others(run: Path, world: int, mark: dict[str, Any] | None, files: Files) -> None:
    """Cut the manifests of all ranks but 0 at a mark; LedgerError if one of them is being written."""
    for rank in (r for r in ranks_of(run) if r != 0):
        until = time.monotonic() + (LOCK_PATIENCE if rank < world else 0.0)
        while True:
            try:
                lock = lock_rank(run, rank)
            except LedgerError:
                if rank < world and is_cut(run, rank, mark):  # it came first, and has written nothing yet
                    break
                if time.monotonic() >= until:
                    raise
                time.sleep(0.05)
                continue
            try:
                resume_chain(run, rank, mark, files, world)
            finally:
                lock.release()
            break


def lost_ranks(chains: Sequence[Chain], damaged: Iterable[int]) -> list[int]:
    """Return the damaged ranks for which complete books of others would wait for ever."""
    waiting, session = waiting_ranks(chains), session_of(chains)
    return [rank for rank in sorted(set(damaged)) if rank in waiting and rank in session.members]


def _until(ready: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := ready()):
        if time.monotonic() > until:
            raise LedgerError(f"{what}, within {PATIENCE:.0f} s")
        time.sleep(0.05)
    return found

"""Positions in a ledger: what a mark that was saved with a checkpoint means, and what no longer counts after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.files import Files
from inrun.ledger.manifest import Chain, ManifestWriter, chain_path, ranks_of, read_chain

#: A mark that speaks of more is not ours.
MOST_RANKS = 1_000_000


def resume_chain(run: Path, rank: int, mark: dict[str, Any] | None, files: Files, world: int = 1) -> Chain | None:
    """Append a resume entry to the manifest of a rank; return its entries, None if it died before its first.

    ``world`` is how many ranks go on; an entry says so where there are or were several, and rank 0 then always writes one.
    """
    chain = read_chain(run, rank)
    if not chain.entries and not chain.damage:
        files.remove(chain_path(run, rank))
        return None
    if chain.damage:
        raise LedgerError(f"{run} is damaged: {chain.damage[0]}. `inrun repair` saves what is whole; then resume from a checkpoint")
    step = 0 if mark is None else mark["step"]
    keep = 0 if mark is None else position(run, chain, mark)
    before = [int(e.more.get("world", 1)) for e in chain.entries if e.kind in ("begin", "resume")][-1:]
    several = world > 1 or before != [1]
    if chain.entries[-1].number > keep or (several and (rank == 0 or before != [world])):
        ManifestWriter(run, rank, files, chain).append("resume", step, (), {"keep": keep} | ({"world": world} if several else {}))
    return read_chain(run, rank)


def check_mark(run: Path, about: dict[str, Any], mark: dict[str, Any] | None) -> int:
    """Return the step of a mark; LedgerError if it is none of this run, or no longer leads anywhere."""
    if mark is None:
        return 0
    kinds = {"run_id": str, "rank": int, "record": int, "hash": str, "step": int}
    if not isinstance(mark, dict) or any(not isinstance(mark.get(k), kind) for k, kind in kinds.items()):
        raise LedgerError(f"the mark is {str(mark)[:200]!r}; accepted is what ledger.mark() returned, or None to start over")
    if mark["run_id"] != about.get("run_id"):
        raise LedgerError(f"the mark belongs to run {mark['run_id']!r}, and {run} is run {about.get('run_id')!r}")
    position(run, read_chain(run, mark["rank"]), mark)
    _check_reached(run, mark)
    return int(mark["step"])


def _check_reached(run: Path, mark: dict[str, Any]) -> None:
    """Every rank that wrote when a mark was taken must have flushed up to it: else its last steps would be lost unseen."""
    world = mark.get("world", 1)
    if isinstance(world, bool) or not isinstance(world, int) or not 1 <= world <= MOST_RANKS:
        raise LedgerError(f"the mark speaks of {world!r} ranks; accepted is what ledger.mark() returned")
    lost = {r for rank in ranks_of(run) for e in read_chain(run, rank).entries for r in e.more.get("without", ())}
    for rank in range(world) if world > 1 else ():
        if rank == mark["rank"] or rank in lost:  # what repair gave up was said then
            continue
        chain = read_chain(run, rank) if chain_path(run, rank).exists() else Chain(rank, [], 0, [])
        position(run, chain, mark)
        reached = 0
        for entry in chain.entries:
            if entry.kind in ("begin", "resume") or (entry.kind == "flush" and entry.more["marked"] < mark["step"]):
                reached = entry.at_step if entry.at_step <= mark["step"] else reached
        if reached < mark["step"]:
            raise LedgerError(
                f"rank {rank} of {run} did not flush at step {mark['step']}, where the mark was taken: its books end at step "
                f"{reached}. Call ledger.mark() on every rank before a checkpoint is saved"
            )


def position(run: Path, chain: Chain, mark: dict[str, Any]) -> int:
    """Find the entry of a rank up to which things count at a mark."""
    if chain.rank == mark["rank"]:
        number = mark["record"]
        if not 0 <= number < len(chain.entries) or chain.entries[number].link != mark["hash"]:
            raise LedgerError(f"{run} does not have the entry the mark speaks of; is it another copy of the run, or cut short?")
        if any(r.kind == "resume" and r.number > number > r.more["keep"] for r in chain.entries):
            raise LedgerError(
                f"the mark at step {mark['step']} of {run} is on a branch that a resume from an older checkpoint has dropped; "
                "resume from that checkpoint or a newer one"
            )
        return int(number)
    # Another rank's mark: every rank flushes when marks are taken, so that some entry ends exactly there.
    step, found = mark["step"], 0
    straddles: int | None = None
    for entry in chain.entries:
        if entry.kind == "resume":
            found = min(found, entry.more["keep"])
            straddles = None if straddles is None or straddles > entry.more["keep"] else straddles
        elif entry.kind == "flush" and entry.more["marked"] < step:
            if entry.at_step <= step:
                found = entry.number
            elif entry.more["from_step"] < step:
                straddles = entry.number
    if straddles is not None:
        raise LedgerError(
            f"rank {chain.rank} of {run} did not flush at step {step}, where the mark was taken: entry {straddles} holds "
            "steps from before and after. Call ledger.mark() on every rank when a checkpoint is saved"
        )
    return found

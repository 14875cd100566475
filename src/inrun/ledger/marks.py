"""Positions in a ledger: what a mark that was saved with a checkpoint means, and what no longer counts after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inrun.errors import LedgerError
from inrun.files import Files
from inrun.ledger.manifest import Chain, ManifestWriter, chain_path, read_chain


def resume_chain(run: Path, rank: int, mark: dict[str, Any] | None, files: Files) -> Chain | None:
    """Append a resume entry to the manifest of a rank; return its entries, None if it died before its first."""
    chain = read_chain(run, rank)
    if not chain.entries and not chain.damage:
        files.remove(chain_path(run, rank))
        return None
    if chain.damage:
        raise LedgerError(f"{run} is damaged: {chain.damage[0]}. `inrun repair` saves what is whole; then resume from a checkpoint")
    step = 0 if mark is None else mark["step"]
    keep = 0 if mark is None else _position(run, chain, mark)
    if chain.entries[-1].number > keep:
        ManifestWriter(run, rank, files, chain).append("resume", step, (), {"keep": keep})
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
    _position(run, read_chain(run, mark["rank"]), mark)
    return int(mark["step"])


def _position(run: Path, chain: Chain, mark: dict[str, Any]) -> int:
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

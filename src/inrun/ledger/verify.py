"""Re-read everything against checksums and hash chain, and name what is damaged."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.about import read_about
from inrun.ledger.manifest import FOLDER, TABLES, Chain, Part, check_relative, part_names, place_of_part, read_inside, survey
from inrun.ledger.parts import has_columns, parse_part
from inrun.ledger.ranks import complete_steps, session_of, waiting_ranks
from inrun.ledger.saved import refuse_old_save


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong."""

    where: str
    what: str
    #: The steps that are affected, if they are known.
    first_step: int | None = None
    last_step: int | None = None
    #: The part of the manifest, if it is one.
    part: str | None = None
    rank: int | None = None

    def __str__(self) -> str:
        """Return one line."""
        steps = "" if self.first_step is None else f" (steps {self.first_step} to {self.last_step})"
        return f"{self.where}: {self.what}{steps}"


@dataclass
class Verification:
    """What was found; ``str()`` gives the page."""

    path: str
    parts: int = 0
    rows: int = 0
    nbytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: Harmless findings: files that no entry counts.
    notes: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "problems": [vars(p) for p in self.problems], "good": self.good}

    def __str__(self) -> str:
        """Return the page."""
        lines = [f"{self.path}: {self.parts} parts, {self.rows:,} rows, {self.nbytes:,} bytes read"]
        lines += [f"  damaged: {p}" for p in self.problems]
        lines += [f"  note: {n}" for n in self.notes]
        lines.append(
            "  all of it is whole" if self.good else f"  {len(self.problems)} problems; `inrun repair` sets damaged parts aside"
        )
        return "\n".join(lines)


def verify(path: str | Path) -> Verification:
    """Check a run; LedgerError only if there is none, or one without a manifest. A writer may be at work."""
    run = Path(path)
    refuse_old_save(run)
    for _ in range(20):
        found, chains = _verify(run)
        if found.good or _ends(survey(run)[0]) == _ends(chains):  # else a resume may have removed parts meanwhile
            break
    return found


def _ends(chains: list[Chain]) -> list[tuple[int, str]]:
    return [(chain.rank, chain.last_hash) for chain in chains]


def _verify(run: Path) -> tuple[Verification, list[Chain]]:
    found = Verification(str(run))
    found.problems += [Problem(n, "it is a link; the folders of a run are inside of it") for n in _links(run)]
    names = part_names(run)  # before the entries: a writer may be at work
    chains, missing = survey(run)
    found.problems += [Problem(FOLDER, what) for what in missing]
    if not any(chain.entries for chain in chains):
        if not (run / "run.json").exists() and not missing and not any(chain.damage for chain in chains):
            raise LedgerError(f"{run} holds no run: there is neither run.json nor a manifest")
        _check_readable(run, found)
        found.notes.append("there is no whole entry of any rank")
    for chain in chains:
        found.problems += [Problem(f"{FOLDER}/r{chain.rank}", d, rank=chain.rank) for d in chain.damage]
        _check_about(run, chain, found)
    counted: dict[str, int] = {}
    for chain in chains:
        for entry in chain.live():
            for part in entry.parts:
                if part.path in counted:
                    steps = (part.first_step, part.last_step)
                    found.problems.append(Problem(part.path, "two entries count it", *steps, part.path, chain.rank))
                    continue
                counted[part.path] = chain.rank
                _check_part(run, part, chain.rank, found)
    _look_around(run, chains, names, set(counted), found)
    late = waiting_ranks(chains)
    if late:
        who = ", ".join(map(str, late))
        found.notes.append(f"steps from {complete_steps(chains)} on do not count yet: rank {who} has not written them")
    lost = sorted(session_of(chains).without)
    if lost:
        found.notes.append(f"steps count without rank {', '.join(map(str, lost))}, whose books were lost")
    return found, chains


def _links(run: Path) -> list[str]:
    return [name for name in (FOLDER, *TABLES) if (run / name).is_symlink()]


def _check_about(run: Path, chain: Chain, found: Verification) -> None:
    """The first entry knows the run's id and the hash of ``run.json``."""
    if not chain.entries:  # a crash in the very first commit, or damage that is named already
        return
    begin = chain.entries[0]
    known = begin.more.get("run_json")
    for entry in chain.entries:
        known = entry.more.get("run_json", known) if entry.kind in ("begin", "about") else known
    if begin.kind != "begin":
        found.problems.append(Problem(f"{FOLDER}/r{chain.rank}", "its first entry is not a beginning", rank=chain.rank))
        return
    try:
        data = read_inside(run, run / "run.json")
        about = read_about(run)
    except (OSError, LedgerError) as error:
        _once(found, Problem("run.json", str(error)))
        return
    if hashlib.sha256(data).hexdigest() != known:
        _once(found, Problem("run.json", "it is not the file that was written when the run began"))
    if about.get("run_id") != begin.more.get("run_id"):
        found.problems.append(Problem(f"{FOLDER}/r{chain.rank}", f"it belongs to run {begin.more.get('run_id')}", rank=chain.rank))


def _check_readable(run: Path, found: Verification) -> None:
    try:
        read_about(run)
    except LedgerError as error:
        found.problems.append(Problem("run.json", str(error)))


def _once(found: Verification, problem: Problem) -> None:
    if problem not in found.problems:
        found.problems.append(problem)


def _check_part(run: Path, part: Part, rank: int, found: Verification) -> None:
    def bad(what: str) -> None:
        found.problems.append(Problem(part.path, what, part.first_step, part.last_step, part.path, rank))

    try:
        data = read_inside(run, run / check_relative(part.path))
    except LedgerError as error:
        bad(str(error))
        return
    except FileNotFoundError:
        bad("it is missing")
        return
    except OSError as error:
        bad(f"it cannot be read ({error})")
        return
    found.parts += 1
    found.nbytes += len(data)
    if len(data) != part.nbytes:
        bad(f"it has {len(data)} bytes instead of {part.nbytes}")
    elif hashlib.sha256(data).hexdigest() != part.sha256:
        bad("its content is not what was written")
    else:
        try:
            table = parse_part(data)
        except (OSError, ValueError, pa.ArrowException) as error:
            bad(f"it is not readable Parquet ({error})")
            return
        found.rows += table.num_rows
        if table.num_rows != part.rows or not has_columns(part.table, table.schema):
            bad("its rows or columns are not those in the manifest")


def _look_around(run: Path, chains: list[Chain], names: list[str], counted: set[str], found: Verification) -> None:
    """Say which files no entry counts; they are not read by anything."""
    dropped = set().union(*(c.dropped() for c in chains)) if chains else set()
    length = {c.rank: len(c.entries) for c in chains if c.entries}
    for name in names:
        place = place_of_part(name)
        if name in counted or (place is not None and place[0] not in length):
            continue
        if place is not None and place[1] > length[place[0]] and name not in dropped:
            what = f"it was written after entry {place[1] - 1} of rank {place[0]}, which is gone: the manifest was cut short"
            found.problems.append(Problem(name, what, rank=place[0]))
            continue
        why = "was dropped by a resume or repair" if name in dropped else "has no entry (an unfinished commit, or not ours)"
        found.notes.append(f"{name} {why}; it is not counted")

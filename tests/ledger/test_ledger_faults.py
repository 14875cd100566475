"""The ledger on disks that fail: power cuts between any two operations, the n-th operation failing, a failing sync."""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from faulty_files import FailingFiles, Moment, NoSync, PowerCutFiles, QuickFiles
from inrun.errors import LedgerError
from inrun.files import Files
from inrun.ledger import Ledger, StepRecord
from inrun.ledger.lock import lock_rank
from inrun.ledger.manifest import ManifestEntry, chain_path, head_line, head_path
from inrun.ledger.verify import verify
from long import LONG

LOWEST, HIGHEST = -(2**63), 2**63 - 1


def record(step: int, rank: int = 0, late_for: int | None = None, skipped: bool = False) -> StepRecord:
    """One step with two samples and two validation sets; or rows that speak of an earlier step; or a step not scored."""
    ids = np.array([LOWEST + step, HIGHEST - rank] if step % 2 else [step, 100 + rank], np.int64)
    values = {"easy": np.float32([step + 0.25, -rank - 0.5]), "hard": np.float32([0.125 * step, rank])}
    accounts = [
        {"step": step, "validation": v, "lr": 0.1, "n_samples": 2, "skipped": "overflow" if skipped else None} for v in values
    ]
    if late_for is not None:
        return StepRecord(late_for, ids, values, [])
    return StepRecord(step, ids, {} if skipped else values, accounts)


def rows_of(records) -> tuple[list, list]:
    """Return what the books must say of some records, in order."""
    rows = [
        (r.step, int(i), label, float(c))
        for r in records
        for label, values in r.contributions.items()
        for i, c in zip(r.sample_ids, values, strict=True)
    ]
    return rows, [(a["step"], a["validation"], a["skipped"]) for r in records for a in r.accounts]


def rows_of_ranks(by_rank: list[list[StepRecord]]) -> tuple[list, list]:
    """Return what the books of several ranks must say: steps that all of them have, rank by rank, and the accounts of rank 0."""
    if len(by_rank) == 1:
        return rows_of(by_rank[0])
    end = min(max([r.step + 1 for r in records], default=0) for records in by_rank)
    found = [rows_of([r for r in records if r.step < end]) for records in by_rank]
    return [row for rows, _ in found for row in rows], found[0][1]


def read(path: Path) -> tuple[list, list]:
    """Return what the books say."""
    reader = Ledger.open(path)
    rows = [tuple(r.values()) for r in reader.contributions().to_pylist()]
    return rows, [(a["step"], a["validation"], a["skipped"]) for a in reader.accounts().to_pylist()]


def die(ledger: Ledger) -> None:
    """End a writer as a killed process would: nothing is flushed, the system gives the lock back."""
    if ledger._lock is not None:
        ledger._lock._let_go()


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory if there is one: thousands of small folders are made and removed."""
    memory = Path("/dev/shm")  # noqa: S108
    folder = Path(tempfile.mkdtemp(prefix="inrun-faults-", dir=memory)) if os.access(memory, os.W_OK) else tmp_path
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


# A session that meets everything: its items are (rank, record).


def items_of(ranks: int, steps: int = 9) -> list[tuple[int, StepRecord]]:
    found = []
    for step in range(steps):
        for rank in range(ranks):
            found.append((rank, record(step, rank, skipped=step == 5)))
            if step in (4, 6):
                found.append((rank, record(step, rank, late_for=step - 2)))
    return found


@dataclass
class Promise:
    """What the books must show if power goes now: per rank, the records whose commit has returned or that are on their way."""

    begun: bool = False
    stable: dict[int, list[StepRecord]] = field(default_factory=dict)
    goal: dict[int, list[StepRecord]] = field(default_factory=dict)
    #: Marks that a checkpoint may hold, with the number of items done.
    marks: list[tuple[dict | None, int]] = field(default_factory=lambda: [(None, 0)])

    def copy(self) -> Promise:
        return Promise(
            self.begun, {k: list(v) for k, v in self.stable.items()}, {k: list(v) for k, v in self.goal.items()}, list(self.marks)
        )


class Session:
    """Writes the items with flushes, marks, kills and resumes; keeps the promise up to date at every operation."""

    def __init__(self, path: Path, files: Files, ranks: int, make=Ledger, rows: int = 6) -> None:
        self.path, self.files, self.ranks, self.make, self.rows = path, files, ranks, make, rows
        self.items = items_of(ranks)
        self.promise = Promise(stable={r: [] for r in range(ranks)}, goal={r: [] for r in range(ranks)})
        self.buffers: dict[int, list[StepRecord]] = {r: [] for r in range(ranks)}
        self.ledgers: list[Ledger] = []

    def run(self) -> None:
        self.begin()
        self.write(0, 2)
        self.mark(2)
        self.write(2, 5)
        self.flush()
        self.mark(5)
        self.write(5, 7)
        self.kill()
        self.resume(1)  # from the first mark: the second one is dropped
        self.write(2, 7)
        self.mark(7)
        self.kill()
        self.resume(2)  # nothing came after it
        self.write(7, 9)
        for ledger in self.ledgers:
            self._settling(ledger, ledger.close)

    def run_short(self) -> None:
        self.begin()
        self.write(0, 1)
        self.mark(1)
        self.write(1, 3)
        self.flush()
        self.kill()
        self.resume(1)
        self.write(1, 9)
        self._settling(self.ledgers[0], self.ledgers[0].close)

    def begin(self) -> None:
        for rank in range(self.ranks):
            self.ledgers.append(self.make(self.path, rank=rank, world=self.ranks, flush_every=self.rows, files=self.files))
            self.promise.begun = True

    def _settling(self, ledger: Ledger, action) -> None:
        """Run what may commit the buffer."""
        rank = ledger.rank
        self.promise.goal[rank] = self.promise.stable[rank] + self.buffers[rank]
        before = ledger._manifest.count
        action()
        if ledger._manifest.count > before:
            self.promise.stable[rank], self.buffers[rank] = self.promise.goal[rank], []

    def write(self, start: int, end: int) -> None:
        """Write the items of some steps."""
        for rank, item in self.items[len(items_of(self.ranks, start)) : len(items_of(self.ranks, end))]:
            self.buffers[rank].append(item)
            ledger = self.ledgers[rank]
            self._settling(ledger, lambda ledger=ledger, item=item: ledger.write(item))

    def flush(self) -> None:
        for ledger in self.ledgers:
            self._settling(ledger, ledger.flush)

    def mark(self, step: int) -> None:
        found, done = [], len(items_of(self.ranks, step))
        for ledger in self.ledgers:
            self._settling(ledger, lambda ledger=ledger: found.append(ledger.mark()))
        self.promise.marks.append((found[step % self.ranks], done))  # of any rank

    def kill(self) -> None:
        for ledger in self.ledgers:
            die(ledger)
        self.ledgers, self.buffers = [], {r: [] for r in range(self.ranks)}

    def resume(self, which: int) -> None:
        mark, done = self.promise.marks[which]
        self.promise.marks = self.promise.marks[: which + 1]
        self.promise.goal = {rank: [r for k, r in self.items[:done] if k == rank] for rank in range(self.ranks)}
        for rank in range(self.ranks):
            options = {"rank": rank, "world": self.ranks, "flush_every": self.rows, "files": self.files}
            self.ledgers.append(self.make.resume(self.path, mark, **options))
            if rank == 0:  # it goes back for all
                self.promise.stable = {r: list(records) for r, records in self.promise.goal.items()}


def violation(path: Path, promise: Promise, ranks: int, rng: random.Random, make=Ledger, files: Files | None = None) -> str | None:
    """Say what is wrong with a run's folder after a power cut: the checker."""
    items = items_of(ranks)
    try:
        begun = (path / "run.json").exists()
        if not begun and promise.begun:
            return "the run is gone"
        marks = promise.marks[-2:]
        if begun:
            found = read(path)
            choices = [[promise.stable[r], promise.goal[r]] for r in range(ranks)]
            allowed = [rows_of_ranks(list(chosen)) for chosen in itertools.product(*choices)]
            if found not in allowed:
                return "the books are not a prefix of what was written"
            check = verify(path)
            if not check.good:
                return f"verify takes a crash for damage: {check.problems[0]}"
        mark, done = rng.choice(marks)
        layer, rows = files or QuickFiles(), rng.choice([10, 10**6, 10**6])
        for rank in range(ranks):
            if begun:
                options = {"rank": rank, "world": ranks, "flush_every": rows, "files": layer}
                ledger = make.resume(path, mark, **options)
            else:
                ledger = make(path, rank=rank, world=ranks, flush_every=rows, files=layer)
                mark, done = None, 0
            for k, item in items[done:]:
                if k == rank:
                    ledger.write(item)
            ledger.close()
        if read(path) != rows_of_ranks([[r for n, r in items if n == k] for k in range(ranks)]):
            return "going on does not give the books of the unbroken session"
        check = verify(path) if rng.random() < 0.25 else None
        return None if check is None or check.good else f"damaged after going on: {check.problems[0]}"
    except LedgerError as error:
        return f"LedgerError: {error}"


def moments_of(tmp: Path, ranks: int, make=Ledger, layer=PowerCutFiles) -> list[tuple[Moment, Promise]]:
    """Run a session once; return the disk and what was promised after each operation."""
    root = tmp / "disk"
    root.mkdir()
    files = layer(root)
    session = Session(root / "a" / "run", files, ranks, make)
    found = [(files.moment(), session.promise.copy())]
    files.watch = lambda moment: found.append((moment, session.promise.copy()))
    session.run()
    found.append((files.moment("end"), session.promise.copy()))
    return found


def states(moments: list[tuple[Moment, Promise]], folder: Path, modes: list[str], seed: int):
    """Write possible disks for every moment, one at a time; yields (name, folder, promise, random numbers)."""
    for place, (moment, promise) in enumerate(moments):
        for mode in modes:
            rng = random.Random(f"{seed} {place} {mode}")
            draws_left = folder / "state"
            moment.worst(draws_left, mode, rng)
            yield f"{place}: {mode} after {moment.operation}", draws_left, promise, rng
            shutil.rmtree(draws_left)
            seed += 1


MODES = ["lost", "names", "random", "random"]


@pytest.mark.parametrize(
    ("ranks", "modes", "every"),
    [
        pytest.param(1, MODES, 4, id="one rank"),
        pytest.param(2, ["random"], 6, id="two ranks"),
        pytest.param(
            1, [*MODES, "kept"] + ["random"] * (40 if LONG else 10), 1, marks=pytest.mark.slow, id="one rank, more states"
        ),
        pytest.param(
            2, [*MODES, "kept"] + ["random"] * (20 if LONG else 3), 1, marks=pytest.mark.slow, id="two ranks, more states"
        ),
    ],
)
def test_a_power_cut_at_any_moment_leaves_a_prefix(quick_path, ranks: int, modes: list[str], every: int) -> None:
    moments = moments_of(quick_path, ranks)[::every]
    count = 0
    for name, folder, promise, rng in states(moments, quick_path, modes, seed=len(modes)):
        wrong = violation(folder / "a" / "run", promise, ranks, rng)
        assert wrong is None, f"{name}: {wrong}"
        count += 1
    assert count == len(moments) * len(modes) >= (800 if ranks == 1 else 300) // every


@pytest.mark.parametrize("pairs", [50, pytest.param(2000 if LONG else 500, marks=pytest.mark.slow)])
def test_a_second_power_cut_while_going_on(quick_path, pairs: int) -> None:
    tmp_path = quick_path
    moments = moments_of(tmp_path, 1)
    rng = random.Random(7)
    tried = 0
    while tried < pairs:
        moment, promise = rng.choice(moments)
        first = tmp_path / "first"
        moment.worst(first, "random", rng)
        run = first / "a" / "run"
        if (run / "run.json").exists():
            later: list[tuple[Moment, Promise]] = []
            mark, done = promise.marks[-1]
            kept = [r for _, r in items_of(1)[:done]]
            here = next(s for s in (promise.stable[0], promise.goal[0]) if rows_of(s) == read(run))
            then = Promise(True, {0: here}, {0: kept}, [*promise.marks])
            files = PowerCutFiles(first)
            files.watch = lambda m, then=then, later=later: later.append((m, then.copy()))
            ledger = Ledger.resume(run, mark, files=files, flush_every=10**6)
            then.stable[0] = kept
            for _, item in items_of(1)[done : done + 3]:
                ledger.write(item)
            then.goal[0] = kept + [r for _, r in items_of(1)[done : done + 3]]
            ledger.flush()
            then.stable[0] = then.goal[0]
            die(ledger)
            for again, promised in rng.sample(later, min(3, len(later))):
                second = tmp_path / "second"
                again.worst(second, "random", rng)
                wrong = violation(second / "a" / "run", promised, 1, rng)
                assert wrong is None, f"{again.operation}: {wrong}"
                shutil.rmtree(second)
                tried += 1
        shutil.rmtree(first)


# Controls: writers that look reasonable and must fail the same checker.


class ManifestFirst(Ledger):
    """Records parts before they are there."""

    def _write_part(self, name, table):
        real, late = self._files, []
        self._files = type("Later", (), {"__getattr__": lambda _, op: lambda *args: late.append((op, args))})()
        part = super()._write_part(name, table)
        self._files = real
        self._late = [*getattr(self, "_late", []), *late]
        return part

    def _commit(self, kind, parts, more):
        super()._commit(kind, parts, more)
        for op, args in getattr(self, "_late", []):
            getattr(self._files, op)(*args)
        self._late = []


class InPlace(Ledger):
    """Rewrites its manifest in place."""

    def _commit(self, kind, parts, more):
        manifest = self._manifest
        made = ManifestEntry(manifest.count, kind, self.rank, self._at_step, manifest.last_hash, parts, more)
        path = chain_path(self.path, self.rank)
        before = path.read_bytes() if path.exists() else b""
        for file, data in ((path, before + made.line()), (head_path(self.path, self.rank), head_line(made.number, made.hash))):
            self._files.append(file, b"")
            self._files.truncate(file, 0)
            self._files.append(file, data)
            self._files.sync(file)
            self._files.sync_folder(file.parent)
        manifest.count, manifest.last_hash = manifest.count + 1, made.hash


@pytest.mark.parametrize(
    ("make", "layer"),
    [(Ledger, NoSync), (ManifestFirst, PowerCutFiles), (InPlace, PowerCutFiles)],
    ids=["no sync", "first", "place"],
)
def test_control_naive_writers_fail_the_same_checker(quick_path, make, layer) -> None:
    tmp_path = quick_path
    wrong = 0
    for _, folder, promise, rng in states(moments_of(tmp_path, 1, make, layer)[40:], tmp_path, MODES, seed=1):
        wrong += violation(folder / "a" / "run", promise, 1, rng) is not None
        if wrong >= 10:
            return
    raise AssertionError(f"the checker saw only {wrong} faults of a writer that has them")


# The n-th operation fails.


@pytest.mark.parametrize(
    ("code", "for_good", "whole"),
    [
        *[("ENOSPC", False, False), ("EIO", True, False)],
        *[pytest.param(code, good, False, marks=pytest.mark.slow) for code, good in (("EFBIG", False), ("EACCES", True))],
        *[pytest.param(code, good, True, marks=pytest.mark.slow) for code in ("ENOSPC", "EIO") for good in (False, True)],
    ],
)
def test_the_nth_operation_fails(quick_path, code: str, for_good: bool, whole: bool) -> None:
    for n in itertools.count(1):
        path = quick_path / str(n) / "run"
        path.parent.mkdir()
        session = Session(path, FailingFiles(n, getattr(errno, code), for_good=for_good), 1, rows=6 if whole else 10**6)
        try:
            session.run() if whole else session.run_short()
        except LedgerError as error:
            assert "injected" in str(error)
            assert str(path) in str(error)
        else:
            assert n > (150 if whole else 60)
            return
        for ledger in session.ledgers:  # stopped: it says so, and changes nothing any more
            before = read(path)
            for action in (ledger.write, ledger.flush, ledger.mark):
                with pytest.raises(LedgerError, match="no more writes.*in doubt"):
                    action(*[record(50)] * (action == ledger.write))
            assert read(path) == before
            ledger.close()
        wrong = violation(path, session.promise, 1, random.Random(n))
        assert wrong is None, f"operation {n} ({session.files.failed[0]}): {wrong}"
        shutil.rmtree(path.parent)


def test_every_kind_of_operation_is_seen_to_fail(quick_path) -> None:
    """The operations that failed above are all there are: none is swallowed."""
    seen = set()
    for n in range(1, 300):
        files = FailingFiles(n, errno.EIO)
        session = Session(quick_path / str(n), files, 1, rows=10**6)
        try:
            session.run_short()
        except LedgerError:
            seen |= set(files.failed)
        else:
            assert not files.failed
            break
        finally:
            session.kill()
    assert seen == {"create", "append", "sync", "sync_folder", "rename", "remove", "make_folder"}


@pytest.mark.parametrize("operation", ["sync", "sync_folder"])
def test_a_failed_sync_stops_the_writer(tmp_path, operation: str) -> None:
    ledger = Ledger(tmp_path / "run", flush_every=10**6, files=QuickFiles())
    ledger.write(record(0))
    mark = ledger.mark()
    ledger.write(record(1))
    ledger._files = ledger._manifest.files = FailingFiles(1, errno.EIO, only=operation)
    with pytest.raises(LedgerError, match=r"Input/output|injected") as caught:
        ledger.flush()
    assert "in doubt" in str(caught.value) and "resume" in str(caught.value)
    for action in (ledger.flush, ledger.mark, lambda: ledger.write(record(2))):  # the disk works again: it must not try
        with pytest.raises(LedgerError, match="in doubt"):
            action()
    assert ledger._files.count == 1
    ledger.close()
    assert verify(tmp_path / "run").good
    with Ledger.resume(tmp_path / "run", mark, files=QuickFiles()) as again:
        again.write(record(1))
    assert read(tmp_path / "run") == rows_of([record(0), record(1)])


def test_a_failing_close_gives_the_lock_back(tmp_path) -> None:
    ledger = Ledger(tmp_path / "run", files=QuickFiles())
    ledger.write(record(0))
    ledger._files = FailingFiles(1, errno.ENOSPC)
    with pytest.raises(LedgerError, match="injected"):
        ledger.close()
    lock_rank(tmp_path / "run", 0).release()


@pytest.mark.parametrize("call", ["ftruncate", "pwrite", "flock"])
def test_a_lock_that_cannot_be_taken(tmp_path, monkeypatch, call: str) -> None:
    Ledger(tmp_path / "run").close()

    def fail(*_args, **_more):
        raise OSError(errno.ENOLCK, "injected")

    with monkeypatch.context() as patch:
        patch.setattr("inrun.files.fcntl.flock" if call == "flock" else f"inrun.files.os.{call}", fail)
        with pytest.raises(LedgerError, match="cannot be taken.*injected"):
            Ledger.resume(tmp_path / "run", None, files=QuickFiles())
    Ledger.resume(tmp_path / "run", None).close()


def test_append_and_manifest_grow_by_what_is_added(tmp_path) -> None:
    """A commit costs the same after many: nothing is read or rewritten."""

    class Counting(QuickFiles):
        sizes: list[int] = []  # noqa: RUF012

        def append(self, path, data):
            self.sizes.append(len(data))
            super().append(path, data)

    ledger = Ledger(tmp_path / "run", flush_every=1, files=Counting())
    for step in range(200):
        ledger.write(record(step))
    ledger.close()
    assert max(Counting.sizes[-20:]) < 1.2 * max(Counting.sizes[1:20])
    assert read(tmp_path / "run") == rows_of([record(s) for s in range(200)])


# The real thing.


def in_child(code: str, *args: object, **options) -> subprocess.CompletedProcess:
    start = "import sys, numpy as np, logging\nfrom inrun.ledger import Ledger, StepRecord\nfrom inrun.errors import LedgerError\n"
    command = [sys.executable, "-c", start + textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_a_real_size_limit(tmp_path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    code = """
    ledger = Ledger(sys.argv[1], flush_every=10**9)
    rng = np.random.default_rng(0)
    ids = np.arange(64)
    for step in range(10**6):
        n = 2 ** min(step, 14)
        ids = rng.integers(-2**63, 2**63 - 1, n)
        ledger.write(StepRecord(step, ids, {"v": np.ones(n, np.float32)}, [{"step": step, "validation": "v"}]))
        try:
            ledger.flush()
        except LedgerError as error:
            print(step, error)
            break
    try:
        ledger.flush()
    except LedgerError as error:
        print(error)
    """
    done = in_child(code, tmp_path / "run", preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "File too large" in first and "in doubt" in first
    assert "takes no more writes" in second
    steps = int(first.split()[0])
    assert verify(tmp_path / "run").good
    assert Ledger.open(tmp_path / "run").accounts()["step"].to_pylist() == list(range(steps))


def test_a_real_full_disk(tmp_path) -> None:
    """/dev/full fails every write with ENOSPC."""

    class Full(QuickFiles):
        def create(self, path, data):
            with open("/dev/full", "wb") as f:
                f.write(data)

    ledger = Ledger(tmp_path / "run", files=QuickFiles())
    ledger.write(record(0))
    ledger._files = Full()
    with pytest.raises(LedgerError, match="No space left on device"):
        ledger.flush()
    ledger.close()
    assert read(tmp_path / "run") == ([], [])


def heed_permissions() -> None:
    """Permissions hold for root as well: drop the capabilities that overrule them."""
    if os.getuid() == 0:
        for capability in (1, 2, 3):
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_a_read_only_folder(tmp_path) -> None:
    """Reading and checking need no writing; writing is refused with a message."""
    with Ledger(tmp_path / "run", files=QuickFiles()) as ledger:
        ledger.write(record(0))
        mark = ledger.mark()
    for path in [*(tmp_path / "run").rglob("*"), tmp_path / "run"]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = """
    import json
    from inrun.ledger.verify import verify
    from inrun.ledger.repair import repair
    path, mark = sys.argv[1], json.loads(sys.argv[2])
    assert Ledger.open(path).contributions().num_rows == 4
    assert verify(path).good
    for action in (lambda: Ledger.resume(path, mark), lambda: Ledger(path + "/manifest/new")):
        try:
            action()
        except LedgerError as error:
            print(error)
    """
    done = in_child(code, tmp_path / "run", json.dumps(mark), preexec_fn=heed_permissions)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2, done.stdout
    assert done.stdout.count("Permission denied") == 2


def test_manifest_writer_mends_a_head_that_lags(tmp_path) -> None:
    """Killed between a record and its head: the next writer brings the head up to date before it adds anything."""
    ledger = Ledger(tmp_path / "run", files=QuickFiles())
    ledger.write(record(0))
    old = head_path(ledger.path, 0).read_bytes()
    mark = ledger.mark()
    new = head_path(ledger.path, 0).read_bytes()
    die(ledger)
    head_path(ledger.path, 0).write_bytes(old)
    assert verify(ledger.path).good
    die(Ledger.resume(ledger.path, mark, files=QuickFiles()))
    assert head_path(ledger.path, 0).read_bytes() == new

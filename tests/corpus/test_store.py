"""The token store: made once per content, whole or absent, the same bytes however often its making was broken off."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from test_documents import write

from inrun.corpus import build, fingerprints
from inrun.corpus.build import Builder, SeenIds
from inrun.corpus.documents import Fields
from inrun.corpus.store import TokenStore, build_store
from inrun.corpus.tokenizers import ByteTokenizer
from inrun.errors import ConfigurationError, DataError
from long import LONG

BYTES = ByteTokenizer()


class WideTokenizer(ByteTokenizer):
    """Bytes, shifted beyond 16 bits."""

    vocab_size = 100_257
    end = 100_256
    fingerprint = "wide"

    def encode_batch(self, texts):
        return [ids.astype(np.uint32) + 100_000 for ids in super().encode_batch(texts)]


def corpus(folder: Path, count: int = 400) -> list[Path]:
    """Write files of three formats, with bad rows at the beginning, in the middle and at the very end."""
    rng = random.Random(3)
    rows = [{"id": f"d{i % 250}", "text": "word " * rng.randrange(60), "domain": f"dom{i % 3}"} for i in range(count)]
    first = write(folder / "a.jsonl", rows)
    first.write_bytes(b"bad\n" + first.read_bytes() + b"{}\n")
    last = write(folder / "c.jsonl.gz", [*rows[:50], {"text": ""}, {"text": 3}])
    return [first, write(folder / "b.parquet", rows[: count // 2]), last]


def digest(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.fixture
def often(monkeypatch) -> None:
    """Make batches and commits small."""
    monkeypatch.setattr(build, "BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(build, "COMMIT_DOCUMENTS", 20)


@pytest.mark.parametrize(("tokenizer", "dtype"), [(BYTES, np.uint16), (WideTokenizer(), np.uint32)])
def test_what_is_stored(tmp_path, tokenizer, dtype) -> None:
    rows = [
        {"id": "a", "text": "one é", "domain": "x", "split": "train", "owner": "o"},
        {"id": "b", "text": "T" * 500, "domain": "y", "split": "val"},
        {"id": "c", "text": "three"},
        {"text": ""},
    ]
    store = build_store(write(tmp_path / "a.jsonl", rows), Fields(), tokenizer, tmp_path / "cache")
    assert store.tokens.dtype == dtype
    assert store.count == 3
    for number, row in enumerate(rows[:3]):
        ids = store.tokens[store.offsets[number] : store.offsets[number + 1]]
        assert ids[-1] == tokenizer.end
        assert ids[:-1].tolist() == tokenizer.encode_batch([row["text"]])[0].tolist()
    table = store.documents([2, 0, 0, 1])
    assert table["id"].to_pylist() == ["c", "a", "a", "b"]
    assert table["where"].to_pylist() == ["a.jsonl:3", "a.jsonl:1", "a.jsonl:1", "a.jsonl:2"]
    assert table["preview"].to_pylist() == ["three", "one é", "one é", "T" * 300]
    assert table["tokens"].to_pylist() == [6, 7, 7, 501]
    assert store.documents([], ["id"]).num_rows == 0
    codes, values = store.column("domain")
    assert (codes.tolist(), values, codes.dtype) == ([0, 1, -1], ["x", "y"], np.int32)
    assert store.column("source") == (pytest.approx([-1, -1, -1]), [])
    assert store.column("owner")[0].tolist() == [0, -1, -1]
    assert store.problems.counts == {"empty text": 1}
    about = json.loads((store.folder / "meta.json").read_bytes())
    path = tmp_path / "a.jsonl"
    expected = {"name": "a.jsonl", "size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    assert about["files"] == [expected]
    assert sorted(p.name for p in store.folder.iterdir()) == [
        "documents.parquet",
        "meta.json",
        "offsets.bin",
        "tokenizer",
        "tokens.bin",
    ]
    assert store.tokens.flags.writeable is False
    with pytest.raises(ConfigurationError, match="domain, source, owner, split"):
        store.column("color")
    with pytest.raises(DataError, match="0 to 2"):
        store.documents([3])


def test_many_parts_are_one_table(tmp_path, often) -> None:
    store = build_store(corpus(tmp_path), Fields(), BYTES, tmp_path / "cache")
    table = pq.read_table(store.folder / "documents.parquet")
    assert pq.ParquetFile(store.folder / "documents.parquet").num_row_groups > 10
    rng = np.random.default_rng(0)
    some = rng.integers(0, store.count, 100)
    assert store.documents(some).equals(table.take(some))
    codes, values = store.column("domain")
    assert [values[c] for c in codes] == table["domain"].to_pylist()
    assert np.diff(store.offsets).tolist() == table["tokens"].to_pylist()


def test_a_second_build_reads_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fingerprints, "REST", -1)
    paths = corpus(tmp_path)
    first = build_store(paths, Fields(), BYTES, tmp_path / "cache")
    before = {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")}

    def forbidden(*args):
        raise AssertionError("it was read again")

    monkeypatch.setattr(Builder, "run", forbidden)
    monkeypatch.setattr(hashlib, "file_digest", forbidden)
    again = build_store(paths, Fields(), BYTES, tmp_path / "cache")
    assert again.folder == first.folder
    assert again.problems.as_dict() == first.problems.as_dict()
    assert {p: p.stat().st_mtime_ns for p in first.folder.rglob("*")} == before
    paths[0].write_bytes(paths[0].read_bytes())  # the control: the same content, but it must be looked at
    with pytest.raises(AssertionError, match="read again"):
        build_store(paths, Fields(), BYTES, tmp_path / "cache")


def test_a_file_just_written_is_not_trusted_by_its_times(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}])
    first = build_store(path, Fields(), BYTES, tmp_path / "cache")
    times = path.stat()
    write(path, [{"text": "two"}])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert build_store(path, Fields(), BYTES, tmp_path / "cache").fingerprint != first.fingerprint
    assert not (tmp_path / "cache" / "hashes.json").exists()


def test_the_fingerprint_is_of_all_that_matters(tmp_path) -> None:
    rows = [{"text": "one", "body": "two", "id": "a"}]
    path = write(tmp_path / "data" / "a.jsonl", rows)

    def fingerprint(path=path, fields=Fields(), tokenizer=BYTES) -> str:  # noqa: B008 - frozen
        return build_store(path, fields, tokenizer, tmp_path / "cache").fingerprint

    first = fingerprint()
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    assert fingerprint(tmp_path / "moved" / "a.jsonl") == first
    others = [
        fingerprint(fields=Fields(text="body")),
        fingerprint(fields=Fields(id=None)),
        fingerprint(tokenizer=WideTokenizer()),
        fingerprint(write(tmp_path / "data" / "b.jsonl", rows)),
        fingerprint(write(path, [{"text": "One", "body": "two", "id": "a"}])),
    ]
    assert len({first, *others}) == 6
    (tmp_path / "cache" / "hashes.json").write_text("damaged")
    assert fingerprint() == others[-1]


def test_duplicate_and_hostile_ids_stay_apart(tmp_path, often) -> None:
    names = [
        "a",
        "a",
        "a#2",
        "a",
        "",
        None,
        "a\0b",
        "\u202e",
        "../../etc/passwd",
        "x" * 10_000,
        "' OR 1=1 --",
        5,
        "5",
        "<script>",
    ] * 3
    store = build_store(write(tmp_path / "a.jsonl", [{"id": n, "text": "t"} for n in names]), Fields(), BYTES, tmp_path / "cache")
    found = store.documents(np.arange(store.count))["id"].to_pylist()
    assert len(set(found)) == len(names)
    assert found[:5] == ["a", "a#2", "a#2#2", "a#3", "a.jsonl:5"]
    assert found[6:11] == names[6:11]
    changed = sum(f != str(n) for f, n in zip(found, names, strict=True) if n not in ("", None))
    assert store.problems.counts == {"duplicate id": changed}
    assert "kept under a new id" in store.problems.lines()[0]


def test_ids_are_remembered_in_little_memory() -> None:
    seen = SeenIds()
    assert [seen.unique("same") for _ in range(70_000)][-1] == "same#70000"
    assert all(seen.unique(f"n{i}") == f"n{i}" for i in range(150_000))
    assert len(seen._new) < 70_000
    assert [seen.unique(n) for n in ("n0", "n149999", "same#5")] == ["n0#2", "n149999#2", "same#5#2"]


def test_nothing_usable_is_an_error_that_says_why(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", [{"content": "a"}, {"content": "b"}])
    for _ in range(2):
        with pytest.raises(DataError, match=r"2 no text field.*a.jsonl:1: there is no field 'text'; known fields are 'content'"):
            build_store(path, Fields(), BYTES, tmp_path / "cache")
    (tmp_path / "b.jsonl").write_bytes(b"")
    with pytest.raises(DataError, match=r"the data \(.*b\.jsonl\) holds no document that can be used:\nit is empty"):
        build_store(tmp_path / "b.jsonl", Fields(), BYTES, tmp_path / "cache")


def test_progress_is_told(tmp_path, often) -> None:
    told: list[tuple[int, int, int]] = []
    paths = corpus(tmp_path)
    store = build_store(paths, Fields(), BYTES, tmp_path / "cache", lambda *a: told.append(a))
    assert [t[0] for t in told] == sorted(t[0] for t in told)
    assert {t[1] for t in told} == {sum(p.stat().st_size for p in paths)}
    assert told[-1][2] == store.count
    assert told[-1][0] > 0.9 * told[-1][1]


def test_stores_and_runs_below_the_data_are_no_data(tmp_path) -> None:
    write(tmp_path / "data" / "a.jsonl", [{"text": "one"}])
    (tmp_path / "data" / "run" / "manifest").mkdir(parents=True)
    (tmp_path / "data" / "run" / "run.json").write_text("{}")
    write(tmp_path / "data" / "run" / "samples" / "r0.parquet", [{"text": "no"}])
    first = build_store(tmp_path / "data", Fields(), BYTES, tmp_path / "data" / "cache")
    assert first.count == 1
    assert build_store(tmp_path / "data", Fields(), BYTES, tmp_path / "data" / "cache").fingerprint == first.fingerprint


def test_damaged_progress_means_a_new_beginning(tmp_path, often, monkeypatch) -> None:
    paths = corpus(tmp_path, 60)
    whole = build_store(paths, Fields(), BYTES, tmp_path / "unbroken")
    aside = tmp_path / "cache" / (whole.fingerprint + ".building")
    aside.mkdir(parents=True)
    for text in ("", "{}", "[]", '{"place": [1], "problems": {}}', '{"place": "abcd", "problems": {"x": 1}}'):
        (aside / "progress.json").write_text(text)
        (aside / "tokens.bin").write_bytes(b"left over")
        store = build_store(paths, Fields(), BYTES, tmp_path / "cache")
        assert digest(store.folder) == digest(whole.folder)
        store.folder.rename(aside)
        (aside / "meta.json").unlink()


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("call", ["fsync", "rename", "create", "sync", "remove", "write_table"])
def test_broken_off_at_every_step(tmp_path, often, monkeypatch, call: str) -> None:
    """Die at the first, second ... call of an operation, go on each time: the same bytes in the end."""
    paths = corpus(tmp_path, 60)
    whole = build_store(paths, Fields(), BYTES, tmp_path / "unbroken")
    target = {"fsync": os, "write_table": pq}.get(call, build.Files)
    real, left = getattr(target, call), [0]

    def dies(*args, **options):
        left[0] -= 1
        if left[0] == 0:
            raise Killed
        return real(*args, **options)

    monkeypatch.setattr(target, call, dies)
    deaths = 0
    for patience in range(1, 200):
        left[0] = patience % 9 + 1 if call in ("fsync", "sync") else patience % 4 + 1
        try:
            store = build_store(paths, Fields(), BYTES, tmp_path / "cache")
            if deaths >= 5:
                break
            shutil.rmtree(store.folder)
        except Killed:
            deaths += 1
            assert not (tmp_path / "cache" / whole.fingerprint).exists() or call in ("fsync", "sync")
    assert deaths >= 5
    monkeypatch.setattr(target, call, real)
    store = build_store(paths, Fields(), BYTES, tmp_path / "cache")
    assert digest(store.folder) == digest(whole.folder)


def build_in_fork(paths, cache: Path, after: float | None) -> bool:
    """Build in a forked process, killed after so many seconds; return whether it was killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            build_store(paths, Fields(), BYTES, cache)
            status = 0
        finally:
            os._exit(status)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("kills", [8, pytest.param(200 if LONG else 40, marks=pytest.mark.slow)])
def test_killed_at_any_moment_the_bytes_are_the_same(tmp_path, often, kills: int) -> None:
    paths = corpus(tmp_path, 800)
    began = time.monotonic()
    build_in_fork(paths, tmp_path / "unbroken", None)
    took = time.monotonic() - began
    whole = build_store(paths, Fields(), BYTES, tmp_path / "unbroken")
    rng, count, reached = random.Random(kills), 0, set()
    final = tmp_path / "cache" / whole.fingerprint
    while count < kills or (len(reached) < 4 and count < 10 * kills):  # under load kills may fall into one place
        count += build_in_fork(paths, tmp_path / "cache", rng.uniform(0, 0.5) * took)
        progress = final.with_name(final.name + ".building") / "progress.json"
        if progress.exists():
            reached.add(json.loads(progress.read_bytes())["documents"])
        if final.exists():
            assert digest(final) == digest(whole.folder)
            shutil.rmtree(final)
    build_in_fork(paths, tmp_path / "cache", None)
    assert digest(final) == digest(whole.folder)
    assert len(reached) >= 4, "the kills fell into the same place: nothing was tested"


def test_control_without_cutting_back_the_bytes_differ(tmp_path, often, monkeypatch) -> None:
    paths = corpus(tmp_path)
    whole = build_store(paths, Fields(), BYTES, tmp_path / "unbroken")
    real, calls = Builder._commit, []

    def dies(self):
        calls.append(None)
        if len(calls) == 4:
            for file in self._out:
                file.flush()
            raise Killed
        real(self)

    monkeypatch.setattr(Builder, "_commit", dies)
    with pytest.raises(Killed):
        build_store(paths, Fields(), BYTES, tmp_path / "cache")
    shutil.copytree(tmp_path / "cache", tmp_path / "naive")
    assert digest(build_store(paths, Fields(), BYTES, tmp_path / "cache").folder) == digest(whole.folder)
    monkeypatch.setattr(build.os, "truncate", lambda *a: None)
    with pytest.raises(DataError, match="bytes, and should have"):
        build_store(paths, Fields(), BYTES, tmp_path / "naive")


def test_several_processes_at_once_build_one_store(tmp_path, often) -> None:
    paths = corpus(tmp_path, 400)
    whole = build_store(paths, Fields(), BYTES, tmp_path / "unbroken")
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                build_store(paths, Fields(), BYTES, tmp_path / "cache")
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert digest(tmp_path / "cache" / whole.fingerprint) == digest(whole.folder)
    assert sum(p.is_dir() for p in (tmp_path / "cache").iterdir()) == 1


def test_a_file_that_changes_under_the_build_is_refused(tmp_path, often, monkeypatch) -> None:
    paths = corpus(tmp_path)
    real = Builder._encode

    def changes(self):
        real(self)
        if self.documents > 50 and not (tmp_path / "changed").exists():
            with open(paths[0], "ab") as f:
                f.write(b'{"text": "late"}\n')
            (tmp_path / "changed").touch()

    monkeypatch.setattr(Builder, "_encode", changes)
    with pytest.raises(DataError, match="was changed while it was read"):
        build_store(paths, Fields(), BYTES, tmp_path / "cache")
    store = build_store(paths, Fields(), BYTES, tmp_path / "cache")
    (tmp_path / "changed").unlink()
    monkeypatch.undo()
    assert (
        digest(build_store(paths, Fields(), BYTES, tmp_path / "other").folder)["tokens.bin"] == digest(store.folder)["tokens.bin"]
    )


def damage_of(store: TokenStore, name: str, change) -> None:
    path = store.folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens.bin", lambda d: d[:-2]),
        ("tokens.bin", lambda d: d + b"\0\0"),
        ("tokens.bin", lambda d: b""),
        ("offsets.bin", lambda d: d[:-8]),
        ("offsets.bin", lambda d: d[:-8] + b"\0" * 8),
        ("offsets.bin", lambda d: d[:80] + b"\xff" * 8 + d[88:]),
        ("meta.json", lambda d: d[:-9]),
        ("meta.json", lambda d: b"[]"),
        ("meta.json", lambda d: b"{}"),
        ("meta.json", lambda d: b"[" * 100_000),
        ("meta.json", lambda d: d.replace(b'"schema": 1', b'"schema": 99')),
        ("meta.json", lambda d: d.replace(b"uint16", b"object")),
        ("documents.parquet", lambda d: d[:-9]),
        ("documents.parquet", lambda d: d[:200] + b"\xff" * 50 + d[250:]),
    ],
)
def test_damage_is_said(tmp_path, name: str, change) -> None:
    store = build_store(corpus(tmp_path), Fields(), BYTES, tmp_path / "cache")
    damage_of(store, name, change)
    with pytest.raises(DataError):
        TokenStore.open(store.folder).documents(np.arange(store.count))


def test_a_missing_store_is_said(tmp_path) -> None:
    with pytest.raises(DataError, match="holds no token store"):
        TokenStore.open(tmp_path)


def test_a_cache_that_cannot_be_written_is_said(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        build_store(corpus(tmp_path), Fields(), BYTES, tmp_path / "file" / "cache")


MEMORY = """
import itertools, json, random, sys, time
from pathlib import Path
import numpy as np
from inrun.corpus.documents import Fields
from inrun.corpus.tokenizers import ByteTokenizer
from inrun.corpus.store import build_store
from inrun.corpus.chunks import Chunks
folder, size = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(0)
words = ["".join(rng.choices("abcdefghij", k=rng.randrange(1, 9))) for _ in range(5000)]
block = "".join(json.dumps({"text": " ".join(rng.choices(words, k=400)), "domain": "d"}) + "\\n" for _ in range(500))
with open(folder / "big.jsonl", "w") as f:
    for _ in range(size // len(block) + 1):
        f.write(block)
def status(name):  # ru_maxrss would be that of the parent: it survives exec
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(name))
before, began = status("VmRSS"), time.perf_counter()
open("/proc/self/clear_refs", "w").write("5")
peak = lambda: status("VmHWM")
store = build_store(folder / "big.jsonl", Fields(), ByteTokenizer(), folder / "cache")
built, took = peak(), time.perf_counter() - began
chunks = Chunks(store, 256)
order = np.random.default_rng(0).permutation(chunks.ids)
began = time.perf_counter()
for step in range(3000):
    chunks.batch(order[16 * step % (len(order) - 16) :][:16])
batches, batched = time.perf_counter() - began, peak()
for table in itertools.islice(chunks.sample_tables(20_000), 4):
    pass
found = {"before": before, "built": built, "batched": batched, "used": peak()}
print(json.dumps({**found, "seconds": took, "batch_ms": batches / 3, "chunks": len(chunks)}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured as Linux counts it")
@pytest.mark.parametrize(("size", "limit"), [(100_000_000, 250), pytest.param(1_000_000_000, 350, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_corpus(tmp_path, size: int, limit: int) -> None:
    """Limit in MB beyond the interpreter with its imports."""
    out = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path), str(size)], check=True, capture_output=True, text=True)
    found = json.loads(out.stdout)
    print(found)
    assert found["used"] - found["before"] < limit, found
    shutil.rmtree(tmp_path)

"""Damage to books on disk: every kind is found by verify or is harmless; repair keeps the rest; merge counts nothing twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from faulty_files import QuickFiles
from inrun.errors import LedgerError
from inrun.ledger import Ledger, StepRecord
from inrun.ledger.manifest import ManifestEntry, Part, chain_path, check_relative, head_line, head_path, parse_entry, read_chain
from inrun.ledger.merge import merge
from inrun.ledger.repair import repair
from inrun.ledger.verify import verify
from long import LONG

STEPS = 12
TABLES = ("contributions", "accounts")


def step(number: int, scale: float = 1.0, ids=(1, 2, 3)) -> StepRecord:
    values = np.float32([scale * (number + 1), -0.5 * number, number / 3])
    account = {"step": number, "validation": "v", "data": float(values.sum()), "lr": 0.1, "n_samples": 3}
    return StepRecord(number, np.array(ids, np.int64) + number, {"v": values}, [account])


def write_books(path: Path, about: dict | None = None, scale: float = 1.0) -> dict:
    """Two parts per step and one step per record, with a kill and a resume on the way; returns the last mark."""
    ledger = Ledger(path, flush_every=1, files=QuickFiles(), about={"method": "first", **(about or {})})
    for n in range(5):
        ledger.write(step(n, scale))
    mark = ledger.mark()
    for n in range(5, 7):
        ledger.write(step(n, 7.0))
    ledger._lock._let_go()
    with Ledger.resume(path, mark, flush_every=1, files=QuickFiles()) as ledger:
        for n in range(5, STEPS):
            ledger.write(step(n, scale))
        return ledger.mark()


def read(path: Path) -> tuple[list, list]:
    reader = Ledger.open(path)
    return [tuple(r.values()) for r in reader.contributions().to_pylist()], [
        tuple(r.values()) for r in reader.accounts().to_pylist()
    ]


def files_of(run: Path) -> list[Path]:
    return sorted(p for p in run.rglob("*") if p.is_file() and not p.name.startswith("lock-"))


def is_silent(run: Path, expected) -> str | None:
    """Say how a change went unseen: verify finds nothing, and the books read otherwise."""
    try:
        if not verify(run).good:
            return None
        return None if read(run) == expected else "verify finds nothing, and the books are different"
    except LedgerError as error:
        return None if "holds no run" in str(error) else f"verify finds nothing, and reading says {error}"


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> tuple[Path, dict, tuple]:
    run = tmp_path_factory.mktemp("books") / "run"
    mark = write_books(run)
    assert verify(run).good
    assert len(list(run.rglob("*.parquet"))) == 2 * STEPS
    return run, mark, read(run)


@pytest.fixture
def copy(books, tmp_path) -> Path:
    shutil.copytree(books[0], tmp_path / "run")
    return tmp_path / "run"


def damaged_bits(run: Path, rng: random.Random, count: int):
    """Flip one bit at a time; half of the places are drawn over bytes, half over files."""
    files = files_of(run)
    weights = [f.stat().st_size for f in files]
    for k in range(count):
        file = rng.choices(files, weights)[0] if k % 2 else rng.choice([f for f in files if k % 4 or f.suffix != ".parquet"])
        data = bytearray(file.read_bytes())
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        yield file, place, bytes(data)


@pytest.mark.parametrize("count", [200, pytest.param(20_000 if LONG else 3000, marks=pytest.mark.slow)])
def test_no_bit_flip_goes_unseen(books, count: int) -> None:
    run, _, expected = books
    seen = dict.fromkeys(["parts", "other"], 0)
    for k, (file, place, data) in enumerate(damaged_bits(run, random.Random(count), count)):
        whole = file.read_bytes()
        file.write_bytes(data)
        try:
            found = verify(run)
            assert not found.good, f"bit flip at byte {place} of {file} is not seen"
            seen["parts" if file.suffix == ".parquet" else "other"] += 1
            if file.suffix == ".parquet":
                assert {p.part for p in found.problems} == {str(file.relative_to(run))}
            if k % 20 == 0:  # the reader may or may not see it; it never fails in its own words
                try:
                    read(run)
                except LedgerError as error:
                    assert "verify" in str(error) or "newer" in str(error)
        finally:
            file.write_bytes(whole)
    assert seen["parts"] > count // 3 and seen["other"] > count // 5, seen
    assert read(run) == expected


def test_no_truncation_goes_unseen(books) -> None:
    run, _, _ = books
    rng = random.Random(5)
    for k in range(100):
        file = rng.choice([f for f in files_of(run) if k % 3 or f.suffix != ".parquet"])
        whole = file.read_bytes()
        file.write_bytes(whole[: rng.choice([0, len(whole) - 1, rng.randrange(len(whole))])])
        try:
            assert not verify(run).good, f"{file} cut to {file.stat().st_size} of {len(whole)} bytes is not seen"
        finally:
            file.write_bytes(whole)


# One case each; they change the run they are given.


def lines_of(run: Path) -> list[bytes]:
    return chain_path(run, 0).read_bytes().splitlines(keepends=True)


def put(run: Path, lines: list[bytes]) -> None:
    chain_path(run, 0).write_bytes(b"".join(lines))


def edit(line: bytes, **changes) -> bytes:
    """Change a record and give it the hash of its new content."""
    r = parse_entry(line)
    fields = {"number": r.number, "kind": r.kind, "rank": r.rank, "at_step": r.at_step, "previous": r.previous}
    fields |= {"parts": r.parts, "more": r.more} | changes
    return ManifestEntry(**fields).line()


def swap(a: Path, b: Path) -> None:
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y)
    b.write_bytes(x)


def rewrite_all(run: Path, lines: list[bytes]) -> None:
    """Give a list of records new links throughout, but leave the head."""
    previous, made = "", []
    for n, line in enumerate(lines):
        made.append(edit(line, number=n, previous=previous))
        previous = parse_entry(made[-1]).hash
    put(run, made)


def foreign(run: Path, name: str) -> None:
    other = run.parent / "other"
    write_books(other, scale=3.0)
    shutil.copy(other / name, run / name)


def foreign_manifest(run: Path) -> None:
    other = run.parent / "other"
    write_books(other, scale=3.0)
    for file in (chain_path, head_path):
        shutil.copy(file(other, 0), file(run, 0))


def part(run: Path, table: str, which: int) -> Path:
    return sorted((run / table).glob("*.parquet"))[which]


DAMAGE = {
    "missing part": lambda r: part(r, "contributions", 3).unlink(),
    "missing accounts": lambda r: part(r, "accounts", -1).unlink(),
    "missing folder": lambda r: shutil.rmtree(r / "accounts"),
    "missing head": lambda r: head_path(r, 0).unlink(),
    "missing manifest": lambda r: chain_path(r, 0).unlink(),
    "missing manifest and head": lambda r: (chain_path(r, 0).unlink(), head_path(r, 0).unlink()),
    "empty manifest, no head": lambda r: (chain_path(r, 0).write_bytes(b""), head_path(r, 0).unlink()),
    "missing manifest folder": lambda r: shutil.rmtree(r / "manifest"),
    "missing run.json": lambda r: (r / "run.json").unlink(),
    "run.json of another kind": lambda r: (r / "run.json").write_text("[1]"),
    "run.json edited": lambda r: (r / "run.json").write_text((r / "run.json").read_text().replace("first", "second")),
    "swapped parts": lambda r: swap(part(r, "contributions", 3), part(r, "contributions", 4)),
    "swapped tables": lambda r: swap(part(r, "contributions", 3), part(r, "accounts", 3)),
    "foreign part": lambda r: foreign(r, "contributions/r0-000003.parquet"),
    "foreign manifest": foreign_manifest,
    "part is a folder": lambda r: (part(r, "accounts", 3).unlink(), (r / "accounts/r0-000004.parquet").mkdir()),
    "copy of a part far ahead": lambda r: shutil.copy(part(r, "contributions", 3), r / "contributions/r0-000099.parquet"),
    "line deleted in the middle": lambda r: put(r, lines_of(r)[:7] + lines_of(r)[8:]),
    "first line deleted": lambda r: put(r, lines_of(r)[1:]),
    "last line deleted": lambda r: put(r, lines_of(r)[:-1]),
    "many lines deleted": lambda r: put(r, lines_of(r)[:10]),
    "resume deleted": lambda r: put(r, [x for x in lines_of(r) if parse_entry(x).kind != "resume"]),
    "lines swapped": lambda r: put(r, [*lines_of(r)[:4], lines_of(r)[5], lines_of(r)[4], *lines_of(r)[6:]]),
    "all lines reversed": lambda r: put(r, lines_of(r)[::-1]),
    "line repeated": lambda r: put(r, lines_of(r)[:5] + lines_of(r)[4:]),
    "last line repeated": lambda r: put(r, lines_of(r) + lines_of(r)[-1:]),
    "line edited, hash made anew": lambda r: put(r, [*lines_of(r)[:4], edit(lines_of(r)[4], parts=()), *lines_of(r)[5:]]),
    "last line edited, hash made anew": lambda r: put(r, [*lines_of(r)[:-1], edit(lines_of(r)[-1], parts=())]),
    "chain made anew without a record": lambda r: rewrite_all(r, lines_of(r)[:6] + lines_of(r)[7:]),
    "chain made anew, resume undone": lambda r: rewrite_all(
        r, [edit(x, more={"keep": 7}) if parse_entry(x).kind == "resume" else x for x in lines_of(r)]
    ),
    "line feeds of another system": lambda r: chain_path(r, 0).write_bytes(chain_path(r, 0).read_bytes().replace(b"\n", b"\r\n")),
    "head of an earlier record, edited tail": lambda r: (
        head_path(r, 0).write_bytes(head_line(3, parse_entry(lines_of(r)[3]).hash)),
        put(r, [*lines_of(r)[:6], b"garbage\n", *lines_of(r)[7:]]),
    ),
    "cut behind with the head to match": lambda r: (
        head_path(r, 0).write_bytes(head_line(9, parse_entry(lines_of(r)[9]).hash)),
        put(r, lines_of(r)[:10]),
    ),
    "run.json and the first line": lambda r: ((r / "run.json").write_text("{"), put(r, [b"x\n", *lines_of(r)[1:]])),
    "head says infinity": lambda r: head_path(r, 0).write_text('{"hash":"x","number":1e999}\n'),
    "head is deep": lambda r: head_path(r, 0).write_text("[" * 100_000),
    "manifest is deep": lambda r: put(r, [*lines_of(r)[:-1], b"[" * 100_000 + b"\n", lines_of(r)[-1]]),
}
#: Made by somebody who knows the format: found, but what was true before is no longer on the page.
FORGED = ["chain made anew, resume undone"]
#: What changes nothing that counts.
HARMLESS = {
    "copy of a part under another name": lambda r: shutil.copy(part(r, "contributions", 3), r / "contributions/copy.parquet"),
    "copy of a part under a used number": lambda r: shutil.copy(part(r, "contributions", 3), r / "contributions/r0-000006.parquet"),
    "lock file garbled": lambda r: (r / "lock-r0").write_bytes(b"[" * 5000),
    "lock file missing": lambda r: (r / "lock-r0").unlink(),
    "head of the record before": lambda r: head_path(r, 0).write_bytes(
        head_line(len(lines_of(r)) - 2, parse_entry(lines_of(r)[-2]).hash)
    ),
    "half a commit behind": lambda r: put(r, [*lines_of(r), lines_of(r)[-1][:50]]),
    "garbage behind what the head knows": lambda r: put(r, [*lines_of(r), b"[" * 100_000 + b"\n", b"\n\r\n{}\0"]),
    "a file of another kind": lambda r: (r / "manifest" / "r².jsonl").write_text("hello"),
    "a rank with a leading zero": lambda r: (r / "manifest" / "r00.jsonl").write_text("hello"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_each_kind_of_damage_is_found_and_mended(books, copy, name: str) -> None:
    """Found by verify; what repair leaves is what it does not name as lost; and the run can be read and gone on with."""
    rows, accounts = books[2]
    DAMAGE[name](copy)
    found = verify(copy)
    assert not found.good and str(found.problems[0]) in str(found)
    done = repair(copy, QuickFiles())
    after = verify(copy)
    assert after.good, after
    left = read(copy)
    if name in FORGED:
        return
    lost = {table: {s for t, a, b in done.lost if t == table and a is not None for s in range(a, b + 1)} for table in TABLES}
    assert left[0] == [r for r in rows if r[0] not in lost["contributions"]], (done, sorted({r[0] for r in left[0]}))
    assert left[1] == [r for r in accounts if r[0] not in lost["accounts"]], done
    assert not done.lost or "lost" in str(done)
    json.dumps([done.as_dict(), found.as_dict()])
    with Ledger.resume(copy, None, flush_every=1, files=QuickFiles()) as ledger:
        ledger.write(step(0))
    assert read(copy) == (rows[:3], accounts[:1])
    assert verify(copy).good


#: Damage after which nothing that was on disk is lost.
FREE = [
    *("missing head", "run.json edited", "missing run.json", "lines swapped", "all lines reversed", "line repeated"),
    *("last line repeated", "head says infinity", "head is deep", "manifest is deep", "copy of a part far ahead"),
]


@pytest.mark.parametrize("name", FREE)
def test_damage_that_costs_nothing(books, copy, name: str) -> None:
    DAMAGE[name](copy)
    assert repair(copy, QuickFiles()).lost == []
    assert read(copy) == books[2]
    Ledger.resume(copy, books[1], files=QuickFiles()).close()  # marks hold
    assert read(copy) == books[2]


def test_one_bad_line_costs_one_record_and_no_mark(books, copy) -> None:
    """The other records keep number and hash, so that the newest checkpoint still fits."""
    put(copy, [*lines_of(copy)[:4], lines_of(copy)[4].replace(b"flush", b"flash"), *lines_of(copy)[5:]])
    with pytest.raises(LedgerError, match="entry 4.*inrun repair"):
        Ledger.resume(copy, books[1])
    done = repair(copy, QuickFiles())
    assert sorted(done.lost) == [("accounts", 3, 3), ("contributions", 3, 3)]
    with Ledger.resume(copy, books[1], flush_every=1, files=QuickFiles()) as ledger:
        ledger.write(step(STEPS))
    rows = [r for r in books[2][0] if r[0] != 3]
    assert read(copy)[0][: len(rows)] == rows and len(read(copy)[0]) == len(rows) + 3
    assert (copy / "damaged" / "contributions-r0-000004.parquet").exists()


def test_a_bad_last_line_costs_no_mark_either(books, copy) -> None:
    """The head knows its hash."""
    put(copy, [*lines_of(copy)[:-1], lines_of(copy)[-1].replace(b"flush", b"flash")])
    assert sorted(repair(copy, QuickFiles()).lost) == [("accounts", STEPS - 1, STEPS - 1), ("contributions", STEPS - 1, STEPS - 1)]
    Ledger.resume(copy, books[1], files=QuickFiles()).close()
    assert read(copy)[0] == [r for r in books[2][0] if r[0] != STEPS - 1]


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_is_harmless(books, copy, name: str) -> None:
    HARMLESS[name](copy)
    assert is_silent(copy, books[2]) is None
    assert verify(copy).good
    assert read(copy) == books[2]
    assert str(repair(copy)).endswith("nothing to repair")
    Ledger.resume(copy, books[1], files=QuickFiles()).close()
    assert read(copy) == books[2]


@pytest.mark.parametrize("count", [15, pytest.param(1000 if LONG else 300, marks=pytest.mark.slow)])
def test_repair_after_random_damage_keeps_the_rest(books, tmp_path, count: int) -> None:
    """One to three random flips or cuts anywhere: what is left is exactly what is not named as lost."""
    rng = random.Random(count)
    rows, accounts = books[2]
    for k in range(count):
        run = tmp_path / "run"
        shutil.copytree(books[0], run)
        for file, _, data in damaged_bits(run, rng, rng.randint(1, 3)):
            file.write_bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data))])
        assert not verify(run).good
        done = repair(run, QuickFiles())
        assert verify(run).good
        left = read(run)
        for table, now, before in (("contributions", left[0], rows), ("accounts", left[1], accounts)):
            lost = {s for t, a, b in done.lost if t == table and a is not None for s in range(a, b + 1)}
            unknown = sum(t == table and a is None for t, a, _ in done.lost)  # record and part both hit: one step each
            unnamed = {r[0] for r in before} - {r[0] for r in now} - lost
            assert len(unnamed) == unknown, (k, done)
            assert now == [r for r in before if r[0] not in lost | unnamed], (k, done)
            assert ("of unknown steps" in str(done)) == any(a is None for _, a, _ in done.lost)
        again = repair(run, QuickFiles())
        assert not again.moved and not again.lost
        shutil.rmtree(run)


def test_repair_loses_nothing_that_was_set_aside_before(copy) -> None:
    for n in (1, 2):
        part(copy, "contributions", 0).write_bytes(bytes([n]) * 10)
        repair(copy, QuickFiles())
    with Ledger.resume(copy, None, flush_every=1, files=QuickFiles()) as ledger:
        ledger.write(step(0))
    assert len(list((copy / "damaged").glob("contributions-*"))) == 2
    (copy / "run.json").write_text("{")
    repair(copy, QuickFiles())
    (copy / "run.json").write_text("[")
    repair(copy, QuickFiles())
    assert sorted(p.read_text() for p in (copy / "damaged").glob("run.json*")) == ["[", "{"]


def test_repair_is_refused_while_a_writer_lives(books, copy) -> None:
    part(copy, "contributions", 0).unlink()
    ledger = Ledger.resume(copy, books[1], files=QuickFiles())
    with pytest.raises(LedgerError, match="is being written by process"):
        repair(copy)
    ledger.close()
    assert len(repair(copy).lost) == 1


def test_repair_with_nothing_to_trust(copy) -> None:
    shutil.rmtree(copy / "manifest")
    (copy / "run.json").unlink()
    (copy / "manifest").mkdir()
    assert not verify(copy).good
    with pytest.raises(LedgerError, match="nothing in it can be trusted"):
        repair(copy)


# Several ranks.


@pytest.fixture
def two_ranks(tmp_path) -> Path:
    run = tmp_path / "ranks"
    for rank in range(2):
        with Ledger(run, rank=rank, world=2, flush_every=1, files=QuickFiles()) as ledger:
            for n in range(4):
                ledger.write(step(n, 1.0 + rank))
    return run


def test_a_rank_whose_manifest_is_gone_is_missed(two_ranks) -> None:
    for file in (chain_path(two_ranks, 1), head_path(two_ranks, 1)):
        file.unlink()
    assert "rank 1 is missing" in str(verify(two_ranks))
    with pytest.raises(LedgerError, match="rank 1 is missing"):
        Ledger.open(two_ranks).contributions()
    done = repair(two_ranks, QuickFiles())
    assert sorted(done.lost) == [("contributions", n, n) for n in range(4)]
    assert "steps count without rank 1" in str(verify(two_ranks))
    assert read(two_ranks)[0] == [(n, i, "v", c) for n, i, c in _plain(1.0)]


def _plain(scale: float) -> list[tuple[int, int, float]]:
    found = [step(n, scale) for n in range(4)]
    return [(r.step, int(i), float(c)) for r in found for i, c in zip(r.sample_ids, r.contributions["v"], strict=True)]


def test_the_books_of_another_run_under_one_rank(two_ranks, tmp_path) -> None:
    other = tmp_path / "other"
    Ledger(other, world=2, files=QuickFiles()).close()
    with Ledger(other, rank=1, world=2, flush_every=1, files=QuickFiles()) as ledger:
        for n in range(4):
            ledger.write(step(n, 9.0))
    for name in ["manifest/r1.jsonl", "manifest/r1.head", *(f"contributions/r1-00000{n}.parquet" for n in range(1, 5))]:
        shutil.copy(other / name, two_ranks / name)
    assert "belongs to run" in str(verify(two_ranks))
    repair(two_ranks, QuickFiles())
    assert read(two_ranks)[0] == [(n, i, "v", c) for n, i, c in _plain(1.0)]


# Hostile books.

TRAVERSAL = [
    *("../x.parquet", "contributions/../../x", "/etc/passwd", "contributions//x", "run.json", "manifest/r0.jsonl", "", ".", ".."),
    *("contributions/..", "contributions/.", "a/b", "contributions/a/b", "contributions/a\\..\\b", "contributions/\0"),
    *("contributions/a\n", "contributions/\u202e", "C:/x", "contributions/" + "x" * 300, "contributions", "contributions/"),
    *("~/x", "samples/$HOME"),
]


@pytest.mark.parametrize("name", TRAVERSAL)
def test_part_names_stay_inside(copy, name: str) -> None:
    """A manifest made for harm (all hashes right) names a file elsewhere: it is neither read nor moved."""
    with pytest.raises(LedgerError, match="not inside the run"):
        check_relative(name)
    outside = copy.parent / "x.parquet"
    shutil.copy(part(copy, "contributions", 0), outside)
    chain = read_chain(copy, 0)
    p = Part(name, 3, outside.stat().st_size, "0" * 64, 0, 0)
    made = ManifestEntry(len(chain.entries), "flush", 0, STEPS, chain.last_hash, (p,), {"from_step": 0, "marked": -1})
    put(copy, [*lines_of(copy), made.line()])
    head_path(copy, 0).write_bytes(head_line(made.number, made.hash))
    assert not verify(copy).good
    with pytest.raises(LedgerError):
        for table in ("contributions", "accounts", "samples"):
            Ledger.open(copy).parts(table)
        raise LedgerError("a name in no table is read by nothing")
    before = outside.read_bytes()
    repair(copy, QuickFiles())
    assert verify(copy).good
    assert outside.read_bytes() == before
    assert len(Ledger.open(copy).files("contributions")) == STEPS


FIELDS = {
    "number": [-1, True, "0", None, 2**70, 1.5],
    "kind": ["other", 1, None, []],
    "rank": [1, True, "0", None],
    "at_step": [-1, None, "x", 1.5],
    "previous": [0, None, []],
    "more": [[], None, "x", {"keep": "x"}, {"keep": -1}, {"stands_for": 1}],
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in FIELDS.items() for v in values])
def test_records_that_are_whole_but_not_ours(copy, field: str, value) -> None:
    kind = "resume" if field == "more" else "flush"
    chain = read_chain(copy, 0)
    fields = {"number": len(chain.entries), "kind": kind, "rank": 0, "at_step": 1, "previous": chain.last_hash, "more": {}}
    made = ManifestEntry(**{**fields, field: value})
    put(copy, [*lines_of(copy), made.line()])
    head_path(copy, 0).write_bytes(head_line(len(chain.entries), made.hash))
    assert not verify(copy).good
    with pytest.raises(LedgerError, match="is damaged"):
        read(copy)
    repair(copy, QuickFiles())
    assert verify(copy).good


def test_the_line_of_a_record_is_plain_sorted_json() -> None:
    """The hash is put in by hand, for speed: it must be where sorted keys put it."""
    made = ManifestEntry(3, "flush", 0, 4, 'a,"kind":b', (Part('x,"kind":', 1, 2, "s", 0, 1),), {"kind": 'c","kind":'})
    plain = json.dumps({**made.body(), "hash": made.hash}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert made.line() == plain
    assert parse_entry(plain) == made


@pytest.mark.parametrize("field", ["path", "rows", "nbytes", "sha256", "first_step"])
def test_parts_of_the_wrong_type(copy, field: str) -> None:
    p = {"path": "contributions/a", "rows": 1, "nbytes": 1, "sha256": "", "first_step": 0, field: [1]}
    with pytest.raises(ValueError, match="must say"):
        parse_entry(ManifestEntry(0, "flush", 0, 0, "", (Part(**p),), {}).line())


LINKED = ["contributions/r0-000003.parquet", "manifest/r0.jsonl", "manifest/r0.head", "run.json", "contributions", "manifest"]


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_the_run_are_not_followed(books, copy, name: str) -> None:
    """Even if what they lead to is right."""
    outside = copy.parent / "outside"
    (copy / name).rename(outside)
    (copy / name).symlink_to(outside)
    content = {p: p.read_bytes() for p in ([outside] if outside.is_file() else outside.iterdir())}
    assert "link" in str(verify(copy))
    with pytest.raises(LedgerError):
        read(copy)
    with pytest.raises(LedgerError, match="link"):
        Ledger.resume(copy, books[1], files=QuickFiles()).contributions()
    try:
        repair(copy, QuickFiles())
    except LedgerError as error:
        assert "is a link" in str(error)
    else:
        assert verify(copy).good
    assert {p: p.read_bytes() for p in ([outside] if outside.is_file() else outside.iterdir())} == content


@pytest.mark.parametrize("name", ["lock-r0", "damaged"])
def test_links_that_would_be_written_through(books, copy, name: str) -> None:
    target = copy.parent / "precious"
    target.write_text("keep me")
    if name == "lock-r0":
        (copy / name).unlink()
    (copy / name).symlink_to(target)
    part(copy, "contributions", 0).unlink()
    with pytest.raises(LedgerError):
        repair(copy, QuickFiles())
    with pytest.raises(LedgerError):
        Ledger.resume(copy, books[1], files=QuickFiles())
    assert target.read_text() == "keep me"


def test_fuzzed_files_never_end_in_an_exception_of_another_kind(books, copy) -> None:
    rng = random.Random(11)
    pieces = [b"\n", b"{}", b"null", b'"', b"\xff", b"[" * 2000, b"1e999", b"NaN", b"\0" * 30, b'{"number":0}\n', b"-"]
    small = [f for f in files_of(copy) if f.suffix != ".parquet"]
    for _ in range(80):
        file = rng.choice(small)
        whole = file.read_bytes()
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            data[at : at + rng.choice([0, 1, 40])] = rng.choice(pieces)
        file.write_bytes(bytes(data))
        try:
            assert is_silent(copy, books[2]) is None
            for action in (lambda: read(copy), lambda: Ledger.resume(copy, {**books[1], "record": 10**9}, files=QuickFiles())):
                with contextlib.suppress(LedgerError):
                    action()
        finally:
            file.write_bytes(whole)


# Merge.


def go_on(run: Path, mark: dict | None, steps, scale: float = 1.0, ids=(1, 2, 3)) -> dict:
    with Ledger.resume(run, mark, flush_every=1, files=QuickFiles()) as ledger:
        for n in steps:
            ledger.write(step(n, scale, ids))
        return ledger.mark()


def test_a_continuation_elsewhere_is_joined(books, copy, tmp_path) -> None:
    mark = go_on(copy, books[1], range(STEPS, STEPS + 2))
    shutil.copytree(copy, tmp_path / "elsewhere")
    go_on(tmp_path / "elsewhere", mark, range(STEPS + 2, STEPS + 5))
    for n, order in enumerate([("run", "elsewhere"), ("elsewhere", "run"), ("run", "elsewhere", "run")]):
        out = merge([tmp_path / name for name in order], tmp_path / f"out{n}")
        assert verify(out).good
        assert read(out) == read(tmp_path / "elsewhere")
    assert Ledger.open(tmp_path / "out0").about["merged_from"] == Ledger.open(copy).about["run_id"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_two_continuations_of_the_same_steps_are_refused(books, copy, tmp_path) -> None:
    shutil.copytree(copy, tmp_path / "b")
    go_on(copy, books[1], range(STEPS, STEPS + 3))
    go_on(tmp_path / "b", books[1], range(STEPS + 2, STEPS + 5), scale=2.0)
    with pytest.raises(LedgerError, match=f"steps {STEPS + 2} to {STEPS + 2} of rank 0 .*count twice"):
        merge([copy, tmp_path / "b"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_equal_continuations_count_once(books, copy, tmp_path) -> None:
    shutil.copytree(copy, tmp_path / "b")
    go_on(copy, books[1], range(STEPS, STEPS + 2))
    go_on(tmp_path / "b", books[1], range(STEPS, STEPS + 3))
    assert read(merge([copy, tmp_path / "b"], tmp_path / "out")) == read(tmp_path / "b")


def test_contributions_without_accounts_are_not_counted_twice_either(books, copy, tmp_path) -> None:
    """A rank that writes no accounts, and late rows."""
    shutil.copytree(copy, tmp_path / "b")
    for run, scale in ((copy, 1.0), (tmp_path / "b", 2.0)):
        with Ledger.resume(run, books[1], files=QuickFiles()) as ledger:
            late = step(STEPS - 1, scale)
            ledger.write(StepRecord(late.step, late.sample_ids, late.contributions, []))
    with pytest.raises(LedgerError, match="count twice"):
        merge([copy, tmp_path / "b"], tmp_path / "out")


def test_equal_parts_of_two_ranks_both_count(tmp_path) -> None:
    for rank in range(2):
        with Ledger(tmp_path / "a", rank=rank, world=2, files=QuickFiles()) as ledger:
            ledger.write(step(0))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(read(merge([tmp_path / "a", tmp_path / "b"], tmp_path / "out"))[0]) == 6


def test_a_repaired_copy_is_filled_from_a_whole_one(books, copy, tmp_path) -> None:
    part(copy, "contributions", 4).unlink()
    repair(copy, QuickFiles())
    for n, order in enumerate([(copy, books[0]), (books[0], copy)]):
        assert read(merge(order, tmp_path / f"out{n}")) == books[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp, run: [run], "at least two"),
        (lambda tmp, run: [run, tmp / "nothing"], "holds no run"),
        (lambda tmp, run: [run, tmp / "other"], "differ in run_id"),
        (lambda tmp, run: [run, tmp / "broken"], "inrun verify"),
    ],
)
def test_what_cannot_be_joined(books, copy, tmp_path, make, message: str) -> None:
    write_books(tmp_path / "other")
    shutil.copytree(books[0], tmp_path / "broken")
    part(tmp_path / "broken", "accounts", 0).write_bytes(b"x")
    if message == "inrun verify":  # a part that only this one has
        (tmp_path / "broken" / "lock-r0").unlink()
        shutil.rmtree(tmp_path / "broken")
        shutil.copytree(books[0], tmp_path / "broken")
        go_on(tmp_path / "broken", books[1], [STEPS])
        file = part(tmp_path / "broken", "accounts", -1)
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(LedgerError, match=message):
        merge(make(tmp_path, copy), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", ["mine", "yours"])
def test_samples_are_joined_if_they_agree(books, copy, tmp_path, other: str) -> None:
    shutil.copytree(copy, tmp_path / "b")
    for run, owner in ((copy, "mine"), (tmp_path / "b", other)):
        with Ledger.resume(run, books[1], files=QuickFiles()) as ledger:
            ledger.register_samples([{"sample_id": 1, "owner": owner}])
    if other == "mine":
        assert set(Ledger.open(merge([copy, tmp_path / "b"], tmp_path / "out")).samples()["owner"].to_pylist()) == {"mine"}
    else:
        with pytest.raises(LedgerError, match="different things of sample 1"):
            merge([copy, tmp_path / "b"], tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_merge_does_not_write_over_anything(books, copy, tmp_path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(LedgerError, match="exists already"):
        merge([books[0], copy], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
    assert os.listdir(tmp_path).count("out") == 1

"""Every format, every kind of bad row: read or counted with file and line, never a traceback."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inrun.corpus import readers
from inrun.corpus.documents import Bookmark, Document, Fields, Problems, find_files, read_documents, read_from
from inrun.errors import ConfigurationError, DataError

ROWS = [
    {"id": "a", "text": "one", "domain": "x", "source": "s", "owner": "o", "split": "train"},
    {"id": 7, "text": "zwei é 日本", "domain": "y", "source": None, "owner": "", "split": "val"},
    {"text": "three"},
]
EXPECTED = [("a", "one", "x", "s", "o", "train"), ("7", "zwei é 日本", "y", None, None, "val"), ("{name}:3", "three", *[None] * 4)]


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as out:
        out.write(data)
    return sink.getvalue().to_pybytes()


def as_lines(rows) -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()


def as_table(rows) -> pa.Table:
    names = dict.fromkeys(n for r in rows for n in r)
    return pa.table({n: [None if r.get(n) is None else str(r[n]) for r in rows] for n in names})


def write(path: Path, rows=ROWS) -> Path:
    """Write rows in the format that the name asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name
    if name.endswith(".parquet"):
        pq.write_table(as_table(rows), path)
    elif name.endswith("stream.arrow"):
        with pa.OSFile(str(path), "wb") as f, pa.ipc.new_stream(f, as_table(rows).schema) as writer:
            writer.write_table(as_table(rows))
    elif name.endswith(".arrow"):
        with pa.OSFile(str(path), "wb") as f, pa.ipc.new_file(f, as_table(rows).schema) as writer:
            writer.write_table(as_table(rows))
    else:
        data = as_lines(rows)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else zstd(data) if name.endswith(".zst") else data)
    return path


def read(paths, fields: Fields | None = None) -> tuple[list[Document], Problems]:
    problems = Problems()
    return list(read_documents(paths, fields or Fields(), problems)), problems


FORMATS = [
    "a.jsonl",
    "a.ndjson",
    "a.json",
    "a.jsonl.gz",
    "a.json.gz",
    "a.jsonl.zst",
    "a.parquet",
    "a.stream.arrow",
    "a.arrow",
    "A.JSONL",
]


@pytest.mark.parametrize("name", FORMATS)
def test_formats_give_the_same_documents(tmp_path, name: str) -> None:
    found, problems = read(write(tmp_path / name))
    expected = [tuple(v.format(name=name) if isinstance(v, str) else v for v in row) for row in EXPECTED]
    assert [(d.id, d.text, d.domain, d.source, d.owner, d.split) for d in found] == expected
    assert [d.where for d in found] == [f"{name}:{i}" for i in (1, 2, 3)]
    assert problems.total == 0
    assert problems.lines() == []


@pytest.mark.parametrize("name", FORMATS)
def test_reading_goes_on_from_any_place(tmp_path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(readers, "ROWS", 3)
    rows = [{"id": str(i), "text": "t" * (i % 5 if name.endswith("l") else 1 + i % 5)} for i in range(20)]
    files = find_files([write(tmp_path / "one" / name, rows), write(tmp_path / "two" / name, rows)])
    whole = Problems()
    every = list(read_from(files, Fields(), whole))
    for stop in range(len(every)):
        problems = Problems()
        reader = read_from(files, Fields(), problems)
        first = [next(reader) for _ in range(stop + 1)]
        place = Bookmark(*json.loads(json.dumps(list(first[-1][1]))))
        rest = list(read_from(files, Fields(), problems, place))
        assert [d for d, _ in first + rest] == [d for d, _ in every]
        assert problems.as_dict() == whole.as_dict()


BAD_LINES = {
    "json": (b'{"text": "a', "unreadable JSON"),
    "list": (b"[1, 2]", "unreadable JSON"),
    "number": (b"5", "unreadable JSON"),
    "deep": (b"[" * 100_000, "unreadable JSON"),
    "digits": (b'{"text": ' + b"9" * 5000 + b"}", "unreadable JSON"),
    "latin": ('{"text": "é"}'.encode("latin-1"), "not UTF-8"),
    "utf16": ('{"text": "a"}'.encode("utf-16"), "not UTF-8"),
    "surrogate": (b'{"text": "a\\ud800b"}', "not UTF-8"),
    "no field": (b'{"content": "a"}', "no text field"),
    "no fields": (b"{}", "no text field"),
    "null": (b'{"text": null}', "text is not a string"),
    "int": (b'{"text": 5}', "text is not a string"),
    "object": (b'{"text": {"a": 1}}', "text is not a string"),
    "empty": (b'{"text": ""}', "empty text"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_lines_are_counted_with_their_place(tmp_path, case: str) -> None:
    line, kind = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n' + line)
    found, problems = read(path)
    assert [d.text for d in found] == ["before", "after"]
    assert problems.counts == {kind: 2}
    assert problems.examples[kind][0].startswith("a.jsonl:2: ")
    assert problems.examples[kind][1].startswith("a.jsonl:4: ")
    assert Problems.from_dict(json.loads(json.dumps(problems.as_dict()))).lines() == problems.lines()
    assert "2 " + kind in problems.lines()[0]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"", []),
        (b"\n\n", []),
        (b'{"text": "a"}', ["a"]),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
        (b'\xef\xbb\xbf{"text": "a"}\n\n  \n{"text": "b"}', ["a", "b"]),
        (b'{"text": "  \\n "}', ["  \n "]),
        (b'{"text": "\\u0000\\u2028"}', ["\0\u2028"]),
        ('{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
    ],
)
def test_odd_but_good_files(tmp_path, data: bytes, texts: list[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    found, problems = read(tmp_path / "a.jsonl")
    assert [d.text for d in found] == texts
    assert problems.total == 0


def test_long_lines_and_files_are_problems(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(readers, "LONGEST", 100)
    monkeypatch.setattr(readers, "BLOCK", 64)
    exact = b'{"text": "' + b"x" * 88 + b'"}'
    assert len(exact) == 100
    longer = b'{"text": "' + b"x" * 1000 + b'"}'
    (tmp_path / "a.jsonl").write_bytes(exact + b"\n" + longer + b"\n" + exact + b"\n" + longer)
    found, problems = read(tmp_path / "a.jsonl")
    assert [d.where for d in found] == ["a.jsonl:1", "a.jsonl:3"]
    assert problems.counts == {"too long": 2}
    (tmp_path / "t.txt").write_bytes(b"x" * 101)
    assert read(tmp_path / "t.txt")[1].counts == {"too long": 1}


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "no archive"])
def test_broken_streams_give_what_they_hold(tmp_path, name: str, damage: str) -> None:
    rows = [{"text": os.urandom(40).hex()} for _ in range(20_000)]
    path = write(tmp_path / name, rows)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else b"hello")
    *found, last = read([path, write(tmp_path / "b.jsonl", [{"text": "last"}])])[0]
    problems = read(path)[1]
    assert last.text == "last"  # other files are not touched by it
    assert [d.text for d in found] == [r["text"] for r in rows[: len(found)]]
    assert (len(found) > 8000) == (damage == "cut")
    assert problems.counts == {"broken file": 1}
    assert problems.examples["broken file"][0].startswith(f"{name}:{len(found) + 1}: ")
    assert problems.lines()[0].endswith("nothing is read from here on")


def test_a_garbled_gzip_is_noticed_by_its_checksum(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl.gz", [{"text": os.urandom(40).hex()} for _ in range(20_000)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    assert read(path)[1].counts["broken file"] == 1


@pytest.mark.parametrize("name", ["a.parquet", "a.stream.arrow", "a.arrow"])
def test_broken_tables(tmp_path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-30] if name == "a.parquet" else path.read_bytes()[:300])
    found, problems = read(path)
    assert found == []
    assert problems.counts == {"broken file": 1}


@pytest.mark.parametrize("name", ["a.parquet", "a.stream.arrow"])
def test_tables_without_the_column_or_with_bad_values(tmp_path, name: str) -> None:
    _, problems = read(write(tmp_path / name, [{"content": "a", "id": "1"}, {"content": "b", "id": "2"}]))
    assert problems.counts == {"no text field": 2}
    _, problems = read(write(tmp_path / name, [{"content": "a"}, {"content": "b"}]))
    assert problems.counts == {"no text field": 2}
    found, problems = read(write(tmp_path / name, [{"text": None}, {"text": ""}, {"text": "good"}]))
    assert [d.text for d in found] == ["good"]
    assert problems.counts == {"text is not a string": 1, "empty text": 1}


def test_tables_with_bytes_that_are_no_utf8(tmp_path) -> None:
    bad = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb")])
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    found, problems = read(tmp_path / "a.parquet")
    assert [d.text for d in found] == ["a", "b"]
    assert problems.counts == {"not UTF-8": 1}
    assert problems.examples["not UTF-8"][0].startswith("a.parquet:2: ")
    pq.write_table(pa.table({"text": pa.array([b"fine", b"\xff"], pa.binary())}), tmp_path / "b.parquet")
    found, problems = read(tmp_path / "b.parquet")
    assert [d.text for d in found] == ["fine"]
    assert problems.counts == {"not UTF-8": 1}


def test_parquet_with_several_row_groups_and_nested_fields(tmp_path) -> None:
    table = pa.table({"body": [f"t{i}" for i in range(1000)], "meta": [{"domain": "d", "n": i} for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=70)
    found, problems = read(tmp_path / "a.parquet", Fields(text="body", id="meta.n", domain="meta.domain"))
    assert [(d.text, d.id, d.domain) for d in found] == [(f"t{i}", str(i), "d") for i in range(1000)]
    assert problems.total == 0


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"text": "t", "meta": {"d": {"e": "deep"}}}, Fields(domain="meta.d.e"), "deep"),
        ({"text": "t", "meta.d": "flat", "meta": {"d": "nested"}}, Fields(domain="meta.d"), "flat"),
        ({"text": "t", "meta": "text"}, Fields(domain="meta.d"), None),
        ({"text": "t", "domain": 1.5}, Fields(), "1.5"),
        ({"text": "t", "domain": True}, Fields(), "True"),
        ({"text": "t", "domain": "x"}, Fields(domain=None), None),
        ({"text": "t", "domain": "\ud800"}, Fields(), "\\ud800"),
    ],
)
def test_fields(tmp_path, row, fields: Fields, expected: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    found, problems = read(tmp_path / "a.jsonl", fields)
    assert found[0].domain == expected
    assert problems.total == 0


@pytest.mark.parametrize("value", [["a"], {"a": 1}, "x" * 20_000])
def test_metadata_that_is_no_name_is_left_empty_and_counted(tmp_path, value) -> None:
    found, problems = read(write(tmp_path / "a.jsonl", [{"text": "t", "id": value, "domain": value}]))
    assert (found[0].id, found[0].domain) == ("a.jsonl:1", None)
    assert problems.counts == {"metadata is not text or number": 2}


@pytest.mark.parametrize("fields", [{"text": None}, {"text": ""}, {"domain": 3}])
def test_bad_field_names(fields) -> None:
    with pytest.raises(ConfigurationError, match="field for"):
        Fields(**fields)


def test_a_folder_of_texts(tmp_path) -> None:
    for name, data in {
        "wiki/b.txt": b"b",
        "wiki/deep/a.md": b"\xef\xbb\xbfa",
        "code/package.json": b'{"text": "not a row"}',
        "top.txt": b"top",
        "empty.txt": b"",
        "latin.txt": b"\xe9",
        "picture.png": b"\x89PNG\0\0",
        ".hidden": b"h",
        ".git/config": b"h",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    found, problems = read(tmp_path)
    assert [(d.id, d.text, d.domain, d.source, d.where) for d in found] == [
        ("top.txt", "top", None, "top.txt", "top.txt"),
        ("code/package.json", '{"text": "not a row"}', "code", "package.json", "code/package.json"),
        ("wiki/b.txt", "b", "wiki", "b.txt", "wiki/b.txt"),
        ("wiki/deep/a.md", "a", "wiki", "a.md", "wiki/deep/a.md"),
    ]
    assert problems.counts == {"empty text": 1, "not UTF-8": 1, "binary file": 1}


def test_a_folder_of_data_files_ignores_the_readme(tmp_path) -> None:
    write(tmp_path / "b.jsonl.gz", [{"text": "b"}])
    write(tmp_path / "a" / "x.parquet", [{"text": "a"}])
    write(tmp_path / "c.json", [{"text": "c"}])
    (tmp_path / "README.md").write_text("about")
    assert [d.text for d in read(tmp_path)[0]] == ["b", "c", "a"]
    assert [f.name for f in find_files(tmp_path)] == ["b.jsonl.gz", "c.json", "a/x.parquet"]


def test_names_of_several_paths_are_told_apart(tmp_path) -> None:
    one, two = write(tmp_path / "one" / "a.jsonl", [{"text": "1"}]), write(tmp_path / "two" / "a.jsonl", [{"text": "2"}])
    assert [d.id for d in read([two, one])[0]] == ["two/a.jsonl:1", "one/a.jsonl:1"]
    with pytest.raises(ConfigurationError, match="twice"):
        find_files([one, tmp_path / "one"])


def test_what_lies_beside_a_curation(tmp_path) -> None:
    """Only the kept ones are read, what inrun wrote beside them goes unsaid, what others put there is counted."""
    ours = {"written_by": "inrun curate", "kept": "kept.jsonl", "dropped": "dropped.jsonl"}
    for name in ("kept.jsonl", "dropped.jsonl", "README.md", "chunks.parquet", ".hidden"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (tmp_path / "curation.json").write_text(json.dumps(ours))
    problems = Problems()
    assert [f.path.name for f in find_files([tmp_path], problems)] == ["kept.jsonl"] and not problems.counts
    (tmp_path / "mine.jsonl").write_text('{"text": "y"}\n')
    assert [f.path.name for f in find_files([tmp_path], problems)] == ["kept.jsonl"]
    assert problems.counts == {"file beside a curation": 1} and "mine.jsonl" in problems.lines()[0]
    (tmp_path / "kept.jsonl").unlink()
    with pytest.raises(DataError, match="holds no kept.jsonl, though curation.json names it"):
        find_files([tmp_path])
    # A file of that name by somebody else means nothing.
    (tmp_path / "curation.json").write_text(json.dumps({"curator": "me", "kept": "none.jsonl"}))
    assert {"dropped.jsonl", "mine.jsonl"} < {f.path.name for f in find_files([tmp_path])}
    (tmp_path / "curation.json").write_text("[1]")
    with pytest.raises(DataError, match="not an object; curate again, or move it away"):
        find_files([tmp_path])


def test_links_out_of_a_folder_are_not_followed(tmp_path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "s.txt").write_text("secret")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a.txt").write_text("a")
    (inside / "link.txt").symlink_to(secret / "s.txt")
    (inside / "near.txt").symlink_to(inside / "a.txt")
    (inside / "folder").symlink_to(secret)
    (inside / "loop").symlink_to(inside)
    found, problems = read(inside)
    assert [d.id for d in found] == ["a.txt", "near.txt"]
    assert problems.counts == {"link out of the folder": 3}
    assert [d.text for d in read(inside / "link.txt")[0]] == ["secret"]  # given by name it is meant


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: p / "missing.jsonl", "does not exist.*accepted are files ending in .jsonl"),
        (lambda p: (p / "a.csv").write_text("x") and p / "a.csv", "not read.*accepted"),
        (lambda p: (p / "empty").mkdir() or p / "empty", "holds no files"),
        (lambda p: [], "no data"),
        (lambda p: "/dev/null", "regular file"),
        (lambda p: "x" * 5000, "looked at"),
        (lambda p: "a\0b.jsonl", "does not exist"),
    ],
)
def test_paths_that_are_no_data(tmp_path, make, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        find_files(make(tmp_path))


def test_file_names_of_any_bytes(tmp_path) -> None:
    name = os.path.join(os.fsencode(tmp_path), b"bad\xff\x1b[31m\n.txt")
    with open(name, "wb") as f:
        f.write(b"text")
    found, _ = read(tmp_path)
    assert found[0].id.encode().isascii()
    assert found[0].id.isprintable()


def test_saved_datasets(tmp_path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": [f"t{i}" for i in range(2500)], "domain": ["a", "b"] * 1250})
    data.save_to_disk(str(tmp_path / "one"), num_shards=3)
    found, problems = read(tmp_path / "one")
    assert [d.text for d in found] == data["text"][:]
    assert [d.domain for d in found] == data["domain"][:]
    assert problems.total == 0
    datasets.DatasetDict({"train": data.select(range(3)), "test": data.select([7])}).save_to_disk(str(tmp_path / "two"))
    found, _ = read(tmp_path / "two")
    assert [(d.text, d.split) for d in found] == [("t0", "train"), ("t1", "train"), ("t2", "train"), ("t7", "test")]


@pytest.mark.parametrize("name", ["../out.arrow", "/etc/passwd", "", ".", "a\0b", "missing.arrow"])
def test_saved_datasets_that_point_elsewhere(tmp_path, name: str) -> None:
    write(tmp_path / "out.arrow")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError):
        find_files(folder)


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"_data_files": 3}', '{"_data_files": [3]}', "[" * 100_000])
def test_saved_datasets_that_are_damaged(tmp_path, data: str) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text(data)
    with pytest.raises(DataError, match="save_to_disk"):
        find_files(tmp_path)
    (tmp_path / "dataset_dict.json").write_text(data)
    with pytest.raises(DataError, match="save_to_disk"):
        find_files(tmp_path)


def test_a_disk_that_fails_is_no_bad_row(tmp_path, monkeypatch) -> None:
    def fails(*args):
        raise OSError(5, "Input/output error")

    path = write(tmp_path / "a.jsonl")
    monkeypatch.setattr(readers, "_parse", fails)
    with pytest.raises(DataError, match="Input/output"):
        read(path)


def test_problems_show_few_places_and_nothing_dangerous() -> None:
    problems = Problems()
    for i in range(9):
        problems.add("empty text", f"\x1b[31m\u202e.jsonl:{i}", "x" * 10_000)
    lines = problems.lines()
    assert len(lines) == 6
    assert lines[0].startswith("9 empty text (skipped): \\x1b[31m\\u202e.jsonl:0: xxx")
    assert lines[-1] == "    and 4 more"
    assert all(len(line) < 400 and line.isprintable() for line in lines)
    with pytest.raises(DataError, match="cannot be read"):
        Problems.from_dict({"empty text": 3})


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300), name=st.sampled_from(FORMATS[:-1]))
def test_no_bytes_make_a_traceback(tmp_path, data: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(data)
    read(tmp_path / name)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    place=st.floats(0, 1),
    junk=st.binary(min_size=1, max_size=8),
    name=st.sampled_from(["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.stream.arrow", "a.arrow"]),
)
def test_no_damage_makes_a_traceback(tmp_path, place: float, junk: bytes, name: str) -> None:
    path = write(tmp_path / name)
    data = path.read_bytes()
    at = int(place * len(data))
    path.write_bytes(data[:at] + junk + data[at + len(junk) :])
    read(path)

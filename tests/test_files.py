"""Files that are whole or absent, and locks."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
import threading
import time

import pytest

from faulty_files import FailingFiles, QuickFiles
from inrun.files import DurableStream, Files, Holder, Lock, LockedError, alone, holder_of, put_folder, write_durably

HERE = platform.node()


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_is_the_old_or_the_new_one(tmp_path, shared: bool) -> None:
    path = tmp_path / "file"
    for n in range(1, 10):
        write_durably(QuickFiles(), path, b"old")
        disk = FailingFiles(n, errno.ENOSPC)
        try:
            write_durably(disk, path, b"new", shared=shared)
        except OSError:
            assert path.read_bytes() in (b"old", b"new")
            if shared:
                assert os.listdir(tmp_path) == ["file"]
            continue
        assert path.read_bytes() == b"new" and not disk.failed
        break
    assert n > 4 and os.listdir(tmp_path) == ["file"]


def test_processes_may_write_one_file_at_once(tmp_path) -> None:
    contents = [bytes([65 + k]) * 5000 for k in range(6)]
    threads = [
        threading.Thread(target=lambda c=c: [write_durably(QuickFiles(), tmp_path / "f", c, shared=True) for _ in range(20)])
        for c in contents
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "f").read_bytes() in contents and os.listdir(tmp_path) == ["f"]


def test_a_stream_is_whole_or_absent(tmp_path) -> None:
    one, two = DurableStream(tmp_path / "one"), DurableStream(tmp_path / "two")
    for stream in (one, two):
        stream.stream.write(b"text")
    assert not (tmp_path / "one").exists()
    one.finish()
    two.abandon()
    one.abandon()  # after its end: nothing left to do
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"one": b"text"}


def test_a_folder_takes_its_name(tmp_path) -> None:
    (tmp_path / "aside").mkdir()
    (tmp_path / "aside" / "x").touch()
    put_folder(Files(), tmp_path / "aside", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"] and os.listdir(tmp_path / "final") == ["x"]


def test_a_lock_says_who_holds_it(tmp_path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) is None
    lock = Lock(path)
    assert lock.held and lock.left_by is None
    assert holder_of(path) == Holder(os.getpid(), HERE) and holder_of(path).is_alive
    with pytest.raises(LockedError, match=f"process {os.getpid()} on") as refused:
        Lock(path)
    assert refused.value.holder.pid == os.getpid() and holder_of(path) is not None  # trying leaves the holder's name
    lock.release()
    lock.release()
    assert not lock.held and holder_of(path) is None and path.exists()
    dead = Lock(path)
    dead._let_go()  # as a killed process does
    again = Lock(path)
    assert again.left_by == Holder(os.getpid(), HERE)
    again.release()


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "3"])
def test_a_garbled_lock_names_nobody(tmp_path, content: str) -> None:
    (tmp_path / "lock").write_text(content)
    assert holder_of(tmp_path / "lock") is None
    Lock(tmp_path / "lock").release()


def test_holders_that_are_not_here(tmp_path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(LockedError) as refused:
        Lock(tmp_path / "lock")
    assert refused.value.is_elsewhere and not refused.value.holder.is_alive
    assert not Holder(2**22 + 12345, HERE).is_alive and not Holder(0, HERE).is_alive and not Holder(None, HERE).is_alive
    assert str(Holder(None, None)) == "process ? on ?"


def test_alone(tmp_path) -> None:
    code = "import sys, time; from pathlib import Path; from inrun.files import alone\n"
    code += "with alone(Path(sys.argv[1])): print('held', flush=True); time.sleep(float(sys.argv[2]))"
    path = tmp_path / "lock"

    def other(seconds: float) -> subprocess.Popen:
        child = subprocess.Popen([sys.executable, "-c", code, str(path), str(seconds)], stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "held\n"
        return child

    with other(60) as child:
        with pytest.raises(LockedError), alone(path):
            pytest.fail("two at once")
        child.kill()
    with alone(path):  # a lock ends with its process
        pass
    said, began = [], time.monotonic()
    with other(0.5), alone(path, waiting=lambda: said.append(1)):
        assert said == [1] and time.monotonic() - began > 0.2
    with pytest.raises(OSError), alone(tmp_path):  # a folder
        pytest.fail("no file to lock")

"""The command: what it prints, where it listens, how it ends."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from click.testing import CliRunner

from explorer_runs import finished
from inrun.cli.main import cli
from inrun.explorer.server import serve
from inrun.explorer.snapshot import Snapshot


@pytest.fixture
def run(tmp_path):
    return finished(tmp_path / "run", 3)


def get(port: int, path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def test_serve_prints_its_address_once_and_answers(run):
    command = [sys.executable, "-m", "inrun", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"explorer: http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})\n", line)
            assert found and process.stdout.readline() == "Ctrl-C ends it\n", line
            port, token = int(found[1]), found[2]
            assert get(port, "/")[0] == 403
            assert get(port, "/", Host="evil.example")[0] == 400
            assert get(port, f"/?token={token}")[0] == 200
            status, text = get(port, "/api/runs", Authorization=f"token {token}")
            assert status == 200 and '"samples":12' in text
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
            assert process.returncode in (0, 130) and "Traceback" not in errors and rest == ""
            assert token not in errors
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_nothing_is_left_behind(run, tmp_path, name):
    """However it ends, its temporary folder goes; with an open connection, too."""
    left = tmp_path / "temporary"
    left.mkdir()
    command = [sys.executable, "-m", "inrun", "serve", str(run), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(left)}
    ) as process:
        try:
            port = int(re.search(r":(\d+)/", process.stdout.readline())[1])
            assert get(port, "/")[0] == 403 and [p.name[:15] for p in left.iterdir()] == ["inrun-explorer-"]
            idle = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            idle.connect()
            process.send_signal(getattr(signal, name))
            _, errors = process.communicate(timeout=60)
            idle.close()
            assert list(left.iterdir()) == [] and "Traceback" not in errors
            assert process.returncode in {"SIGINT": (0, 130), "SIGTERM": (143,), "SIGHUP": (0, 129)}[name]
        finally:
            process.kill()


def test_a_signal_before_it_serves_leaves_nothing(run, tmp_path, monkeypatch):
    """While runs are read there is no server yet; a second signal does not break off the cleaning up."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = {p.name for p in tmp_path.iterdir()}

    def killed(snapshot):
        assert {p.name for p in tmp_path.iterdir()} > before
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr(Snapshot, "refresh", killed)
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit) as ended:
        serve([run], ready=print)
    assert ended.value.code == 143 and {p.name for p in tmp_path.iterdir()} == before
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == handlers


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # uvicorn leaves the socket it could not bind
def test_a_port_that_is_taken_is_named(run):
    from explorer_serving import serving

    with serving(run) as (address, _):
        port = address.rpartition(":")[2]
        done = CliRunner().invoke(cli, ["serve", str(run), "--port", port])
    assert "cannot be listened at" in str(done.exception)


def test_runs_that_are_none(tmp_path):
    assert CliRunner().invoke(cli, ["serve"]).exit_code == 2
    assert CliRunner().invoke(cli, ["serve", str(tmp_path / "nothing")]).exit_code == 2
    assert CliRunner().invoke(cli, ["serve", str(tmp_path)]).exception is not None

"""The one progress bar, where there is no terminal."""

from __future__ import annotations

import io
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid

import pytest
from rich.console import Console
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from inrun.cli.progress import progress
from inrun.cli.train_progress import BAR, FieldsColumn, StepColumn, describe, fitting, reading_bar, training_line
from inrun.training.loop import Status


def test_plain_lines_are_rare_and_training_shows_both_ends(capsys):
    with training_line() as tell:
        for step in range(1, 100):
            tell(Status(step, 99, loss=2.0, samples_per_second=10.0, overhead=math.nan))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["step 1/99: loss 2.000, 10.0 samples/s", "step 99/99: loss 2.000, 10.0 samples/s"]


def test_patience(capsys):
    with progress(patience=0.0) as tell:
        tell("replaying", 3, 9)
    assert capsys.readouterr().err == "replaying: step 3/9\n"
    with progress(patience=60.0) as tell:
        tell("replaying", 1, 9)
    with progress() as tell, progress(True, patience=0.0) as quiet, reading_bar() as reading, training_line(True) as line:
        tell("bench", 1, 9)
        quiet("replaying", 1, 9)
        reading(1, 9, 1)
        line(Status(1, 9))
    assert capsys.readouterr().err == ""


def test_a_narrow_line_keeps_whole_fields_in_order():
    status = Status(12, 280, 4.25, validation={"code": 4.1, "prose": 4.3}, samples_per_second=31.0, overhead=0.3, plain_seconds=0.5)
    full = describe(status)
    assert full == "loss 4.250, code 4.100, prose 4.300, 31.0 samples/s, scoring +30%"
    assert fitting(full, 200) == full
    assert fitting(full, 40) == "loss 4.250, code 4.100, prose 4.300"
    assert fitting(full, 5) == ""


def test_nothing_alarming_or_unknown_is_told():
    assert "scoring" not in describe(Status(1, 9, 2.0, samples_per_second=10.0, overhead=4.0, plain_seconds=0.001))
    assert describe(Status(9, 9)) == ""  # a finished run that is resumed has no loss to tell


@pytest.mark.parametrize("width", [80, 60, 200])
def test_step_bar_and_time_left_stay_on_a_narrow_terminal(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    console = Console(width=width, force_terminal=True, file=io.StringIO(), color_system=None)
    columns = (StepColumn(), BarColumn(bar_width=BAR), TimeRemainingColumn(compact=True), FieldsColumn())
    bar = Progress(*columns, console=console, auto_refresh=False)
    task = bar.add_task("", total=None)
    with console.capture() as before:
        console.print(bar.get_renderable())
    assert "None" not in before.get()
    many = {f"a long name {i}": 3.0 for i in range(4)}
    bar.update(task, completed=120, total=20_000, description=describe(Status(120, 20_000, 4.25, 0.0, many, 31.0)))
    with console.capture() as shown:
        console.print(bar.get_renderable())
    (line,) = shown.get().splitlines()
    assert "step   120/20000" in line and "--:--" in line and "loss 4.250" in line and len(line.rstrip()) <= width


TERMINAL = """
import logging, time
from inrun.cli.progress import log_to_terminal
from inrun.cli.train_progress import reading_then_training
from inrun.training.loop import Status
log_to_terminal()
with reading_then_training() as (reading, tell):
    for done in range(6):
        reading(done, 5, 7)
        time.sleep(0.12)
    logging.getLogger("inrun").warning("a message that a person is to read")
    for step in range(1, 6):
        tell(Status(step, 5, loss=2.0))
        time.sleep(0.12)
"""


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_one_line_at_a_time_and_messages_above_it(tmp_path):
    script, seen = tmp_path / "script.py", []
    script.write_text(TERMINAL)
    name = f"inrun-test-{uuid.uuid4().hex[:8]}"
    tmux = ["tmux", "-L", name]
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(script))}; echo ended; sleep 600"
    subprocess.run([*tmux, "new-session", "-d", "-x", "80", "-y", "20", command], check=True)
    try:
        until = time.monotonic() + 120
        while not seen or "ended" not in seen[-1]:
            assert time.monotonic() < until, seen[-1:]
            shown = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
            seen.append([line.rstrip() for line in shown.splitlines() if line.strip()])
            time.sleep(0.03)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    assert seen[-1][0] == "a message that a person is to read"
    assert seen[-1][1].startswith("step 5/5 ━") and seen[-1][2:] == ["ended"]
    assert any(line.startswith("tokenising") for screen in seen for line in screen)
    lines = [line for screen in seen for line in screen if line.startswith("step")]
    assert lines and all(re.match(r"step \d/5 [━╸╺]{14} (\d\d:\d\d|--:--) loss 2\.000$", line) for line in lines), lines
    for screen in seen:
        assert sum(line.startswith(("starting", "tokenis", "step")) for line in screen) <= 1, screen


def test_the_last_plain_line_is_what_was_told_last(capsys):
    """The last step is told of twice, the second time with the losses of its evaluation: one line, with those."""
    with progress(patience=1000.0, stays=True) as tell:
        for step in range(1, 6):
            tell(f"val {10 - step}", step, 5)
        tell("val 4.5", 5, 5)
        assert capsys.readouterr().err == "val 9: step 1/5\n"
    assert capsys.readouterr().err == "val 4.5: step 5/5\n"
    with pytest.raises(KeyError), progress(patience=1000.0, stays=True) as tell:
        tell("a", 1, 1)
        raise KeyError
    assert capsys.readouterr().err == "a: step 1/1\n"
    with progress(patience=1000.0) as tell:  # without ends nothing is due
        tell("a", 1, 1)
    assert capsys.readouterr().err == ""

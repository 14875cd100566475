"""The one progress bar, where there is no terminal."""

from __future__ import annotations

import math

from inrun.cli.progress import progress
from inrun.cli.train_progress import reading_bar, training_line
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

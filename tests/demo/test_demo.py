"""The demo: its claims are computed from its ledger."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import inrun
from inrun.analysis.curate import curate
from inrun.cli.demo_story import findings, tell_story
from inrun.demo.planted import VIEW, _separation, find_planted
from inrun.demo.run import MARK, DemoConfig, run_demo
from inrun.demo.texts import COPY, NOISE, SCRAMBLED, demo_texts
from inrun.errors import ConfigurationError
from inrun.ledger import StepRecord
from inrun.training.loop import Result, Status


@pytest.mark.slow
def test_texts():
    texts = demo_texts(100, 20, 6, 5, 0)
    train = [t for t in texts if t.split == "train"]
    assert {d: sum(t.domain == d and t.source not in (COPY,) for t in train) for d in ("reference", "code", "tables", "noise")} == {
        "reference": 20,
        "code": 20,
        "tables": 20,
        "noise": 5,
    }
    held_out = {t.text for t in texts if t.split == "val"}
    assert not any(t.text in held_out for t in train)  # nothing held out is trained on
    assert len({t.text for t in train if t.source != COPY}) == sum(t.source != COPY for t in train)
    assert sum(t.split == "val" for t in texts) == 12 and len({t.id for t in texts}) == len(texts)
    originals = {t.text for t in train if t.source != COPY}
    assert all(t.text in originals for t in train if t.source == COPY)
    assert sum(t.source == SCRAMBLED for t in train) == 5
    assert texts == demo_texts(100, 20, 6, 5, 0) != demo_texts(100, 20, 6, 5, 1)


def test_planted_samples_are_told_by_their_scores(tmp_path):
    """Known answers: 2 of 3 planted samples are clear of their error, one real one is flagged by mistake."""
    sources = [NOISE, NOISE, SCRAMBLED, "os.py", "re.py"]
    texts = [{"sample_id": i, "source": s, "text": f"text {i}"} for i, s in enumerate(sources)]
    values = {0: (-1.0, -1.1), 1: (-1.0, -1.2), 2: (-1.0, 0.9), 3: (-2.0, -2.1), 4: (1.0, 1.0)}
    with inrun.Ledger(tmp_path / "run", about={"method": "step"}) as ledger:
        ledger.register_samples(texts)
        columns = {f"a#{k}": np.array([values[i][k] for i in range(5)], np.float32) for k in (0, 1)}
        ledger.write(StepRecord(0, np.arange(5), columns, []))
    found = find_planted(inrun.Ledger.open(tmp_path / "run"))
    assert (found.planted, found.samples, found.flagged, found.hits) == (3, 5, 3, 2)
    assert found.precision == pytest.approx(2 / 3) and found.recall == pytest.approx(2 / 3)
    assert found.separation == pytest.approx(3 / 6) and found.among_lowest == 2
    dropped = curate(tmp_path / "run", tmp_path / "curated", view=VIEW).dropped  # the command that the story names
    assert dropped == found.flagged
    assert _separation(np.array([0.0, 1.0]), np.array([1.0, 2.0])) == pytest.approx((1 + 1 + 0.5 + 1) / 4)


def test_a_short_demo_tells_its_story(tmp_path):
    run = str(tmp_path / "demo")
    config = DemoConfig(run=run, steps=16, per_domain=40, held_out=8, planted=12)
    first: dict[str, float] = {}
    result = run_demo(config, lambda s: first.update({} if first else s.validation))
    told = json.loads(json.dumps(findings(run, result, first)))
    assert {r["group"] for r in told["domains"]} == {"reference", "code", "docstrings", "tables", "noise", "scrambled"}
    for name, (before, after) in told["losses"].items():
        assert after < before
        rows = {r["group"]: r["mean_per_sample"] for r in told["domains"] if r["validation"] == name}
        assert rows[name] > rows["noise"]
    assert told["books"]["validation_sets"][0]["audited"] >= 2
    with CliRunner(env={"COLUMNS": "80"}).isolation() as streams:
        tell_story(told, None)
        text = streams[0].getvalue().decode()
    lines = [line for line in text.splitlines() if run not in line]
    assert max(map(len, lines)) <= 80 and "helped most" in text and "e-6" not in text
    assert "precision" in text and "The books" in text and f"inrun curate {run}" in text.replace("\n", "")
    assert run_demo(replace(config, steps=1)).finished  # a demo is replaced by the next
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigurationError, match="not a demo"):
        run_demo(DemoConfig(run=str(tmp_path / "mine")))
    assert (tmp_path / "mine" / "thesis.txt").exists() and (tmp_path / "demo" / MARK).exists()


def test_the_story_prints_no_control_characters(tmp_path):
    hostile = "\x1b[31m[bold]red\x07\u202eevil"
    run = tmp_path / "run"
    with inrun.Ledger(run, about={"method": "step"}) as ledger:
        ledger.register_samples([{"sample_id": i, "source": hostile, "domain": hostile, "text": hostile} for i in range(3)])
        ledger.write(StepRecord(0, np.arange(3), {"a": np.array([1.0, -1.0, 0.5], np.float32)}, []))
    result = Result(Status(1, 1, validation={"a": 1.0}), True, 0, 1.0)
    with CliRunner().isolation() as streams:
        tell_story(findings(run, result, {"a": 2.0}), None)
        text = streams[0].getvalue().decode()
    assert "[bold]red" in text
    assert not any(c in text for c in "\x1b\x07\u202e")

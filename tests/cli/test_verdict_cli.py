"""What `inrun audit`, and the last words of training and of the demo, say of the books."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from inrun.cli.demo_story import _tell_books
from inrun.cli.main import cli
from inrun.cli.train_progress import ending
from inrun.ledger import Ledger, StepRecord


def run(path, rough: int | None = 20, audited: int = 2, name: str = "v", **about):
    """Forty steps, one of them rough, the first few audited."""
    rng = np.random.default_rng(0)
    with Ledger(path, about={"method": "step"} | about) as ledger:
        for step in range(40):
            values = rng.normal(0, 0.01, 8) * (50 if step == rough else 1)
            spread, data = float(np.abs(values).sum()), float(values.sum())
            row = {"step": step, "validation": name, "loss_before": 3.0, "data": data, "spread": spread, "lr": 1.0, "n_samples": 8}
            row["clip"] = 0.05 if step == rough else 1.0
            if step < audited:
                row |= {"loss_after": 2.9 - data, "decay": 0.0, "residual": 1e-3 * spread}
                row |= {} if about.get("method") == "whole" else {"momentum": 0.1}
            ledger.write(StepRecord(step, np.arange(8) + 8 * step, {name: values.astype(np.float32)}, [row]))
    return path


def test_audit_tells_people_and_machines(tmp_path) -> None:
    path = str(run(tmp_path / "run"))
    shown = CliRunner().invoke(cli, ["audit", path])
    assert shown.exit_code == 0, shown.output
    for words in ("too little to judge", "step 20:", "clipped to 0.05", "not audited", "top 3 % of steps", "audit_every=1"):
        assert words in shown.output, words
    assert "balance" not in shown.output
    told = json.loads(CliRunner().invoke(cli, ["audit", path, "--json"]).output)
    (found,) = told["validation_sets"]
    assert told["method"] == "step" and found["state"] == "thin" and found["audited_share"] < 0.5
    assert [o["step"] for o in found["outsized"]] == [20] and found["outsized_share"] == found["outsized"][0]["share"] > 0.4
    assert {"scores_sum", "top_share", "samples", "advice", "verdict", "inherited"} <= set(found)


def test_a_calm_run_audited_throughout_balances(tmp_path) -> None:
    path = str(run(tmp_path / "run", rough=None, audited=40))
    shown = CliRunner().invoke(cli, ["audit", path])
    assert "the books balance" in shown.output and "step 20" not in shown.output and "rank" not in shown.output


def test_the_end_of_training_names_steps_and_what_to_do(tmp_path) -> None:
    lines = ending(str(run(tmp_path / "rough", name="\x1b[31mred")))
    text = "\n".join(lines)
    assert "too little to judge" in text and "step 20:" in text and "  > Audit more often" in text and "\x1b" not in text
    calm = ending(str(run(tmp_path / "calm", rough=None, audited=40)))
    assert "the books balance" in calm[0] and not any("step 20" in line or "top 3 %" in line for line in calm)


@pytest.mark.parametrize(
    ("method", "says", "never"), [("whole", "Every push belongs to a sample", "Momentum"), ("step", "Momentum is", "push belongs")]
)
def test_the_demo_tells_which_method_it_had(tmp_path, capsys, method, says, never) -> None:
    from rich.console import Console

    from inrun.analysis import summarise_run

    books = summarise_run(run(tmp_path / "run", audited=40, method=method)).as_dict()
    _tell_books(Console(width=200), {"books": books})
    text = capsys.readouterr().out
    assert says in text and never not in text and "step 20 holds" in text and "data" in text

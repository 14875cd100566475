"""The study of fidelity: the engine beside the real game, on a model that is left as it was."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

import inrun
from inrun.cli.main import cli
from inrun.errors import ConfigurationError, StepError
from inrun.experiments.fidelity import FidelityConfig, run_fidelity, sample_losses_of
from inrun.fidelity import fidelity
from inrun.training.gpt import next_token_loss
from tiny import batch, tiny, train_step, validation


def trained(kind: str = "adamw", steps: int = 5, dropout: float = 0.0):
    model = tiny(dropout=dropout)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
        if kind == "adamw"
        else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    for step in range(steps):
        next_token_loss(model, batch(6, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def snapshot(model, optimizer):
    state = [(k, v.clone() if isinstance(v, torch.Tensor) else v) for s in optimizer.state.values() for k, v in s.items()]
    return [p.detach().clone() for p in model.parameters()], state, torch.get_rng_state()


def same(a, b) -> bool:
    return (
        all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
        and all(k == j and torch.equal(torch.as_tensor(x), torch.as_tensor(y)) for (k, x), (j, y) in zip(a[1], b[1], strict=True))
        and torch.equal(a[2], b[2])
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_midpoint_is_nearly_the_truth_and_the_proxy_is_not(kind: str) -> None:
    model, optimizer = trained(kind)
    before = snapshot(model, optimizer)
    report = fidelity(model, optimizer, validation(), sample_losses_of(batch(6, 50)), exact=True, max_norm=1.0, subsets=20)
    assert same(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert report["midpoint+secant"].spearman >= 0.99
    assert report["midpoint+secant"].residual < 0.01
    assert report["midpoint+secant"].rmse < report["first+frozen"].rmse
    if kind == "adamw":
        assert report["first+sgd"].residual > 0.5  # the control: SGD scores of an AdamW step explain little
    assert report.utility.second_pearson > report.utility.first_pearson - 1e-9
    assert "midpoint+secant" in str(report)
    json.dumps(report.as_dict())
    with pytest.raises(KeyError, match="tried were"):
        report["third+sgd"]


def test_dropout_falls_as_in_the_step() -> None:
    """Truth and engine see the same masks: the random state is that of the step."""
    model, optimizer = trained(dropout=0.3)
    report = fidelity(model, optimizer, validation(), sample_losses_of(batch(5, 50)), exact=True, choices=[("midpoint", "secant")])
    assert report["midpoint+secant"].residual < 0.01
    assert report["midpoint+secant"].spearman >= 0.9


def test_on_the_accountant_between_two_steps(tmp_path) -> None:
    """Scores of later steps are the same with and without the study in between."""
    runs = []
    for studied in (False, True):
        model, optimizer = trained()
        losses = {
            "a": validation(),
            "b": inrun.folds(lambda m: torch.stack([next_token_loss(m, r) for r in batch(4, 3).split(1)]), 2),
        }
        with inrun.Accountant(model, optimizer, losses, method="midpoint", quadrature="simpson") as accountant:
            train_step(accountant, model, optimizer, batch(5, 60))
            if studied:
                report = accountant.fidelity(sample_losses_of(batch(5, 61)), validation="b", permutations=6)
                assert report.validation == "b"
                assert report.step == 1
                report.save_picture(str(tmp_path / "scatter.png"))
                assert (tmp_path / "scatter.png").stat().st_size > 10_000
                with pytest.raises(ConfigurationError, match="a, b"):
                    accountant.fidelity(sample_losses_of(batch(5, 61)), validation="c")
                with pytest.raises(StepError, match="open"), accountant.step(range(5)):
                    accountant.fidelity(sample_losses_of(batch(5, 61)))
            runs.append(train_step(accountant, model, optimizer, batch(5, 61)).contributions["a"])
    assert torch.equal(*runs)


def test_experiment_and_command(tmp_path) -> None:
    small = [
        "--steps",
        "2",
        "--seeds",
        "0",
        "--batch",
        "4",
        "--permutations",
        "4",
        "--width",
        "8",
        "--layers",
        "1",
        "--context",
        "12",
    ]
    done = CliRunner().invoke(cli, ["fidelity", *small, "--lr", "1e-3", "--subsets", "5", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "midpoint+secant" in done.output.replace("\n", "")
    data = json.loads((tmp_path / "out" / "fidelity.json").read_text())
    assert {row["choice"] for row in data["table"]} >= {"first+sgd", "midpoint+secant"}
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
    wrong = CliRunner().invoke(cli, ["fidelity", "--lr", "fast"])
    assert wrong.exit_code == 2
    assert "6e-4,5e-3" in wrong.output
    config = FidelityConfig(
        lrs=(1e-3, 1e-2), steps=(1,), seeds=(0,), batch=3, permutations=2, proxy=True, width=8, layers=1, context=12
    )
    cells = run_fidelity(config)
    assert [c.lr for c in cells] == [1e-3, 1e-2]
    assert [r.name for r in cells[0].report.results] == ["first+sgd", "second+sgd", "midpoint+sgd"]
    with pytest.raises(ConfigurationError, match="adamw and sgd"):
        run_fidelity(FidelityConfig(optimizer="lion", steps=(0,)))

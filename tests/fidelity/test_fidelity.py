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
def test_every_method_is_nearly_the_truth_of_its_own_game(kind: str) -> None:
    model, optimizer = trained(kind)
    before = snapshot(model, optimizer)
    report = fidelity(model, optimizer, validation(), sample_losses_of(batch(6, 50)), exact=True, max_norm=1.0, subsets=20)
    assert same(before, snapshot(model, optimizer))
    assert all(p.grad is None for p in model.parameters())
    assert {r.method: r.game for r in report.results} == {"step": "real", "first": "sgd", "second": "sgd"}
    assert all(r.spearman >= 0.99 for r in report.results)
    assert report["second"].residual < 0.01 and report["second"].rmse <= report["first"].rmse
    # Under AdamW a coalition also moves the second moment, which the shares of the real move do not know.
    assert report["step"].residual < (0.25 if kind == "adamw" else 0.01)
    assert report.utility.second_pearson > report.utility.first_pearson - 1e-9
    assert "the paper's step of plain SGD" in str(report) and "the step of the real optimizer" in str(report)
    json.dumps(report.as_dict())
    with pytest.raises(KeyError, match="tried were step, first, second"):
        report["third"]


def test_the_methods_of_the_paper_are_not_the_truth_of_an_adamw_step() -> None:
    """The control of the test above: methods judged by the other's game."""
    model, optimizer = trained()
    real, sgd = (
        fidelity(model, optimizer, validation(), sample_losses_of(batch(6, 50)), exact=True, max_norm=1.0, game=game)
        for game in ("real", "sgd")
    )
    assert all(real[m].rmse > 3 * real["step"].rmse and real[m].residual > 2 * real["step"].residual for m in ("first", "second"))
    assert sgd["step"].rmse > 100 * sgd["second"].rmse and sgd["step"].spearman < 0.9 < sgd["second"].spearman
    assert real.truths.keys() == {"real"} and sgd.truths.keys() == {"sgd"}


def with_steady_factor(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let the second moment stand still, and steps be short."""
    for group in optimizer.param_groups:
        group |= {"betas": (0.9, 0.999999), "lr": 2e-5}
    for state in optimizer.state.values():
        state["step"].fill_(10**7)
    return optimizer


def test_step_is_the_truth_where_the_second_moment_stands_still() -> None:
    model, optimizer = trained()
    report = fidelity(
        model, with_steady_factor(optimizer), validation(), sample_losses_of(batch(6, 50)), exact=True, methods=["step"]
    )
    assert report["step"].residual < 1e-3 and report["step"].pearson > 0.9999


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"methods": ["whole"]}, "Whole credit is paid over later steps"),
        ({"methods": ["midpoint"]}, "method is 'midpoint'. Accepted are step, first, second"),
        ({"methods": []}, "methods is empty"),
        ({"game": "adamw"}, "game is 'adamw'. Accepted are real, sgd"),
    ],
)
def test_what_cannot_be_judged_is_refused(options: dict, says: str) -> None:
    model, optimizer = trained(steps=1)
    with pytest.raises(ConfigurationError, match=says):
        fidelity(model, optimizer, validation(), sample_losses_of(batch(3, 50)), **options)


def test_dropout_falls_as_in_the_step() -> None:
    """Truth and engine see the same masks: the random state is that of the step."""
    model, optimizer = trained(dropout=0.3)
    report = fidelity(
        model, with_steady_factor(optimizer), validation(), sample_losses_of(batch(5, 50)), exact=True, methods=["step"]
    )
    assert report["step"].residual < 0.01
    assert report["step"].spearman >= 0.9


def test_on_the_accountant_between_two_steps(tmp_path) -> None:
    """Scores of later steps are the same with and without the study in between."""
    runs = []
    for studied in (False, True):
        model, optimizer = trained()
        losses = {
            "a": validation(),
            "b": inrun.folds(lambda m: torch.stack([next_token_loss(m, r) for r in batch(4, 3).split(1)]), 2),
        }
        with inrun.Accountant(model, optimizer, losses, method="step") as accountant:
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
    assert "step" in done.output and "second" in done.output
    data = json.loads((tmp_path / "out" / "fidelity.json").read_text())
    assert {row["method"] for row in data["table"]} == {"step", "first", "second"}
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
    wrong = CliRunner().invoke(cli, ["fidelity", "--lr", "fast"])
    assert wrong.exit_code == 2
    assert "6e-4,5e-3" in wrong.output
    config = FidelityConfig(
        lrs=(1e-3, 1e-2), steps=(1,), seeds=(0,), batch=3, permutations=2, proxy=True, width=8, layers=1, context=12
    )
    cells = run_fidelity(config)
    assert [c.lr for c in cells] == [1e-3, 1e-2]
    assert [(r.method, r.game) for r in cells[0].report.results] == [("first", "sgd"), ("second", "sgd")]
    with pytest.raises(ConfigurationError, match="adamw and sgd"):
        run_fidelity(FidelityConfig(optimizer="lion", steps=(0,)))

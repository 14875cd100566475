"""The experiments on single steps, at smoke size: the same numbers again, and what they say where it is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from inrun.experiments import efficiency, fidelity, utility
from inrun.experiments.contest import IN_PLACE, Perceptron, Trial, agreement, operations, ways
from inrun.experiments.outputs import save
from inrun.experiments.recipes import Findings, Work, run
from inrun.experiments.states import FidelityConfig, states
from inrun.experiments.ways import Plain


@pytest.fixture(scope="module")
def smoke(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Findings, dict[str, Any]]:
    """An experiment, what it found at smoke size, and its results.json."""
    name, work = request.param, Work(request.param, seeds=(0, 1))
    found = run(name, "smoke", work)
    written = {path.name: path for path in save(found, work, tmp_path_factory.mktemp(name), 1.0)}
    assert written["figure.png"].stat().st_size > 5000
    assert "paper" in written["table.md"].read_text()
    return name, found, json.loads(written["results.json"].read_text())


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("fidelity", "efficiency")]


@pytest.mark.parametrize("smoke", ["utility", *SLOWLY], indirect=True)
def test_a_rerun_gives_the_same_results(smoke: tuple[str, Findings, dict[str, Any]]) -> None:
    name, _, data = smoke
    assert json.loads(json.dumps(run(name, "smoke", Work(name, seeds=(0, 1))).data)) == data


@pytest.mark.parametrize("smoke", ["fidelity"], indirect=True)
def test_fidelity_judges_every_choice_in_every_game(smoke: tuple[str, Findings, dict[str, Any]]) -> None:
    games = smoke[2]["games"]
    assert games.keys() == {"adamw", "paper", "proxy"}
    for game in games.values():
        assert all(-1.0 <= row["spearman"] <= 1.0 and row["rmse"] >= 0.0 for row in game["summary"])
    assert {"step", "first", "second"} == {row["method"] for row in games["adamw"]["summary"]}


@pytest.mark.parametrize("smoke", ["efficiency"], indirect=True)
def test_efficiency_agrees_and_counts(smoke: tuple[str, Findings, dict[str, Any]]) -> None:
    _, found, data = smoke
    for trial in ("gpt", "mlp"):
        facts = data["trials"][trial]
        assert facts["agrees"].keys() == {way.name for way in ways() if way.meets} and all(facts["agrees"].values())
        assert {line["name"] for line in found.measured[trial]} == facts["flops"].keys()
        assert min(facts["flops"].values()) == facts["flops"]["plain"]  # nobody gets by with less than training
        assert all(line["seconds"] > 0 and line["cpu_seconds"] > 0 for line in found.measured[trial])
    assert "seconds" not in json.dumps(data)  # times are kept apart


@pytest.mark.parametrize("smoke", ["utility"], indirect=True)
def test_the_second_order_utility_is_closer(smoke: tuple[str, Findings, dict[str, Any]]) -> None:
    for game in smoke[2]["games"].values():
        rows = {(row["lr"], row["kind"]): row for row in game["summary"]}
        for lr in utility.SIZES["smoke"].study.lrs:
            assert rows[lr, "two"]["rmse"] <= rows[lr, "one"]["rmse"] * 1.01


def test_operations_of_plain_training_are_those_of_the_formula() -> None:
    """Forward, input gradient (not of the first layer) and weight gradient: 2 operations per weight and row each."""
    shape = Perceptron(width=12, layers=3, classes=5, batch=7)
    counted = operations(Trial("mlp", shape, 1, 1))
    weights = [12 * 12, 12 * 12, 12 * 5]
    expected = 2 * 7 * (3 * sum(weights) - weights[0])
    assert counted["plain"] == expected
    # The ghost recursion adds a few passes over one validation row and products of rows, nothing of the size of the batch gradient.
    assert counted["second, ghost"] < 2 * expected < counted["second, direct"]
    running = Plain(shape.task())
    with FlopCounterMode(display=False) as counter:
        running.step(0)
    assert counter.get_total_flops() == expected


def test_products_that_are_added_in_place_are_counted() -> None:
    a, b, sums = torch.zeros(3, 4), torch.zeros(4, 5), torch.zeros(2, 3, 5)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter:
        sums[0].addmm_(a, b)
        sums.baddbmm_(a.expand(2, 3, 4), b.expand(2, 4, 5))
    assert counter.get_total_flops() == 3 * 2 * 3 * 4 * 5


def test_agreement_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the Hessian the second order does not meet its definition."""
    trial = Trial("mlp", Perceptron(width=8, layers=3, batch=4), 1, 1)
    assert agreement(trial)["second, ghost"]
    monkeypatch.setattr("inrun.paper.backpropagation.hessian_terms", lambda every, q, n: iter(()))
    assert not agreement(trial)["second, ghost"]
    assert {way.name for way in ways()} >= set(efficiency.PAPER)


def test_orders_of_the_games_at_large_steps() -> None:
    """Summed losses make a larger step than the clipped mean, and first order is worse there."""
    config = fidelity.StudyConfig(steps=(20,), permutations=20, batch=6, context=16, width=16, layers=1, lrs=(0.02,))
    rows = {}
    for name in fidelity.PAPERS_OWN:
        cells = run_game(config, name)
        rows[name] = {row["method"]: row for row in fidelity.summarise(cells)}
    for found in rows.values():
        assert found["second"]["rmse"] < found["first"]["rmse"]
    assert rows["paper"]["first"]["rmse_relative"] > 2 * rows["proxy"]["first"]["rmse_relative"]


def run_game(config: fidelity.StudyConfig, name: str) -> list[dict[str, object]]:
    cells = fidelity.run_fidelity(config.game(name, 0))
    return [{"seed": c.seed, "lr": c.lr, **c.report.as_dict()} for c in cells]


def test_states_give_the_learning_rate_back() -> None:
    config = FidelityConfig(lrs=(0.1, 0.2), steps=(1, 2), seeds=(0,), batch=2, proxy=True, context=8, width=8, layers=1, heads=2)
    seen = [(state.lr, state.step, state.optimizer.param_groups[0]["lr"], state.optimizer) for state in states(config)]
    assert [(lr, step) for lr, step, _, _ in seen] == [(0.1, 1), (0.2, 1), (0.1, 2), (0.2, 2)]
    assert all(lr == during for lr, _, during, _ in seen)
    assert seen[0][3].param_groups[0]["lr"] == 6e-4

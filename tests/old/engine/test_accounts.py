"""The books: measured, not remainders of each other; folds and their errors; what is said about them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from scipy import stats
from torch import Tensor, nn

import inrun
from inrun.cli.main import cli
from inrun.errors import ConfigurationError, LedgerError, ValidationError
from inrun.ledger import StepRecord
from inrun.training.gpt import next_token_loss
from reference import real_move, relative_error
from tiny import batch, tiny, train_step, validation


def loss_at(model: nn.Module, fn, moves: list[Tensor]) -> float:
    parameters = list(model.parameters())
    saved = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, d in zip(parameters, moves, strict=True):
            p.add_(d)
        value = float(fn(model))
        for p, w in zip(parameters, saved, strict=True):
            p.copy_(w)
    return value


@pytest.mark.parametrize("method", ["first", "lookahead", "second", "midpoint"])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "adam coupled"])
def test_accounts_are_measured(method: str, kind: str) -> None:
    model, fn = tiny(), validation()
    p = model.parameters()
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
        "sgd": lambda: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.2),
        "adam coupled": lambda: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    }[kind]()
    with inrun.Accountant(model, optimizer, fn, method=method, audit_every=1) as accountant:
        for step in range(3):
            parameters = list(model.parameters())
            zero = [real_move(optimizer, p, torch.zeros_like(p)) for p in parameters]
            before, coasted = loss_at(model, fn, [0 * z for z in zero]), loss_at(model, fn, zero)
            lr, decay = optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
            shrunk = loss_at(model, fn, [-lr * decay * p.detach() for p in parameters])
            account = train_step(accountant, model, optimizer, batch(4, step)).accounts["validation"]
            after = float(fn(model).detach())
            total = float(accountant.last.contributions["validation"].sum())
            assert account.loss_before == pytest.approx(before, rel=1e-12)
            assert account.loss_after == pytest.approx(after, rel=1e-12)
            assert account.optimizer == pytest.approx(before - coasted, abs=1e-12)
            assert account.data == pytest.approx(total, rel=1e-9)
            assert account.residual == pytest.approx(coasted - after - total, abs=1e-12)
            assert account.data + account.optimizer + account.residual == pytest.approx(before - after, abs=1e-12)
            if kind == "adam coupled":
                assert account.decay is None
                assert account.momentum is None
            else:
                assert account.momentum + account.decay == pytest.approx(account.optimizer, abs=1e-12)
            if kind == "adamw":
                assert account.decay == pytest.approx(before - shrunk, abs=1e-12)


@pytest.mark.slow
def test_residual_shrinks_with_finer_methods() -> None:
    """On AdamW: the SGD proxy leaves most of it unexplained, midpoint with secant shares nearly nothing."""
    merits = {}
    for method, update in (("first", "sgd"), ("first", "frozen"), ("midpoint", "secant")):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, betas=(0.9, 0.95))
        with inrun.Accountant(model, optimizer, validation(), method=method, update=update, audit_every=1) as accountant:
            for step in range(12):
                train_step(accountant, model, optimizer, batch(6, step))
            late = [r for r in accountant.ledger.accounts().to_pylist() if r["step"] >= 4]
        merits[method, update] = sum(abs(r["residual"]) for r in late) / sum(r["spread"] for r in late)
    assert merits["midpoint", "secant"] < 0.01
    assert merits["midpoint", "secant"] < merits["first", "frozen"] < merits["first", "sgd"]


def test_an_optimizer_without_a_rule_has_no_optimizer_account() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = tiny()
    optimizer = Mine(model.parameters(), lr=0.1)
    with inrun.Accountant(model, optimizer, validation(), update="sgd", audit_every=1) as accountant:
        account = train_step(accountant, model, optimizer, batch(3, 0)).accounts["validation"]
        assert account.optimizer is None
        assert account.residual is None
        assert "not measured" in str(accountant.summary())


def test_summary_says_what_the_residual_means() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=20.0)
    with inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step") as accountant:
        for step in range(3):
            train_step(accountant, model, optimizer, batch(4, step))
        page = str(accountant.summary())
    assert "too coarse" in page
    assert "midpoint" in page
    for word in ("data", "momentum", "decay", "residual", "|residual| / Σ|c_n|", "largest residuals"):
        assert word in page


def test_audit_command(tmp_path) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with inrun.Accountant(model, optimizer, validation(), method="midpoint", audit_every=1) as accountant:
        for step in range(4):
            train_step(accountant, model, optimizer, batch(4, step))
        accountant.save(str(tmp_path / "run"))
        with pytest.raises(LedgerError, match="already"):
            accountant.save(str(tmp_path / "run"))
        shown = CliRunner().invoke(cli, ["audit", str(tmp_path / "run")])
        assert shown.exit_code == 0, shown.output
        assert shown.output.strip() == str(accountant.summary())
    data = json.loads(CliRunner().invoke(cli, ["audit", str(tmp_path / "run"), "--json"]).output)
    assert data["method"] == "midpoint"
    assert data["validation_sets"][0]["audited"] == 4
    empty = CliRunner().invoke(cli, ["audit", str(tmp_path)])
    assert isinstance(empty.exception, LedgerError) or "run.json" in empty.output


# Folds


def per_point(rows: Tensor):
    return lambda model: torch.stack([next_token_loss(model, row) for row in rows.split(1)])


@pytest.mark.parametrize("method", ["first", "lookahead", "second", "midpoint"])
def test_folds_average_to_the_whole_set(method: str) -> None:
    rows = batch(6, 99)
    found = {}
    for name, fn in (("whole", lambda m: per_point(rows)(m).mean()), ("folds", inrun.folds(per_point(rows), 3))):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # At rough steps folds may ask for more points than their mean does; a rule that is named is kept.
        rule = {"quadrature": "midpoint"} if method == "midpoint" else {}
        with inrun.Accountant(model, optimizer, {"v": fn}, method=method, audit_every=1, **rule) as accountant:
            for step in range(3):
                found[name] = train_step(accountant, model, optimizer, batch(4, step))
            table = accountant.scores()
        found[name, "scores"] = table
    assert relative_error(found["folds"].contributions["v"], found["whole"].contributions["v"]) < 1e-9
    assert found["folds"].standard_errors["v"].shape == (4,)
    assert found["whole"].standard_errors == {}
    a, b = found["whole", "scores"], found["folds", "scores"]
    assert a["sample_id"].to_pylist() == b["sample_id"].to_pylist()
    assert np.allclose(a["score"], b["score"], rtol=1e-4, atol=1e-7)
    assert b["validation"].unique().to_pylist() == ["v"]
    assert a["standard_error"].null_count == 4
    assert b["standard_error"].null_count == 0
    assert found["folds"].accounts["v"].residual == pytest.approx(found["whole"].accounts["v"].residual, abs=1e-9)


def test_fold_errors_in_the_ledger_are_those_of_summed_folds() -> None:
    """The error of a score comes from the folds' sums over steps, not from single steps' errors."""
    ledger = inrun.MemoryLedger()
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(5, 4, 3)).astype(np.float32)  # steps, folds, samples
    for step in range(5):
        values = {f"v#{j}": parts[step, j] for j in range(4)}
        ledger.write(StepRecord(step, np.arange(3), values, []))
    table = ledger.scores()
    sums = parts.astype(np.float64).sum(0)
    assert np.allclose(table["score"], sums.mean(0))
    assert np.allclose(table["standard_error"], sums.std(0, ddof=1) / 2)


class Point(nn.Module):
    """w moves by the mean of what is asked for; each validation point pulls with a strength of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w(x)


@pytest.mark.slow
def test_fold_errors_are_honest() -> None:
    """Simulated data with known noise: 95 % intervals cover the true score 90 to 98 % of the time."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 1, generator=generator)
    k, covered, trials = 10, 0, 0
    quantile = stats.t.ppf(0.975, k - 1)
    for _ in range(150):
        strength = 1.0 + 2.0 * torch.randn(40, generator=generator)  # the population's mean pull is 1
        scores = {}
        for name, fn in (
            ("sampled", inrun.folds(lambda m, s=strength: s * m(torch.ones(1, 1)).sum(), k)),
            ("true", lambda m: 1.0 * m(torch.ones(1, 1)).sum()),
        ):
            model = Point()
            nn.init.zeros_(model.w.weight)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with inrun.Accountant(model, optimizer, {"v": fn}, check_rows=False, audit_every=0, credit="step") as accountant:
                for _ in range(3):
                    with accountant.step(range(4)):
                        (model(x) * x).sum().backward()
                        optimizer.step()
                        optimizer.zero_grad()
                scores[name] = accountant.scores()
        score, error = np.array(scores["sampled"]["score"]), np.array(scores["sampled"]["standard_error"])
        true = np.array(scores["true"]["score"])
        # All samples see the same validation points, so one of them is one trial.
        covered += int(abs(score[0] - true[0]) <= quantile * error[0])
        trials += 1
    assert 0.90 <= covered / trials <= 0.985, covered / trials


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: inrun.folds(lambda m: None, 1), ConfigurationError, "at least 2"),
        (lambda: inrun.folds(lambda m: None, True), ConfigurationError, "at least 2"),
        (lambda: inrun.folds(3, 2), ConfigurationError, "callable"),
    ],
)
def test_bad_folds(make, error, match: str) -> None:
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize("losses", [lambda m: per_point(batch(5, 0))(m), lambda m: per_point(batch(4, 0))(m).mean()])
def test_folds_need_a_vector_that_divides(losses) -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with inrun.Accountant(model, optimizer, inrun.folds(losses, 2), credit="step") as accountant:
        with pytest.raises(ValidationError, match="multiple of k=2"):
            train_step(accountant, model, optimizer, batch(3, 0))


def test_names_that_look_like_folds_are_refused() -> None:
    model = tiny()
    with pytest.raises(ConfigurationError, match="folds and points"):
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), {"a#1": validation()}, credit="step")


def test_coverage_tells_what_waits() -> None:
    for method, timing in (("first", {"streaming", "deferred"}), ("midpoint", {"deferred"}), ("second", {"deferred"})):
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with inrun.Accountant(model, optimizer, validation(), method=method) as accountant:
            assert {row.timing for row in accountant.coverage} == timing
    assert math.isfinite(1.0)


def test_the_figure_of_merit_is_that_of_the_set_not_of_its_folds():
    """|residual| of the mean over folds belongs to Σ|c_n| of that mean: folds that disagree must not make it look smaller."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = batch(8, seed=4)

    def losses(m):
        return torch.stack([next_token_loss(m, row) for row in batch(4, seed=5).split(1)])

    accountant = inrun.Accountant(model, optimizer, inrun.folds(losses, 4), method="first", audit_every=1)
    for _ in range(3):
        train_step(accountant, model, optimizer, rows)
        account = accountant.last.accounts["validation"]
        mean = accountant.last.contributions["validation"].double()
        written = [r for r in accountant.ledger.accounts().to_pylist() if r["step"] == accountant.last.step]
        assert len(written) == 4
        for row in written:
            assert row["spread"] == pytest.approx(float(mean.abs().sum()), rel=1e-5) == pytest.approx(account.spread, rel=1e-5)
    apart = [abs(r["data"]) for r in written]
    assert max(apart) > min(apart)  # the control: the folds do disagree
    accountant.close()

"""The accountant over whole runs: what is recorded, where, and what it says of itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from hostile_html import plain_text
from inrun.cli.main import cli
from inrun.engine.options import Coverage, CoverageRow, Options, audit_due
from inrun.errors import ConfigurationError, CoverageError, IdsError, LedgerError
from inrun.notebook import html
from loops import METHODS, adamw, attach, distance, held_out, losses, perceptron, points, run_step, scores_by_id, sgd, train
from report_payloads import PAYLOADS
from tiny import batch, tiny, train_step, validation

EVERY = pytest.mark.parametrize("method", METHODS)
EVIL = "<img src=x onerror=alert(1)>"


# Steps


@EVERY
def test_repeated_ids_add_up_and_are_counted(method: str) -> None:
    accountant = attach(perceptron(), **METHODS[method])
    for t, ids in enumerate(([7, 7, 9, 7], [9, 8])):
        x = points(len(ids), t)
        run_step(accountant, lambda x=x: losses(accountant.model, x).mean(), ids)
    accountant.close()
    table = accountant.scores()
    assert isinstance(table, pa.Table)
    rows = {r["sample_id"]: r for r in table.to_pylist()}
    assert {i: (r["times_used"], r["first_step"], r["last_step"]) for i, r in rows.items()} == {
        7: (3, 0, 0),
        8: (1, 1, 1),
        9: (2, 0, 1),
    }


@EVERY
@pytest.mark.parametrize("maximize", [False, True])
def test_positive_means_that_a_sample_lowered_the_loss(method: str, maximize: bool) -> None:
    """A batch of validation data itself helps; ascending on it hurts."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=maximize)
    own = lambda m: losses(m, points(4, 5)).mean()  # noqa: E731
    accountant = attach(model, optimizer, own, audit_every=1, **METHODS[method])
    before = float(own(model).detach())
    run_step(accountant, lambda: own(model), range(4))
    fell = before - float(own(model).detach())
    assert (fell > 0) is not maximize
    assert float(accountant.last.contributions["validation"].sum()) == pytest.approx(fell, rel=0.05)


@EVERY
def test_a_sample_without_loss_gets_nothing_and_equal_samples_the_same(method: str) -> None:
    x = points(6, 1)
    x[4] = x[1]
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    accountant = attach(perceptron(), **METHODS[method])
    for _ in range(2):
        got = run_step(accountant, lambda: (losses(accountant.model, x) * mask).sum(), range(6))
    assert got[2] == 0 and bool((got[[0, 1, 3, 4, 5]] != 0).all())
    assert float((got[4] - got[1]).abs()) < 1e-12 * float(got.abs().max())
    assert float((got[4] - got[0]).abs()) > 1e-3 * float(got.abs().max())  # the control


@EVERY
def test_scores_are_linear_in_the_validation_loss(method: str) -> None:
    a, b = (lambda m, k=k: losses(m, points(3, k)).mean() for k in (91, 92))
    sets = {"a": a, "b": b, "mix": lambda m: 0.3 * a(m) + 2 * b(m)}
    accountant = attach(perceptron(), validation=sets, **METHODS[method])
    train(accountant, range(2))
    c = accountant.last.contributions
    assert distance(c["mix"], 0.3 * c["a"] + 2 * c["b"]) < 1e-9


def test_a_loop_that_fills_one_buffer_again_and_again() -> None:
    found = []
    for refills in (False, True):
        for method in METHODS:
            model = tiny(tied=False)
            accountant = attach(model, adamw(model), validation(), audit_every=1, **METHODS[method])
            buffer = torch.empty(3, 9, dtype=torch.long)
            for t in (0, 2):
                with accountant.step() as step:
                    for seed in (t, t + 1):
                        rows = batch(3, seed)
                        tokens = buffer.copy_(rows[:, :-1]) if refills else rows[:, :-1]
                        with step.microbatch(range(3)):
                            F.cross_entropy(model(tokens).flatten(0, 1), rows[:, 1:].flatten()).backward()
                    accountant.optimizers[0].step()
                    accountant.optimizers[0].zero_grad()
            found.append(scores_by_id(accountant))
    assert found[: len(METHODS)] == found[len(METHODS) :]


def test_modes_may_change_between_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double().train()
    accountant = attach(model, validation=lambda m: losses(m, points(3, 9)).mean(), audit_every=1)

    def loss() -> Tensor:
        found = losses(model, points(4, 0)).mean()
        model.eval()
        return found

    run_step(accountant, loss, range(4))
    assert not model.training and accountant.last.audited


def test_half_precision_does_not_overflow() -> None:
    """lr / (√v + ε) can exceed what float16 holds, where gradients are tiny."""
    x = 1e-4 * torch.randn(6, 4).half()
    for method in METHODS:
        if method == "second":
            continue
        model = nn.Linear(4, 3).half()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1e-7, weight_decay=0.0)
        accountant = attach(model, optimizer, lambda m: m(x).float().sum(), **METHODS[method])
        for _ in range(3):
            got = run_step(accountant, lambda m=model: m(x).float().sum(), range(6))
            assert accountant.last.skipped is None and bool(torch.isfinite(got).all())


def test_patterns_of_parameters_choose_what_is_scored() -> None:
    found = [
        train(attach(perceptron(), method="first", parameters=p), range(1))[0] for p in (None, ["a.*"], ["b.weight", "b.bias"])
    ]
    assert distance(found[1] + found[2], found[0]) < 1e-12
    accountant = attach(perceptron(), parameters=["a.*"])
    assert [(row.parameter, row.scored) for row in accountant.coverage][::2] == [("a.weight", True), ("b.weight", False)]
    assert accountant.coverage.scored_share == pytest.approx(25 / 43)
    assert accountant.coverage.line() == "58.14 % of 43 trainable entries; not scored: b.weight, b.bias"
    with pytest.raises(CoverageError, match=r"matches \['head'\]"):
        attach(perceptron(), parameters=["head"])


def test_groups_have_their_own_rates_and_a_loaded_state_its_own() -> None:
    """Contributions add up over groups: two groups score as the sum of training each with the other at rate 0."""
    found = []
    for rates in ((0.01, 0.03), (0.01, 0.0), (0.0, 0.03)):
        model = perceptron()
        groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip((model.a, model.b), rates, strict=True)]
        found += train(attach(model, torch.optim.SGD(groups, lr=1.0), method="first"), range(1))
    assert distance(found[1] + found[2], found[0]) < 1e-12
    for method in ("first", "step"):
        halved = []
        for lr in (0.05, 0.025):
            model = perceptron()
            optimizer = sgd(model, momentum=0.0)
            accountant = attach(model, optimizer, method=method)
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] = lr
            optimizer.load_state_dict(state)  # new dictionaries for the groups
            halved += train(accountant, range(1))
        assert distance(2 * halved[1], halved[0]) < (1e-9 if method == "first" else 0.2)


@pytest.mark.parametrize(
    "options", [{"method": "first"}, {"method": "second"}, {}, {"sketch": "exact"}, {"method": "step"}], ids=str
)
def test_zeros_in_grad_do_not_make_an_idle_optimizer_step(options: dict[str, Any]) -> None:
    found = []
    for set_to_none in (True, False):
        model = perceptron()
        optimizers = [sgd(model.a), sgd(model.b, lr=0.5)]
        accountant = attach(model, optimizers, audit_every=1, **options)
        parts = []
        for t in range(4):
            with accountant.step(range(4)):
                losses(model, points(4, t)).mean().backward()
                for optimizer in optimizers if t < 2 else optimizers[:1]:
                    optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=set_to_none)
            parts.append(accountant.last.contributions["validation"])
        found.append((parts, [p.detach().clone() for p in model.parameters()]))
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert distance(found[1][0], found[0][0]) < 1e-9


def test_audits_are_frequent_at_first() -> None:
    assert [s for s in range(160) if audit_due(s, None)] == [0, 1, 2, 5, 10, 20, 30, 40, 50, 100, 150]
    assert [s for s in range(7) if audit_due(s, 3)] == [0, 3, 6] and not any(audit_due(s, 0) for s in range(3))


@EVERY
def test_audits_do_not_change_scores(method: str) -> None:
    found = [train(attach(perceptron(), audit_every=every, **METHODS[method]), range(8)) for every in (0, 1)]
    assert distance(found[1], found[0]) < (1e-9 if method in ("first", "second") else 0.02)  # audits may take more points


# Ledgers


def run(ledger: Any, names: tuple[str, str] = ("a", "b"), **options: Any) -> inrun.Accountant:
    model = tiny(dtype=torch.float32)
    sets = {names[0]: validation(1), names[1]: inrun.folds(lambda m: torch.stack([validation(2)(m), validation(3)(m)]), 2)}
    accountant = attach(model, adamw(model), sets, ledger=ledger, audit_every=2, **options)
    for t in range(4):
        train_step(accountant, model, accountant.optimizers[0], batch(3, t), ids=[5, -7, 2**62 + t])
    return accountant


@pytest.mark.parametrize("method", ["whole", "first"])
def test_a_folder_holds_what_memory_holds(tmp_path: Path, method: str) -> None:
    on_disk, in_memory = run(tmp_path / "run", **METHODS[method], options=Options(about={"note": 3})), run(None, **METHODS[method])
    assert str(on_disk.summary()) == str(in_memory.summary())
    on_disk.close()
    in_memory.close()
    reader = inrun.Ledger.open(tmp_path / "run")
    key = [("validation", "ascending"), ("sample_id", "ascending")]
    assert reader.scores().sort_by(key).equals(in_memory.scores().sort_by(key))
    assert on_disk.scores().equals(reader.scores())  # still readable after close
    assert reader.accounts().to_pylist() == in_memory.ledger.accounts().to_pylist()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (about["method"], about["validation"], about["note"]) == (method, ["a", "b"], 3) and "torch" in about["software"]
    with pytest.raises(LedgerError, match="resume"):
        run(tmp_path / "run")
    in_memory.save(str(tmp_path / "saved"))
    with pytest.raises(LedgerError, match="already"):
        in_memory.save(str(tmp_path / "saved"))
    shown = [CliRunner().invoke(cli, ["audit", str(tmp_path / place)]).output for place in ("run", "saved")]
    assert shown[0] == shown[1] != ""


def test_a_ledger_is_anything_with_write() -> None:
    records: list[Any] = []

    class Listed:
        def write(self, record: Any) -> None:
            records.append(record)

    accountant = attach(perceptron(), method="first", ledger=Listed(), audit_every=1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(accountant.optimizers[0], 0.1)
    with accountant.step([4, 5, 6]):
        losses(accountant.model, points(3, 0)).mean().backward()
        accountant.optimizers[0].step()
        schedule.step()
    (record,) = records
    assert (record.step, record.sample_ids.tolist(), record.accounts[0]["n_samples"]) == (0, [4, 5, 6], 3)
    assert record.contributions["validation"].dtype.name == "float32" and record.accounts[0]["lr"] == 0.05  # the step's own
    for ask in (accountant.scores, accountant.plot.groups, accountant.summary):
        with pytest.raises(LedgerError, match="Listed only writes"):
            ask()
    assert "books" not in plain_text(accountant._repr_html_())


def test_ledgers_that_answer_are_asked_as_they_can() -> None:
    class Answers:
        def write(self, record: Any) -> None:
            pass

        def scores(self) -> str:
            return "mine"

    accountant = attach(perceptron(), ledger=Answers(), method="first")
    assert accountant.scores() == "mine"
    with pytest.raises(LedgerError, match=r"Answers answers scores\(\) alone"):
        accountant.scores(top=1)


@pytest.mark.parametrize("disk", [False, True])
def test_answers_count_open_windows(disk: bool, tmp_path: Path) -> None:
    accountant = attach(perceptron(), validation={"math": held_out, "code": lambda m: losses(m, points(2, 98)).mean()},
                        ledger=tmp_path / "run" if disk else None)  # fmt: skip
    for t in range(4):
        run_step(accountant, lambda t=t: losses(accountant.model, points(4, t)).mean(), [t, 4, 5, 6])
    accountant.ledger.register_samples([{"sample_id": i, "domain": "even" if i % 2 == 0 else "odd"} for i in range(7)])
    every = {(r["validation"], r["sample_id"]): r for r in accountant.scores().to_pylist()}
    assert all(row["pending"] for row in every.values())
    top = accountant.scores(validation="math", top=2).to_pylist()
    best = sorted((r for (name, _), r in every.items() if name == "math"), key=lambda r: -r["score"])[:2]
    assert [r["sample_id"] for r in top] == [r["sample_id"] for r in best] and top[0]["domain"] in ("even", "odd")
    for row in accountant.scores(by="domain").to_pylist():
        mine = [
            r["score"] for (name, i), r in every.items() if name == row["validation"] and (i % 2 == 0) == (row["group"] == "even")
        ]
        assert row["total"] == pytest.approx(sum(mine))
    drawn = sorted(bar.get_width() for bar in accountant.plot.groups(validation="math", library="matplotlib").axes[0].patches)
    assert drawn == pytest.approx(sorted(r["total"] for r in accountant.scores("math", by="domain").to_pylist()))
    with pytest.raises(ConfigurationError, match="'code', 'math'"):
        accountant.scores("maths")
    accountant.close()
    assert not any(accountant.scores()["pending"].to_pylist())


# What it says of itself


def test_the_accountant_at_a_glance() -> None:
    accountant = run(None, ("math", "code"))
    text = plain_text(accountant._repr_html_())
    for words in ("Accountant of GPT", "whole", "AdamW", "math, code", "100 % of"):
        assert words in text, words
    assert repr(accountant) == "<Accountant of GPT: whole, 4 steps>"
    accountant.close()
    assert "closed" in plain_text(accountant._repr_html_()) and "closed" in repr(accountant)
    assert "no steps yet" in plain_text(attach(perceptron())._repr_html_())


def hostile() -> str:
    model = perceptron()
    model.__class__ = type(EVIL, (type(model),), {})
    names = (EVIL, "$\\href{javascript:alert(1)}{x}$")
    accountant = attach(model, validation=dict.fromkeys(names, held_out), audit_every=1)
    train(accountant, range(2))
    return str(accountant._repr_html_() + accountant.summary()._repr_html_())


def test_hostile_names_stay_text() -> None:
    assert EVIL in plain_text(hostile())


def test_control_unescaped_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html.html, "escape", lambda text, quote=True: text)
    with pytest.raises(AssertionError):
        plain_text(hostile())


def test_coverage_in_a_line() -> None:
    assert Coverage(()).line() == "0 % of 0 trainable entries"
    rows = tuple(CoverageRow(p, i % 2 == 0, 5) for i, p in enumerate(PAYLOADS))
    assert f"{5 * len(rows):,} trainable entries; not scored: {PAYLOADS[1]}, " in Coverage(rows).line()


def test_with_ids() -> None:
    data = inrun.with_ids([("a", 1), ("b", 2)], first=100)
    assert (len(data), data[1], data[-2]) == (2, ("b", 2, 101), ("a", 1, 100))
    assert inrun.with_ids(["x"])[0] == ("x", 0) and inrun.with_ids([{"t": 1}])[0] == {"t": 1, "sample_id": 0}
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(IdsError, match="already"):
        inrun.with_ids([{"sample_id": 1}])[0]
    with pytest.raises(IdsError, match="map-style"):
        inrun.with_ids(iter([1]))
    loader = torch.utils.data.DataLoader(inrun.with_ids([{"x": torch.ones(2)}] * 5), batch_size=2, shuffle=True)
    assert sorted(int(i) for b in loader for i in b["sample_id"]) == [0, 1, 2, 3, 4]


@EVERY
def test_clipping_by_a_hook_that_came_later_is_seen(method: str) -> None:
    """Another library's pre-hook, registered after the accountant's, clips: the accountant's still runs last."""
    found = []
    for by_hook in (False, True):
        model = perceptron()
        accountant = attach(model, audit_every=1, **METHODS[method])
        clip = lambda *_, model=model: [torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)].clear()  # noqa: E731
        if by_hook:
            accountant.optimizers[0].register_step_pre_hook(clip)
        found.append(train(accountant, range(3), between=(lambda: None) if by_hook else clip))
        assert accountant.last.clip[0] < 1.0
    assert distance(*found) < 1e-9


@pytest.mark.parametrize("method", ["whole", "step", "first"])
def test_a_validation_that_draws_is_one_function_within_a_step(method: str) -> None:
    drawn: list[tuple[int, float]] = []

    def some(model: Any, step: int) -> Tensor:
        drawn.append((step, random.random() + float(np.random.rand()) + float(torch.rand(()))))
        return losses(model, points(3, int(1e6 * drawn[-1][1]))).mean()

    random.seed(1)
    accountant = attach(perceptron(), validation=some, audit_every=1, **METHODS[method])
    train(accountant, range(3))
    assert len(drawn) > 3 and len(set(drawn)) == 3 == len({step for step, _ in drawn})
    after = random.random()
    random.seed(1)
    assert random.random() == after


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "NAdam"])
def test_fidelity_puts_everything_back(kind: str, begun: bool) -> None:
    torch.manual_seed(0)
    model = Noisy().double()
    model.a.bias.requires_grad_(False)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)([p for p in model.parameters() if p.requires_grad], lr=0.01, **options)
    accountant = attach(model, optimizer, lambda m: losses(m, points(3, 9)).mean())
    if begun:
        run_step(accountant, lambda: losses(model, points(6, 0)).mean(), range(6))
    model.drop.eval()

    def snapshot() -> list[Any]:
        held = [x for s in optimizer.state.values() for x in s.values()]
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters()), *held]
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in (*tensors, torch.get_rng_state())]
        return [[id(x) for x in tensors], copies, [m.training for m in model.modules()], len(optimizer.state)]

    before = snapshot()
    accountant.fidelity(lambda m: losses(m, points(6, 1)), permutations=2)
    after = snapshot()
    assert before[0] == after[0] and before[2:] == after[2:]
    assert all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(before[1], after[1], strict=True))

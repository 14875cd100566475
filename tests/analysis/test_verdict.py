"""What is said of a run: how much was audited, which steps and samples hold too much of it, and what to do."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from inrun.analysis import summarise, summarise_run
from inrun.analysis.outliers import samples_in_table
from inrun.analysis.steps import LEAST_STEPS
from inrun.analysis.summary import SetSummary
from inrun.analysis.verdict import percent
from inrun.engine.options import audit_due
from inrun.ledger import Ledger, MemoryLedger, StepRecord
from inrun.ledger.schema import ACCOUNTS

OLD = [c for c in ACCOUNTS.names if c not in ("inherited", "points")]


def books(spread, audited=(), relative=0.0005, lr=None, clip=None, **more) -> pa.Table:
    """Accounts of one set from what every step paid in all; audited steps have a residual of that part of it."""
    n = len(spread)
    rows = []
    for t in range(n):
        row = dict.fromkeys(OLD) | {
            "step": t,
            "validation": "v",
            "data": 0.5 * spread[t],
            "spread": float(spread[t]),
            "loss_before": 3.0,
        }
        row |= {"lr": 1.0 if lr is None else float(lr[t]), "clip": 1.0 if clip is None else float(clip[t]), "n_samples": 4}
        if t in audited:
            parts = {"momentum": 4.5 * spread[t], "decay": -0.1 * spread[t], "residual": relative * spread[t]} | {
                key: value * spread[t] for key, value in more.items()
            }
            row |= parts | {"loss_after": 3.0 - row["data"] - (parts.get("momentum") or 0.0) - parts["decay"] - parts["residual"]}
        rows.append(row)
    return pa.Table.from_pylist(rows)


def whole_books(spread, audited, inherited: float) -> pa.Table:
    """The same under whole credit: momentum is no account."""
    table = books(spread, audited, momentum=0.0, inherited=inherited)
    return table.set_column(table.column_names.index("momentum"), "momentum", pa.nulls(len(table), pa.float64()))


def one(accounts: pa.Table, method="step") -> SetSummary:
    (found,) = summarise(accounts, method).sets
    return found


def schedule(n: int, warm_up: int = 20) -> np.ndarray:
    t = np.arange(n)
    return np.minimum(1, (t + 1) / warm_up) * (0.1 + 0.45 * (1 + np.cos(math.pi * t / n)))


def calm(n: int, seed: int, noise: float = 0.25) -> tuple[np.ndarray, np.ndarray]:
    """Learning rates and what the steps of a calm run pay: more at the beginning and at high rates, with noise."""
    rng = np.random.default_rng(seed)
    lr = schedule(n)
    return lr, lr * (0.2 + 0.8 * np.exp(-np.arange(n) / (n / 3))) * np.exp(rng.normal(0, noise, n))


ROUGH = (31, 32, 33, 50)


def rough_run(audited=(0, 60, 120)) -> pa.Table:
    """The run that was once called balanced: three calm audited steps of 150, and four others that hold 69 %."""
    lr, spread = calm(150, seed=1)
    others = spread.sum() - spread[list(ROUGH)].sum()
    spread[list(ROUGH)] = np.array([0.3, 0.2, 0.14, 0.05]) * others / 0.31
    clip = np.ones(150)
    clip[31] = 0.03
    return books(spread, audited, lr=lr, clip=clip)


def test_three_audited_steps_of_a_rough_run_do_not_balance() -> None:
    found = one(rough_run())
    assert found.relative_residual == pytest.approx(0.0005)
    assert found.audited_share < 0.05 and found.state == "thin"
    assert "balance" not in found.verdict + found.short and "too little to judge" in found.verdict
    assert [o.step for o in found.outsized] == list(ROUGH)
    assert found.outsized_share == pytest.approx(0.69) and [o.audited for o in found.outsized] == [False] * 4
    assert "clipped to 0.03" in found.outsized[0].why and any("a spike" in w for w in found.outsized[1].why)
    assert found.top_steps == 5 and 0.69 < found.top_share < 0.75
    assert any("audit_every=1" in line for line in found.advice) and any("--view rank" in line for line in found.advice)
    text = str(summarise(rough_run(), "step"))
    for words in ("4 of 150 scored steps hold 69 %", "step 31: 30 %; clipped to 0.03", "not audited", "top 3 % of steps (5)"):
        assert words in text, words
    json.dumps(summarise(rough_run(), "step").as_dict(), allow_nan=False)


def test_the_same_run_without_its_rough_steps_audited_at_every_step_balances() -> None:
    """The control of the test above: the words depend on what was audited and on nothing else."""
    lr, spread = calm(150, seed=1)
    found = one(books(spread, range(150), lr=lr))
    assert found.state == "balanced" and "the books balance" in found.verdict and found.audited_share == 1.0
    assert found.outsized == [] and not any("audit_every" in line or "rank" in line for line in found.advice)


VERDICTS = [
    # relative, audited steps of 100 equal ones, method, state, says
    (0.0005, range(100), "step", "balanced", "the books balance"),
    (0.0005, range(51), "step", "balanced", "which hold 51 %"),
    (0.0005, range(50), "step", "thin", "hold 50 % of what the samples were given and taken: too little to judge"),
    (0.0005, range(3), "step", "thin", "hold 3 %"),
    (0.05, range(3), "step", "thin", "too little to judge"),
    (0.0005, [t for t in range(100) if audit_due(t, None)], "whole", "balanced", "which hold 9 %"),
    (0.0005, (0, 15, 30, 45, 60, 75, 90), "step", "thin", "too little to judge"),
    (0.05, range(100), "whole", "rough", "sums are off"),
    (0.66, range(100), "first", "coarse", 'the SGD step that method="first" assumes is not the step that was taken'),
    (0.66, range(3), "step", "coarse", "too coarse"),
    (0.0005, (), "step", "unmeasured", "nothing says how far the method is off"),
]


@pytest.mark.parametrize(("relative", "audited", "method", "state", "says"), VERDICTS)
def test_verdicts(relative, audited, method, state, says) -> None:
    found = one(books(np.ones(100), audited, relative), method)
    assert found.state == state and says in found.verdict
    assert ("balance" in found.verdict + found.short) == (state == "balanced")


ADVICE = [
    ("first", 'method="whole" or "step"'),
    ("second", 'method="whole" or "step"'),
    ("step", "smaller learning rate"),
    ("whole", "smaller learning rate"),
    ("not registered", "smaller learning rate"),
]


@pytest.mark.parametrize(("method", "says"), ADVICE)
def test_what_to_do_about_a_large_residual(method, says) -> None:
    assert any(says in line for line in one(books(np.ones(20), range(20), 0.5), method).advice)


@pytest.mark.parametrize(
    ("momentum", "method", "told"), [(4.5, "step", True), (-3.0, "step", True), (0.1, "step", False), (4.5, "whole", False)]
)
def test_whole_credit_is_named_where_momentum_is_much_of_the_fall(momentum, method, told) -> None:
    found = one(books(np.ones(20), range(20), momentum=momentum), method)
    assert any('method="whole"' in line for line in found.advice) == told


def test_an_outsized_step_that_nobody_audited_keeps_the_books_from_balancing() -> None:
    spread = np.ones(100)
    spread[40] = 30
    unseen = one(books(spread, [t for t in range(100) if t != 40]))
    assert unseen.audited_share > 0.7 and unseen.state == "thin" and "balance" not in unseen.verdict
    assert one(books(spread, range(100))).state == "balanced"


@pytest.mark.parametrize("n", [12, 60, 100, 150, 1000])
@pytest.mark.parametrize("noise", [0.0, 0.1, 0.25, 0.4])
def test_a_calm_run_names_no_step(n: int, noise: float) -> None:
    for seed in range(5):
        lr, spread = calm(n, seed, noise)
        assert one(books(spread, lr=lr)).outsized == [], seed


SPIKES = [
    # where, times its neighbours, clip, reason that must be among those given
    (50, 6, 1.0, "a spike: 6.0 times the median step around it"),
    (50, 29, 0.03, "clipped to 0.03"),
    (99, 20, 1.0, "a spike: 20 times"),
    (0, 200, 1.0, "among the first steps of the run"),
    (21, 6, 1.0, "at the peak of the learning rate"),
]


@pytest.mark.parametrize(("where", "times", "clip", "why"), SPIKES)
def test_one_rough_step_in_a_hundred_is_named(where: int, times: float, clip: float, why: str) -> None:
    lr, spread = calm(100, seed=3, noise=0.15)
    usual = np.median(np.delete(spread[max(where - 12, 0) : where + 13], min(where, 12)))
    spread[where] = times * usual
    clips = np.ones(100)
    clips[where] = clip
    found = one(books(spread, lr=lr, clip=clips))
    assert [o.step for o in found.outsized] == [where]
    (step,) = found.outsized
    assert step.share == pytest.approx(spread[where] / spread.sum())
    assert why.split(":")[0] in "; ".join(step.why), step.why
    cure = "a longer warm-up" if where == 0 else "a lower learning rate"
    assert any(cure in line for line in found.advice)


def test_a_clip_that_all_steps_have_explains_nothing() -> None:
    spread = np.ones(100)
    spread[50] = 9
    (step,) = one(books(spread, clip=np.full(100, 0.03))).outsized
    assert step.why == ["a spike: 9.0 times the median step around it"]


def test_many_rough_steps_of_a_long_run_are_counted_and_the_largest_named() -> None:
    spread = np.ones(3000)
    spread[::100] = 50
    found = one(books(spread))
    assert found.outsized_steps == 30 and len(found.outsized) == 20 and found.outsized_share == pytest.approx(1500 / 4470)
    assert "and 25 more" in str(summarise(books(spread), "first"))


@pytest.mark.parametrize("spread", [[], [1.0] * (LEAST_STEPS - 1) + [1e6], [0.0] * 50, [0.0] * 30 + [1.0] * 30])
def test_steps_that_paid_nothing_or_are_few_are_no_trouble(spread) -> None:
    for summary in (summarise(books(spread, range(len(spread))), "first"), summarise(books(spread), "first")):
        assert all(not s.outsized or len(spread) == LEAST_STEPS for s in summary.sets)
        assert "nan" not in str(summary)


def test_scores_stand_beside_the_fall_of_the_same_steps() -> None:
    spread = np.ones(10)
    part = one(books(spread, (0, 5)))
    assert part.scores_sum == pytest.approx(5.0) and part.data == pytest.approx(1.0) and part.audited_share == pytest.approx(0.2)
    assert "+5; on the 2 audited ones they are +1 beside a measured fall of +9.801" in str(summarise(books(spread, (0, 5)), "step"))
    assert "add up to +5 beside a measured fall of +49.01, over all 10" in str(summarise(books(spread, range(10)), "step"))
    assert "no fall was measured beside it" in str(summarise(books(spread), "step"))


def test_whole_credit_has_inherited_and_no_momentum() -> None:
    accounts = whole_books(np.ones(20), range(20), inherited=0.25)
    summary = summarise(accounts, "whole")
    (found,) = summary.sets
    assert found.momentum is None and found.inherited == pytest.approx(5.0)
    text = str(summary)
    for words in ("method whole", "inherited", "from before scoring began", "parts paid", "The credits add up"):
        assert words in text, words
    assert "contributions" not in text and "earlier samples" not in text
    assert summary.as_dict()["method"] == "whole"
    step = str(summarise(books(np.ones(20), range(20), inherited=0.25), "step"))  # the control
    assert "inherited" not in step and "contributions" in step and "parts paid" not in step


def test_points_and_old_books() -> None:
    old = books(np.ones(20), range(20))
    assert "inherited" not in old.column_names and one(old).most_points is None and one(old).inherited is None
    new = old.append_column("points", pa.array([1] * 19 + [4])).append_column("inherited", pa.nulls(20, pa.float64()))
    assert one(new).most_points == 4 and one(new).inherited is None
    without = old.drop_columns(["spread"]).append_column("spread", pa.nulls(20, pa.float64()))
    assert one(without).audited_share == 1.0 and one(without).state == "unmeasured"


def uses(n: int = 400, batch: int = 8, folds: int = 1, seed: int = 0) -> pa.Table:
    """Contributions of a calm run: each sample is used twice, gradients have norms of their own."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.permutation(n), rng.permutation(n)])
    value = rng.normal(0.2, 1, 2 * n) * np.exp(rng.normal(0, 0.5, n))[ids] * np.repeat(schedule(2 * n // batch), batch)
    columns = {"step": np.arange(2 * n) // batch, "sample_id": ids, "value": value.astype(np.float32)}
    labels = [f"v#{k}" for k in range(folds)] if folds > 1 else ["v"]
    columns["value"] = columns["value"].astype(np.float64)
    names = ["step", "sample_id", "validation", "value"]
    return pa.concat_tables([pa.table({**columns, "validation": [x] * 2 * n}).select(names) for x in labels])


def with_outlier(table: pa.Table, sample: int, times: float) -> pa.Table:
    """Multiply the first use of a sample, in every fold."""
    values = table["value"].to_numpy().copy()
    at = (table["sample_id"].to_numpy() == sample) & (2 * table["step"].to_numpy() < table["step"].to_numpy().max())
    values[at] = np.sign(values[at]) * times * np.abs(values).mean()
    return table.set_column(3, "value", pa.array(values, pa.float32()))


@pytest.mark.parametrize("folds", [1, 3])
def test_an_outlier_is_named_and_a_calm_run_names_no_sample(folds: int) -> None:
    for seed in range(8):
        assert samples_in_table(uses(folds=folds, seed=seed))["v"].outsized == []
    table = with_outlier(with_outlier(uses(folds=folds), 17, 100), 23, 60)
    found = samples_in_table(table)["v"].outsized
    assert [o.sample_id for o in found] == [17, 23] and found[0].uses == 2
    whole = sum(abs(v) for v in table["value"].to_pylist()) / folds
    held = sum(abs(r["value"]) for r in table.to_pylist() if r["sample_id"] == 17) / folds
    assert found[0].share == pytest.approx(held / whole, rel=1e-5) and found[0].times == pytest.approx(400 * held / whole, rel=1e-5)
    assert found[0].why[0].startswith("an outlier: ") and f"of step {found[0].step}" in found[0].why[1]


def test_samples_of_a_large_step_are_told_from_outliers() -> None:
    table = uses(1600)
    values = table["value"].to_numpy().copy()
    values[table["step"].to_numpy() == 30] = 100 * np.abs(values).mean() * np.sign(np.arange(8) - 3.5)
    found = samples_in_table(table.set_column(3, "value", pa.array(values, pa.float32())))["v"].outsized
    assert len(found) == 8 and all("used in a large step" in o.why[0] and o.step == 30 for o in found)
    (only,) = samples_in_table(with_outlier(uses(), 17, 100))["v"].outsized
    assert "an outlier" in only.why[0]


@pytest.mark.parametrize("n", [9, 40, 3000])
def test_samples_of_runs_of_any_size(n: int) -> None:
    for seed in range(4):
        assert samples_in_table(uses(n - n % 8, seed=seed) if n > 9 else uses(8, seed=seed))["v"].outsized == []
    if n > 9:
        assert [o.sample_id for o in samples_in_table(with_outlier(uses(n - n % 8), 5, 200))["v"].outsized] == [5]


def test_samples_reach_the_summary_from_a_table_and_from_a_ledger(tmp_path) -> None:
    table = with_outlier(uses(80), 17, 100)
    memory = MemoryLedger()
    accounts = books(np.ones(20), range(20)).to_pylist()
    steps, ids, values = (table[c].to_numpy() for c in ("step", "sample_id", "value"))
    for t, row in enumerate(accounts):
        memory.write(StepRecord(t, ids[steps == t], {"v": values[steps == t]}, [row]))
    memory.save(tmp_path / "run", {"method": "whole"})
    read = summarise_run(tmp_path / "run")
    held = summarise(memory.accounts(), "whole", uses=memory.uses())
    assert read.as_dict() == held.as_dict() and read.method == "whole"
    assert [o.sample_id for o in read.sets[0].samples] == [17]
    assert "sample 17:" in str(read) and any("Look at the samples" in line for line in read.sets[0].advice)
    assert summarise(memory.accounts(), "step").sets[0].samples is None
    assert summarise_run(Ledger.open(tmp_path / "run")).as_dict() == read.as_dict()


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.00055, "0.055 %"),
        (0.031, "3.1 %"),
        (0.66, "66 %"),
        (1.0, "100 %"),
        (2.14, "214 %"),
        (0, "0 %"),
        (1e-9, "less than 0.001 %"),
    ],
)
def test_percent(share: float, shown: str) -> None:
    assert percent(share) == shown

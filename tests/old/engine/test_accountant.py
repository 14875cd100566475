"""The public API over whole steps."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
import torch
from torch import nn

import inrun
from inrun.errors import ConfigurationError
from inrun.training.gpt import next_token_loss
from reference import relative_error
from tiny import batch, tiny, train_step, validation


def build(kind: str = "AdamW", tied: bool = True, **options):
    model = tiny(tied=tied)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    return model, optimizer, inrun.Accountant(model, optimizer, options.pop("validation", validation()), credit="step", **options)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_permuting_the_batch_permutes_contributions(kind: str) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    results = []
    for permuted in (False, True):
        model, optimizer, accountant = build(kind)
        for step in range(3):
            rows = batch(5, step)
            train_step(accountant, model, optimizer, rows[order] if permuted else rows)
        results.append(accountant.last.contributions["validation"])
    assert relative_error(results[1], results[0][order]) < 1e-9


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_splitting_the_batch_keeps_contributions(kind: str) -> None:
    model, optimizer, accountant = build(kind)
    other, other_optimizer, other_accountant = build(kind)
    for step in range(3):
        rows = batch(6, step)
        whole = train_step(accountant, model, optimizer, rows, ids=range(10, 16), clip=0.3)
        with other_accountant.step() as window:
            for part, ids in ((rows[:1], [10]), (rows[1:4], [11, 12, 13]), (rows[4:], [14, 15])):
                with window.microbatch(ids):
                    (next_token_loss(other, part) * len(part) / 6).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.3)
            other_optimizer.step()
            other_optimizer.zero_grad()
        split = other_accountant.last
        assert split.sample_ids.tolist() == whole.sample_ids.tolist()
        assert relative_error(split.contributions["validation"], whole.contributions["validation"]) < 1e-9


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_loss_scaling_and_clipping_cancel(kind: str) -> None:
    """A scaled loss, unscaled before the step, scores as if it had not been scaled."""
    model, optimizer, accountant = build(kind)
    other, other_optimizer, other_accountant = build(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        rows = batch(5, step)
        plain = train_step(accountant, model, optimizer, rows, clip=0.2)
        with other_accountant.step(range(5)):
            scaler.scale(next_token_loss(other, rows)).backward()
            scaler.unscale_(other_optimizer)
            torch.nn.utils.clip_grad_norm_(other.parameters(), 0.2)
            scaler.step(other_optimizer)
            scaler.update()
            other_optimizer.zero_grad()
        assert relative_error(other_accountant.last.contributions["validation"], plain.contributions["validation"]) < 1e-6
        assert other_accountant.last.clip[0] == pytest.approx(plain.clip[0] / 1024.0, rel=1e-5)


def test_scaler_that_skips_the_step_scores_nothing() -> None:
    model, optimizer, accountant = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with accountant.step(range(3)):
        scaler.scale(next_token_loss(model, batch(3, 0)) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
    assert accountant.last.skipped
    assert accountant.scores().num_rows == 0


def test_learning_rate_is_read_when_the_optimizer_steps() -> None:
    model, optimizer, accountant = build("SGD")
    other, other_optimizer, other_accountant = build("SGD")
    other_optimizer.param_groups[0]["lr"] = 0.0
    rows = batch(4, 0)
    expected = train_step(accountant, model, optimizer, rows).contributions["validation"]
    with other_accountant.step(range(4)):
        next_token_loss(other, rows).backward()
        other_optimizer.param_groups[0]["lr"] = 0.01
        other_optimizer.step()
    assert relative_error(other_accountant.last.contributions["validation"], expected) < 1e-12


def test_parameter_groups_have_their_own_rates() -> None:
    """Contributions are additive over groups: two groups score as the sum of training each with the other at rate 0."""
    rows = batch(4, 0)
    results = []
    for rates in ((0.01, 0.03), (0.01, 0.0), (0.0, 0.03)):
        model = tiny()
        parts = [list(model.blocks.parameters()), [p for n, p in model.named_parameters() if "blocks" not in n]]
        groups = [{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]
        optimizer = torch.optim.SGD(groups, lr=1.0)
        accountant = inrun.Accountant(model, optimizer, validation(), credit="step")
        results.append(train_step(accountant, model, optimizer, rows).contributions["validation"])
    assert relative_error(results[1] + results[2], results[0]) < 1e-12


def test_several_optimizers_and_parameters_in_none() -> None:
    model = tiny(tied=False)
    inner = torch.optim.AdamW(model.blocks.parameters(), lr=0.01)
    outer = torch.optim.SGD([*model.tokens.parameters(), *model.head.parameters()], lr=0.02)
    accountant = inrun.Accountant(model, [inner, outer], validation(), audit_every=1, credit="step")
    for step in range(3):
        with accountant.step(range(4)):
            next_token_loss(model, batch(4, step)).backward()
            inner.step()
            outer.step()
            model.zero_grad()
    assert accountant.last.contributions["validation"].abs().min() > 0
    unmoved = {r.parameter for r in accountant.coverage if r.timing == "unmoved"}
    assert unmoved == {"positions.weight", "norm.weight", "norm.bias"}
    assert 0 < accountant.coverage.scored_share < 1


def test_several_validation_sets_and_points() -> None:
    rows = batch(3, 9)
    sets = {
        "a": lambda m: next_token_loss(m, rows),
        "points": lambda m: torch.stack([next_token_loss(m, r.unsqueeze(0)) for r in rows]),
    }
    model, optimizer, accountant = build(validation=sets)
    for step in range(3):
        result = train_step(accountant, model, optimizer, batch(5, step))
        assert result.contributions["points"].shape == (5, 3)
        assert relative_error(result.contributions["points"].mean(1), result.contributions["a"]) < 1e-9
    assert set(accountant.scores()["validation"].to_pylist()) == {"a", "points[0]", "points[1]", "points[2]"}


def test_validation_callable_may_take_the_step() -> None:
    seen = []

    def loss(model, step):
        seen.append(step)
        return next_token_loss(model, batch(1, step))

    model, optimizer, accountant = build(validation=loss, audit_every=0)
    for step in range(3):
        train_step(accountant, model, optimizer, batch(2, step))
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_refresh_reuses_the_validation_gradient(kind: str) -> None:
    calls = []

    def loss(model):
        calls.append(1)
        return validation()(model)

    model, optimizer, accountant = build(kind, validation=loss, refresh=3, audit_every=0)
    fresh, fresh_optimizer, fresh_accountant = build(kind, audit_every=0)
    for step in range(7):
        rows = batch(4, step)
        stale = train_step(accountant, model, optimizer, rows).contributions["validation"]
        exact = train_step(fresh_accountant, fresh, fresh_optimizer, rows).contributions["validation"]
        error = relative_error(stale, exact)
        assert error < 1e-9 if step % 3 == 0 else error > 1e-9
    assert len(calls) == 3


def test_refresh_takes_a_new_gradient_for_what_was_frozen() -> None:
    """A validation gradient that was taken while a parameter was frozen has nothing of it."""
    runs = [build("SGD", refresh=refresh, audit_every=0) for refresh in (9, 1)]
    for step in range(4):
        found = []
        for model, optimizer, accountant in runs:
            next(model.parameters()).requires_grad_(step > 1)
            found.append(train_step(accountant, model, optimizer, batch(4, step)).contributions["validation"])
        assert (relative_error(*found) < 1e-9) is (step in (0, 2)), step


def test_repeated_ids_add_up() -> None:
    model, optimizer, accountant = build("SGD")
    c = train_step(accountant, model, optimizer, batch(4, 0), ids=[7, 7, 9, 7]).contributions["validation"]
    train_step(accountant, model, optimizer, batch(2, 1), ids=[9, 8])
    table = accountant.scores()
    assert isinstance(table, pa.Table)
    rows = {r["sample_id"]: r for r in table.to_pylist()}
    assert set(rows) == {7, 8, 9}
    assert rows[7]["score"] == pytest.approx(float(c[[0, 1, 3]].sum()), rel=1e-5)
    assert (rows[7]["times_used"], rows[7]["first_step"], rows[7]["last_step"]) == (3, 0, 0)
    assert (rows[9]["times_used"], rows[9]["first_step"], rows[9]["last_step"]) == (2, 0, 1)


def test_positive_means_the_sample_lowered_the_loss() -> None:
    """A batch of validation text itself helps; ascending on it hurts."""
    for maximize in (False, True):
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=maximize)
        rows = batch(2, 99)
        accountant = inrun.Accountant(model, optimizer, lambda m, rows=rows: next_token_loss(m, rows), audit_every=1, credit="step")
        result = train_step(accountant, model, optimizer, rows)
        fell = result.accounts["validation"].loss_before - result.accounts["validation"].loss_after
        assert (fell > 0) is not maximize
        assert (float(result.contributions["validation"].sum()) > 0) is not maximize
        assert result.accounts["validation"].data == pytest.approx(fell, rel=0.1)


def test_state_dict_is_plain_data_and_resumes_the_phase() -> None:
    model, optimizer, accountant = build(refresh=2, audit_every=3)
    for step in range(4):
        train_step(accountant, model, optimizer, batch(3, step))
    state = json.loads(json.dumps(accountant.state_dict()))
    assert state["step"] == 4
    assert state["forms"]["head"]
    accountant.close()
    resumed = inrun.Accountant(model, optimizer, validation(), refresh=2, audit_every=3, credit="step")
    resumed.load_state_dict(state)
    assert train_step(resumed, model, optimizer, batch(3, 4)).step == 4
    with pytest.raises(ConfigurationError, match="version"):
        resumed.load_state_dict(state | {"version": 99})
    with pytest.raises(ConfigurationError, match="update"):
        resumed.load_state_dict(state | {"update": "sgd"})


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizer_state_loaded_after_attaching(kind: str) -> None:
    """load_state_dict replaces the group dictionaries: the new learning rate must be the one that counts."""
    model, optimizer, accountant = build(kind)
    train_step(accountant, model, optimizer, batch(3, 0))
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.005
    optimizer.load_state_dict(state)
    halved = train_step(accountant, model, optimizer, batch(3, 1)).contributions["validation"]
    other, other_optimizer, other_accountant = build(kind)
    train_step(other_accountant, other, other_optimizer, batch(3, 0))
    full = train_step(other_accountant, other, other_optimizer, batch(3, 1)).contributions["validation"]
    assert relative_error(2 * halved, full) < 1e-9


def test_a_ledger_is_anything_with_write() -> None:
    records = []

    class Listed:
        def write(self, record):
            records.append(record)

    model, optimizer, accountant = build(ledger=Listed())
    train_step(accountant, model, optimizer, batch(3, 0), ids=[4, 5, 6])
    (record,) = records
    assert record.step == 0
    assert record.sample_ids.tolist() == [4, 5, 6]
    assert record.contributions["validation"].dtype.name == "float32"
    assert record.accounts[0]["n_samples"] == 3
    with pytest.raises(inrun.errors.LedgerError, match="only writes"):
        accountant.scores()


def test_two_forwards_one_backward_and_no_grad_forwards_between() -> None:
    """Pairs of forwards in one step sum; forwards without gradient do not disturb the pairing."""
    model, optimizer, accountant = build("SGD", audit_every=1)
    with accountant.step(range(3)):
        first = next_token_loss(model, batch(3, 0))
        with torch.no_grad():
            model(batch(3, 7))
        second = next_token_loss(model, batch(3, 1))
        (first + 2 * second).backward()
        optimizer.step()
    other, other_optimizer, other_accountant = build("SGD", audit_every=1)
    with other_accountant.step() as window:
        with window.microbatch(range(3)):
            next_token_loss(other, batch(3, 0)).backward()
        with window.microbatch(range(3)):
            (2 * next_token_loss(other, batch(3, 1))).backward()
        other_optimizer.step()
    parts = other_accountant.last.contributions["validation"].view(2, 3).sum(0)
    assert relative_error(accountant.last.contributions["validation"], parts) < 1e-12


def test_validation_that_ignores_a_parameter_scores_it_zero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x), self.unused(x)

    model = Two().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 3, dtype=torch.float64)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1])[0].square().sum(), audit_every=1, credit="step")
    for _ in range(3):
        with accountant.step(range(4)):
            model(x)[1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (accountant.last.contributions["validation"] == 0).all()


def test_batch_norm_scores_the_share_of_each_row(caplog: pytest.LogCaptureFixture) -> None:
    """Reference: the same network with one copy of every parameter per row."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    nn.init.normal_(model[1].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4, dtype=torch.float64)
    loss = lambda m: m(x[:2]).square().sum()  # noqa: E731
    model.eval()
    g_val = torch.autograd.grad(loss(model), list(model.parameters()))
    model.train()
    copies = [p.detach().expand(8, *p.shape).clone().requires_grad_() for p in model.parameters()]
    w1, b1, gamma, beta, w2, b2 = copies
    hidden = torch.einsum("ni,noi->no", x, w1) + b1
    normal = nn.functional.batch_norm(hidden, None, None, training=True)
    out = torch.einsum("ni,noi->no", normal * gamma + beta, w2) + b2
    per_row = torch.autograd.grad(out.square().sum(), copies)
    expected = 0.1 * sum((g.flatten(1) @ v.flatten()) for g, v in zip(per_row, g_val, strict=True))
    accountant = inrun.Accountant(model, optimizer, loss, audit_every=1, credit="step")
    assert "batch norm" in caplog.text
    statistics = model[1].num_batches_tracked.clone()
    with accountant.step(range(8)):
        model(x).square().sum().backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], expected) < 1e-9
    assert model[1].num_batches_tracked == statistics + 1


def test_with_ids() -> None:
    data = inrun.with_ids([("a", 1), ("b", 2)], first=100)
    assert (len(data), data[1], data[-2]) == (2, ("b", 2, 101), ("a", 1, 100))
    assert inrun.with_ids(["x"])[0] == ("x", 0)
    assert inrun.with_ids([{"t": 1}])[0] == {"t": 1, "sample_id": 0}
    with pytest.raises(IndexError):
        data[2]
    with pytest.raises(inrun.errors.IdsError, match="already"):
        inrun.with_ids([{"sample_id": 1}])[0]
    with pytest.raises(inrun.errors.IdsError, match="map-style"):
        inrun.with_ids(iter([1]))
    loader = torch.utils.data.DataLoader(inrun.with_ids([{"x": torch.ones(2)}] * 5), batch_size=2, shuffle=True)
    seen = sorted(int(i) for b in loader for i in b["sample_id"])
    assert seen == [0, 1, 2, 3, 4]

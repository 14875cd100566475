"""Sketched whole credit: equal to exact where the sketch loses nothing, audited before anything is spread, resumed bit for bit."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from torch import nn

import inrun
from cases import CASES, Case, model_of
from inrun.errors import ConfigurationError, CreditError, DeferredMemoryError, OptimizerError, ValidationError
from inrun.old.engine.credit import keeper
from inrun.old.engine.credit.keeper import AT_ONCE, BLOCK
from inrun.training.gpt import GPT, GPTConfig, next_token_loss
from tiny import CONTEXT, VOCAB, batch, tiny, train_step, validation

WIDE = 10**6


def attach(model: nn.Module, memory: str = "sketch", **options):
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
    )
    options = {"validation": validation(), "audit_every": 1, "sketch": WIDE if memory == "sketch" else None, **options}
    return optimizer, inrun.Accountant(model, optimizer, credit="whole", credit_memory=memory, **options)


def credits_of(accountant) -> torch.Tensor:
    return torch.cat([o.credit for o in accountant._run.credit.open])


@pytest.mark.parametrize("form", ["shared", "project"])
@pytest.mark.parametrize("case", [c for c in CASES if c.rule != "read"], ids=lambda c: c.name)
def test_a_sketch_that_loses_nothing_is_exact(case: Case, form: str) -> None:
    """Every layer case, tied and reused weights, modules that run again: sketch and exact agree."""
    found = []
    for memory in ("exact", "sketch"):
        model = model_of(case)
        held = case.draw(2, 3, torch.Generator().manual_seed(9))
        optimizer, accountant = attach(
            model, memory, validation=lambda m, x=held: m(x).square().mean(), form=form, check_rows=False
        )
        for t in range(6):
            x = case.draw(4, 5, torch.Generator().manual_seed(t))
            with accountant.step(range(4)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append((credits_of(accountant), accountant.last.contributions["validation"]))
    scale = found[0][0].abs().max()
    tolerance = max(case.accuracy, 1e-9) * 10
    torch.testing.assert_close(found[1][0] / scale, found[0][0] / scale, rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1][1] / scale, found[0][1] / scale, rtol=0, atol=tolerance)


def test_several_validation_sets_points_and_folds() -> None:
    """Each column alone gives the same credits as all together."""
    rows = batch(4, 50)

    def points(model):
        return torch.stack([next_token_loss(model, rows[j : j + 1]) for j in range(4)])

    sets = {"a": validation(), "p": points, "f": inrun.folds(points, 2)}
    found = {}
    for name in ("all", *sets):
        model = tiny()
        # Points enough that no column of all needs more: they are taken for all columns at once.
        chosen = sets if name == "all" else {name: sets[name]}
        optimizer, accountant = attach(model, validation=chosen, quadrature="gauss8")
        for t in range(5):
            last = train_step(accountant, model, optimizer, batch(4, t), clip=0.5)
        found[name] = (credits_of(accountant), last)
    whole, last = found["all"]
    assert whole.shape == (20, 1 + 4 + 2)
    torch.testing.assert_close(whole, torch.cat([found[name][0] for name in sets], dim=1))
    for name in sets:
        torch.testing.assert_close(last.contributions[name], found[name][1].contributions[name])
        assert last.accounts[name].data == pytest.approx(found[name][1].accounts[name].data)
    assert last.standard_errors["f"].shape == (4,)


class WithRareFeatures(nn.Module):
    """A hidden layer, and a head that also sees a few inputs as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(200, 100), nn.Linear(104, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.body(x[:, 4:]).relu(), x[:, :4]], dim=1))


def with_rare_features(sketch: int | None) -> torch.Tensor:
    """Credits of a run whose few inputs beside are hardly more than 0 in training, and as large as others in validation."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = WithRareFeatures()
    x, y = torch.randn(120, 204, generator=draw), torch.randint(0, 10, (120,), generator=draw)
    held_x, held_y = torch.randn(40, 204, generator=draw), torch.randint(0, 10, (40,), generator=draw)
    x[:, :4] *= 1e-4
    memory = "exact" if sketch is None else "sketch"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = nn.functional.cross_entropy
    options = {"validation": lambda m: loss(m(held_x), held_y), "audit_every": 0, "bitwise": True, "sketch": sketch}
    _, accountant = attach(model, memory, optimizer=optimizer, **options)
    for t in range(30):
        ids = torch.arange(8 * t, 8 * t + 8) % 120
        with accountant.step(ids):
            loss(model(x[ids]), y[ids]).backward()
            optimizer.step()
            optimizer.zero_grad()
    accountant.close()
    return torch.tensor(accountant.ledger.uses()["value"].to_pylist())


@pytest.mark.parametrize(
    ("size", "exactly"), [(4800, {"body.bias", "head.weight", "head.bias"}), (2000, {"body.bias", "head.bias"})]
)
def test_the_smallest_tensors_are_kept_entry_by_entry(size: int, exactly: set[str]) -> None:
    model = WithRareFeatures()
    _, accountant = attach(model, validation=lambda m: m(torch.ones(1, 204)).sum(), sketch=size)
    sketcher = accountant._run.credit.store.sketchers[False]
    assert {s.name for s, plan in zip(sketcher.scored, sketcher.plans, strict=True) if plan.exact} == exactly
    assert sketcher.columns <= size


@pytest.mark.parametrize("elementwise", [True, False])
def test_weights_are_how_far_a_segment_moved_for_how_much_push(elementwise: bool) -> None:
    """ρ² is |A∘q| / |q| of a segment over that of the tensor, and 1 where no gradient ever came, or the gain is one number."""
    _, accountant = attach(WithRareFeatures(), validation=lambda m: m(torch.ones(1, 204)).sum(), sketch=2000)
    sketcher = accountant._run.credit.store.sketchers[False]
    index = next(i for i, s in enumerate(sketcher.scored) if s.name == "body.weight")
    draw, shape = torch.Generator().manual_seed(0), (100, 200)
    gain, q = torch.rand(shape, generator=draw) + 0.1, torch.randn(shape, generator=draw)
    gain[:, 0], q[:, 0], q[7] = 1e6, 0.0, 0.0  # never a gradient: a huge gain that must not count
    found = sketcher.weights_from({index: (gain if elementwise else 0.1, q)})[index]
    if not elementwise:
        assert torch.equal(found, torch.ones_like(found))
        return
    plan = sketcher.plans[index]
    moved, push = ((x.view(100, plan.per_row, plan.segment).norm(dim=2).flatten()) for x in (gain * q, q))
    expected = (moved / push / ((gain * q).norm() / q.norm())).sqrt().nan_to_num(1.0)
    torch.testing.assert_close(found, expected.to(found))


@pytest.mark.parametrize(("sketch", "said"), [(64, True), (WIDE, False)])
def test_says_once_when_errors_hide_the_samples(sketch: int, said: bool, caplog) -> None:
    with_rare_features(sketch)
    words = [r.message for r in caplog.records if "single samples can hardly be told apart" in r.message]
    assert len(words) == said
    assert not said or (f"sketch={4 * sketch}" in words[0] and 'credit_memory="exact"' in words[0])


@pytest.mark.parametrize("careful", [True, False])
def test_huge_entries_of_a_direction_do_not_hide_samples(careful: bool, monkeypatch) -> None:
    """Under Adam what hardly had a gradient has a huge direction: a few entries that must not fill the buckets of all others."""
    if not careful:  # the control
        monkeypatch.setattr("inrun.old.engine.credit.sketcher.MOST", 1e30)
        monkeypatch.setattr("inrun.old.engine.credit.sketcher.ENTRY_BY_ENTRY", 0.0)
    exact, found = with_rare_features(None), with_rare_features(4800)
    error = float((found - exact).std() / exact.std())
    assert error < 0.15 if careful else error > 0.2, error


def test_parts_add_up_to_the_fall_with_gauss_points() -> None:
    model = tiny()
    optimizer, accountant = attach(model, quadrature="gauss32", sketch=512)
    for t in range(12):
        account = train_step(accountant, model, optimizer, batch(4, t), clip=0.5).accounts["validation"]
        fall = account.loss_before - account.loss_after
        assert account.data + account.decay + account.inherited == pytest.approx(fall, abs=1e-12)
        assert account.momentum is None


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_memory_from_before_is_inherited(memory: str) -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for t in range(5):
        next_token_loss(model, batch(4, t)).backward()
        optimizer.step()
        optimizer.zero_grad()
    _, accountant = attach(model, memory, optimizer=optimizer, quadrature="gauss16")
    shares = []
    for t in range(12):
        account = train_step(accountant, model, optimizer, batch(4, 10 + t)).accounts["validation"]
        assert account.data + account.decay + account.inherited == pytest.approx(
            account.loss_before - account.loss_after, abs=1e-12
        )
        shares.append(abs(account.inherited) / account.spread)
    assert shares[0] > 0.3  # most of the first moves was earlier samples' doing
    assert shares[-1] < 0.5 * shares[0]


# Faults that the sketch's own audit must see


def wrong_beta(accountant, optimizer, model, monkeypatch):
    rule = accountant._setup.rules[0]
    real = rule.recall
    monkeypatch.setattr(type(rule), "recall", lambda self, g, s: dataclasses.replace(real(g, s), keep=0.85))


def wrong_clip(accountant, optimizer, model, monkeypatch):
    from inrun.old.engine.factors import Factors

    real = Factors.measured
    monkeypatch.setattr(Factors, "measured", lambda self: {k: 0.7 * v for k, v in real(self).items()})


def counted_step(accountant, optimizer, model, monkeypatch):
    """A step that was taken into account, and that the optimizer never took."""
    before = copy.deepcopy(optimizer.state_dict())
    train_step(accountant, model, optimizer, batch(4, 77), clip=0.5)
    optimizer.load_state_dict(before)


def reset_optimizer(accountant, optimizer, model, monkeypatch):
    optimizer.state.clear()


def lost_window(accountant, optimizer, model, monkeypatch):
    """The books forget their open windows and what was inherited, but go on as if nothing had been there."""
    accountant._run.credit.audit.restart(accountant._run.credit.store.sketcher)


@pytest.mark.parametrize("fault", [None, wrong_beta, wrong_clip, counted_step, reset_optimizer, lost_window])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_audit_sees(fault, dtype, monkeypatch) -> None:
    model = tiny(dtype=dtype)
    optimizer, accountant = attach(model, sketch=512)
    for t in range(6):
        train_step(accountant, model, optimizer, batch(4, t), clip=0.5)
    if fault is None:  # the control
        train_step(accountant, model, optimizer, batch(4, 7), clip=0.5)
        return
    fault(accountant, optimizer, model, monkeypatch)
    with pytest.raises(CreditError, match="what the optimizer remembers"):
        train_step(accountant, model, optimizer, batch(4, 7), clip=0.5)


def test_steps_outside_are_inherited_not_spread() -> None:
    model = tiny()
    optimizer, accountant = attach(model, quadrature="gauss16")
    for t in range(4):
        train_step(accountant, model, optimizer, batch(4, t))
    next_token_loss(model, batch(4, 9)).backward()
    optimizer.step()
    optimizer.zero_grad()
    account = train_step(accountant, model, optimizer, batch(4, 5)).accounts["validation"]
    assert account.data + account.decay + account.inherited == pytest.approx(account.loss_before - account.loss_after, abs=1e-12)
    assert abs(account.inherited) > 0
    settled = accountant.ledger.credits()
    assert set(settled["step"].to_pylist()) == {0, 1, 2, 3}
    assert max(settled["paid"].to_pylist()) < 0.7


# Windows


def test_rows_settle_when_their_window_has_passed() -> None:
    model = tiny(dtype=torch.float32)
    optimizer, accountant = attach(model, sketch=512, audit_every=0)
    for t in range(60):
        train_step(accountant, model, optimizer, batch(2, t), ids=[t, 1000])
        open_ = len(accountant._run.credit.open)
        assert min(t + 1, 43) <= open_ < 43 + BLOCK  # the 44th step that is paid is the last, or one within a block after it
    table = accountant.scores().to_pydict()
    by_id = dict(zip(table["sample_id"], table["pending"], strict=True))
    assert by_id[0] == 0
    assert by_id[59] == 1
    assert by_id[1000] == open_  # it came back in every step
    settled = accountant.ledger.credits()
    assert sorted(set(settled["step"].to_pylist())) == list(range(60 - open_))
    assert min(settled["paid"].to_pylist()) > 0.98
    accountant.close()
    assert accountant.ledger.credits().num_rows == 120
    assert set(accountant.scores()["pending"].to_pylist()) == {0}


def test_what_is_owed_is_paid_in_full(monkeypatch) -> None:
    """Uses from before a block get at its end what paying at every step gives them: groups of their own, a tensor at rest."""
    found = []
    for memory, at_once in (("exact", 1000), ("sketch", AT_ONCE)):
        monkeypatch.setattr(keeper, "AT_ONCE", at_once)
        model = tiny()
        first, *others = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": [first], "betas": (0.6, 0.95)}, {"params": others}], lr=3e-3)
        _, accountant = attach(model, memory, optimizer=optimizer, audit_every=0)
        owed = 0
        for t in range(70):
            others[0].requires_grad_(t not in range(25, 30))
            if t == 27:
                optimizer.param_groups[1]["betas"] = (0.93, 0.95)
            train_step(accountant, model, optimizer, batch(2, t), ids=[2 * t, 2 * t + 1], clip=0.5)
            owed = max(owed, accountant._run.credit.owed.steps)
            if t == 39:
                half = accountant.scores()["score"].to_pylist()
        assert owed == (0 if at_once == 1000 else BLOCK - 1)
        accountant.close()
        found.append((torch.tensor(half), torch.tensor(accountant.scores()["score"].to_pylist())))
    scale = found[0][1].abs().max()
    torch.testing.assert_close(found[1][0] / scale, found[0][0] / scale, rtol=0, atol=1e-7)  # stored in single precision
    # A block keeps uses open for some steps longer: less than REST of a push is paid then.
    torch.testing.assert_close(found[1][1] / scale, found[0][1] / scale, rtol=0, atol=5e-3)


@pytest.mark.parametrize(("memory", "steps", "at"), [("exact", 14, 8), ("exact", 40, 27), ("sketch", 14, 8), ("sketch", 40, 27)])
def test_a_resumed_run_settles_the_same(memory: str, steps: int, at: int) -> None:
    """The window is in the state: the same credits, bit for bit; the control without it is not."""

    def start():
        model = tiny(dtype=torch.float32)
        return model, *attach(model, memory, audit_every=0, **({"sketch": 512} if memory == "sketch" else {}))

    model, optimizer, accountant = start()
    for t in range(steps):
        train_step(accountant, model, optimizer, batch(4, t), clip=0.5)
        if t == at:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), accountant.state_dict()))
    again, other, resumed = start()
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed.load_state_dict(saved[2])
    for t in range(at + 1, steps):
        train_step(resumed, again, other, batch(4, t), clip=0.5)
    assert torch.equal(credits_of(resumed), credits_of(accountant))
    first, second = accountant._run.credit.so_far(), resumed._run.credit.so_far()
    assert all((a.errors["validation"] == b.errors["validation"]).all() for a, b in zip(first, second, strict=True))
    # Without the window what it held is inherited.
    lost, third, afresh = start()
    lost.load_state_dict(saved[0])
    third.load_state_dict(saved[1])
    afresh.load_state_dict({k: v for k, v in saved[2].items() if k not in ("credit", "usual")})
    train_step(afresh, lost, third, batch(4, at + 1), clip=0.5)
    assert len(afresh._run.credit.open) == 1
    assert afresh._run.credit.inherited


def test_windows_of_another_version_are_inherited_by_name(caplog) -> None:
    """A checkpoint written before sketches were laid out as they are now is gone on with, and its windows are not misread."""
    model = tiny()
    optimizer, accountant = attach(model)
    for t in range(4):
        train_step(accountant, model, optimizer, batch(4, t))
    saved = copy.deepcopy(accountant.state_dict())
    del saved["credit"]["plain"]["format"], saved["credit"]["plain"]["owed"]
    accountant.close()
    _, resumed = attach(model, optimizer=optimizer)
    resumed.load_state_dict(saved)
    assert "another version of inrun" in caplog.text
    account = train_step(resumed, model, optimizer, batch(4, 4)).accounts["validation"]
    assert abs(account.inherited) > 0 and len(resumed._run.credit.open) == 1


@pytest.mark.parametrize(("memory", "timing"), [("sketch", "sketched"), ("exact", "kept")])
def test_coverage_and_memory_say_what_is_kept(memory: str, timing: str) -> None:
    model = tiny()
    optimizer, accountant = attach(model, memory, sketch=512 if memory == "sketch" else None)
    assert {row.timing for row in accountant.coverage} == {timing}
    for t in range(3):
        train_step(accountant, model, optimizer, batch(4, t))
    store, held = accountant._run.credit.store, accountant.held_bytes()
    assert held >= store.nbytes() > 0
    if memory == "sketch":
        weights = sum(w.nbytes for epoch in store.epochs.values() for w in epoch.weights)
        segments = sum(x.nbytes for x in store.known)
        known = sum(x.nbytes for x in store.known_whole.values())
        rows = sum(store.nbytes_of(e) for e in store.entries)
        assert held >= accountant._run.buffers.nbytes() + rows + store.sketcher.nbytes() + known + weights + segments
        assert min(weights, segments) > 0


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_memory_is_what_was_said_beforehand(memory: str, caplog) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCAB, CONTEXT, 64, 2, 2))
    options = {"sketch": 4096} if memory == "sketch" else {}
    optimizer, accountant = attach(model, memory, audit_every=0, deferred_memory="4GB", **options)
    most = 0
    for t in range(60):
        train_step(accountant, model, optimizer, batch(4, t))
        most = max(most, accountant.held_bytes())
    said = float(re.search(r"at most about ([0-9]+) MB", caplog.text)[1]) * 1e6
    assert 0.8 * said <= most <= 1.05 * said


@pytest.mark.slow
def test_no_growth_over_a_thousand_steps() -> None:
    model = nn.Linear(6, 3)
    x = torch.randn(4, 6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, accountant = attach(model, optimizer=optimizer, validation=lambda m: m(x[:1]).square().mean(), sketch=64, audit_every=0)
    held = []
    for t in range(1000):
        with accountant.step(range(4)):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if t % 100 >= 100 - 2 * BLOCK:
            held.append(accountant.held_bytes())
    assert max(held[2 * BLOCK : 4 * BLOCK]) == max(held[-2 * BLOCK :])


def test_odd_steps() -> None:
    """A gradient that is not finite, a validation loss that is not, a learning rate of 0."""
    model = tiny()
    broken = []
    rows = batch(2, 99)

    def loss(m):
        return next_token_loss(m, rows) * (float("nan") if broken else 1.0)

    optimizer, accountant = attach(model, validation=loss)
    for t in range(3):
        train_step(accountant, model, optimizer, batch(4, t))
    before = credits_of(accountant)
    broken.append(1)
    result = train_step(accountant, model, optimizer, batch(4, 3))
    assert "validation loss is not finite" in result.skipped
    assert torch.equal(credits_of(accountant)[:12], before)  # nothing was paid
    broken.clear()
    train_step(accountant, model, optimizer, batch(4, 4))  # the audit still agrees: the step's rows were remembered
    assert len(accountant._run.credit.open) == 5
    optimizer.param_groups[0]["lr"] = 0.0
    result = train_step(accountant, model, optimizer, batch(4, 5))
    assert float(result.contributions["validation"].abs().max()) == 0.0
    optimizer.param_groups[0]["lr"] = 1e-2
    assert float(train_step(accountant, model, optimizer, batch(4, 6)).contributions["validation"].abs().max()) > 0.0


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_a_step_without_validation_loss_advances_coupled_decay(memory: str) -> None:
    model = tiny()
    broken = []
    rows = batch(2, 99)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.3)
    loss = lambda m: next_token_loss(m, rows) * (float("nan") if broken else 1.0)  # noqa: E731
    _, accountant = attach(model, memory, optimizer=optimizer, validation=loss, quadrature="gauss16")
    for t in range(4):
        train_step(accountant, model, optimizer, batch(4, t))
    broken.append(1)
    train_step(accountant, model, optimizer, batch(4, 4))
    broken.clear()
    account = train_step(accountant, model, optimizer, batch(4, 5)).accounts["validation"]
    estimated = accountant._run.credit
    assert account.data + account.decay == pytest.approx(account.loss_before - account.loss_after, abs=1e-12)
    assert len(estimated.open) == 6


def test_momentum_may_be_switched_off() -> None:
    """Old pushes count nothing then, and the step's own rows get all of it, not a spread rest."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    _, accountant = attach(model, optimizer=optimizer)
    for t in range(4):
        train_step(accountant, model, optimizer, batch(4, t))
    optimizer.param_groups[0]["momentum"] = 0.0
    with accountant.step(range(4)) as step:
        next_token_loss(model, batch(4, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    payment = step.game.settlement._payment
    before = len(payment.parts) - payment.entry.n
    assert float(payment.parts[:before].abs().max()) <= 1e-9 * float(payment.own.abs().max())


def test_a_parameter_that_is_frozen_for_good_keeps_no_window_open() -> None:
    model = tiny(dtype=torch.float32)
    optimizer, accountant = attach(model, sketch=512, audit_every=0)
    for t in range(70):
        if t == 5:
            next(model.parameters()).requires_grad_(False)
        train_step(accountant, model, optimizer, batch(2, t))
    assert 43 <= len(accountant._run.credit.open) < 43 + BLOCK


# What is chosen, and what is refused by name


def make(**options):
    model = tiny()
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3)
    return inrun.Accountant(model, optimizer, validation(), **options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "whole"),
        ({"method": "first"}, "step"),
        ({"update": "sgd"}, "step"),
        ({"credit": "step"}, "step"),
        ({"refresh": 2}, "step"),
        ({"optimizer": torch.optim.Rprop}, "step"),
        ({"optimizer": torch.optim.Rprop, "credit": "whole"}, "whole"),
        ({"optimizer": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9)}, "step"),
        ({"optimizer": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9), "credit_memory": "exact"}, "whole"),
        ({"optimizer": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)}, "whole"),
    ],
)
def test_what_auto_means(options: dict, expected: str) -> None:
    assert make(**options).credit == expected


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"credit": "whole", "method": "first"}, ConfigurationError, 'method="first" belongs to credit="step"'),
        ({"credit": "whole", "update": "secant"}, ConfigurationError, 'update="secant" belongs to credit="step"'),
        ({"credit": "whole", "refresh": 2}, ConfigurationError, "refresh=2"),
        ({"credit": "some"}, ConfigurationError, "accepted are auto, whole, step"),
        ({"credit_memory": "disk"}, ConfigurationError, '"sketch" and "exact"'),
        ({"sketch": 3}, ConfigurationError, "at least 64"),
        (
            {"credit": "whole", "optimizer": lambda p, lr: torch.optim.RMSprop(p, lr=lr, momentum=0.9)},
            OptimizerError,
            "no sketch knows beforehand",
        ),
    ],
)
def test_refused_by_name(options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make(**options)


def test_value_clipping_is_the_step_games() -> None:
    model = tiny()
    optimizer, accountant = attach(model)
    with pytest.raises(OptimizerError, match='take credit="step"'), accountant.step(range(4)):
        next_token_loss(model, batch(4, 0)).backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        optimizer.step()


def test_points_must_stay_the_same() -> None:
    model = tiny()
    rows = batch(4, 50)

    def points(model, step):
        return torch.stack([next_token_loss(model, rows[j : j + 1]) for j in range(2 + step % 2)])

    optimizer, accountant = attach(model, validation=points)
    train_step(accountant, model, optimizer, batch(4, 0))
    with pytest.raises(ValidationError, match="points and folds must stay the same"):
        train_step(accountant, model, optimizer, batch(4, 1))


def test_memory_is_said_and_limited(caplog) -> None:
    model = tiny()
    optimizer, accountant = attach(model, "exact", deferred_memory="1MB")
    with pytest.raises(DeferredMemoryError, match="whole credit would keep up to about"):
        train_step(accountant, model, optimizer, batch(4, 0))
    accountant.close()
    optimizer, accountant = attach(model, "sketch", deferred_memory="1GB", sketch=1024)
    optimizer.zero_grad()
    train_step(accountant, model, optimizer, batch(4, 0))
    assert "whole credit keeps at most about" in caplog.text
    assert "4 rows in each of 54 steps; limit: 1,000 MB" in caplog.text


@pytest.mark.parametrize("name", ["momentum", "adamw", "adam with coupled decay", "nadam", "adafactor", "rmsprop"])
def test_realised_shares_of_the_step_game_are_the_own_parts_of_whole_credit(name: str) -> None:
    """update="realised" with midpoint: what the step game gives a sample for its own step, along the data's part of the move."""
    from test_exact import CASES as OPTIMIZERS

    cls, options, *_ = OPTIMIZERS[name]
    games = []
    for credit in ({"credit": "whole", "credit_memory": "exact"}, {"method": "midpoint", "update": "realised"}):
        model = tiny()
        optimizer = cls(model.parameters(), **{**options, "lr": 1e-5 * options["lr"]})  # so short that all points of a move agree
        accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, **credit)
        for t in range(6):
            last = train_step(accountant, model, optimizer, batch(4, t))
        games.append(last)
    whole, step = (g.contributions["validation"] for g in games)
    assert float((whole - step).abs().max() / whole.abs().max()) < 1e-4
    account = games[1].accounts["validation"]
    assert abs(account.residual) <= 1e-3 * account.spread

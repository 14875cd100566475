"""More points at rough steps of the step game: the residual stays small, calm steps pay nothing, and a named rule is kept."""

from __future__ import annotations

import pytest
import torch

import inrun
from inrun.old.engine.refinement import MOST_PIECES, RESIDUAL
from inrun.training.gpt import next_token_loss
from reference import gradients, real_move, relative_error, sample_gradients, secant_gain
from tiny import batch, tiny, train_step, validation

STEPS = 10
#: Optimizers at rates where the loss bends along a step.
ROUGH = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95)),
}
SETS = {"one": validation, "two": lambda: {"a": validation(99), "b": validation(98)}}


def train(make, fn, steps: int = STEPS, **options):
    model = tiny()
    optimizer = make(model.parameters())
    with inrun.Accountant(model, optimizer, fn, method="midpoint", **options) as accountant:
        results = [train_step(accountant, model, optimizer, batch(4, step)) for step in range(steps)]
    return results, accountant


def off(results) -> list[float]:
    """|residual| / Σ|c| by step, the worst set."""
    return [max(abs(a.residual) / a.spread for a in r.accounts.values()) for r in results]


@pytest.mark.parametrize("sets", [pytest.param(sets, marks=pytest.mark.slow) if sets == "two" else sets for sets in SETS])
@pytest.mark.parametrize("name", ROUGH)
def test_rough_steps_take_points_until_the_residual_is_small(name: str, sets: str) -> None:
    plain, _ = train(ROUGH[name], SETS[sets](), audit_every=1, quadrature="midpoint")
    adaptive, accountant = train(ROUGH[name], SETS[sets](), audit_every=1)
    assert max(off(plain)) > 5 * RESIDUAL  # the control: one point is not enough
    assert max(off(adaptive)) <= RESIDUAL
    points = [next(iter(r.accounts.values())).points for r in adaptive]
    assert [p > 1 for p in points] == [x > RESIDUAL for x in off(plain)]
    assert max(points) <= MOST_PIECES
    rows = accountant.ledger.accounts().to_pylist()
    assert [row["points"] for row in rows if row["validation"] == rows[0]["validation"]] == points
    for row in rows:  # the books are those of any audited step
        told = row["data"] + row["momentum"] + row["decay"] + row["residual"]
        assert told == pytest.approx(row["loss_before"] - row["loss_after"], abs=1e-12)


def test_shares_of_a_refined_step_against_real_moves() -> None:
    """c_n = −⟨δ_n, ∇̄⟩ with two Gauss points along the data's part of the real move, one sample at a time."""
    model, fn = tiny(), validation()
    parameters, optimizer = list(model.parameters()), ROUGH["sgd"](model.parameters())
    rows = batch(4, 0)
    g_n = sample_gradients(lambda j: next_token_loss(model, rows[j : j + 1]) / 4, 4, parameters)
    whole = [torch.stack(g).sum(0) for g in zip(*g_n, strict=True)]
    gain = [secant_gain(optimizer, p, g) for p, g in zip(parameters, whole, strict=True)]
    full = [real_move(optimizer, p, g) for p, g in zip(parameters, whole, strict=True)]
    start = [p.detach().clone() for p in parameters]
    average = [torch.zeros_like(p) for p in parameters]
    for place in (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5):
        with torch.no_grad():
            for p, w, d in zip(parameters, start, full, strict=True):
                p.copy_(w + place * d)
        for total, part in zip(average, gradients(fn(model), parameters), strict=True):
            total += 0.5 * part
    with torch.no_grad():
        for p, w in zip(parameters, start, strict=True):
            p.copy_(w)
    want = torch.stack([sum((g * k * b).sum() for g, k, b in zip(gs, gain, average, strict=True)) for gs in g_n])
    with inrun.Accountant(model, optimizer, fn, method="midpoint", audit_every=0) as accountant:
        result = train_step(accountant, model, optimizer, rows)
    assert result.accounts["validation"].points == 2 and not result.audited
    assert relative_error(result.contributions["validation"], want) < 1e-9


def test_calm_steps_take_no_extra_pass() -> None:
    """Beyond the first few, which are always measured, a step takes one validation gradient and nothing else."""
    passes: list[int] = []
    rows = batch(2, 99)

    def fn(model, step):
        passes.append(step)
        return next_token_loss(model, rows)

    results, accountant = train(lambda p: torch.optim.SGD(p, lr=1e-3), fn, audit_every=0)
    counts = [passes.count(step) for step in range(STEPS)]
    assert counts[5:] == [1] * (STEPS - 5) and min(counts[:5]) > 1
    assert [r.accounts["validation"] is None for r in results] == [False] * 5 + [True] * (STEPS - 5)
    assert {row["points"] for row in accountant.ledger.accounts().to_pylist()} == {1}


@pytest.mark.parametrize("sign", ["clip", "fall"])
def test_a_rough_step_is_known_by_a_cheap_sign(sign: str) -> None:
    """Without audits: a step that is clipped far more than usual, or falls by far more, is measured; its neighbours are not."""
    model, fn = tiny(), validation()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with inrun.Accountant(model, optimizer, fn, method="midpoint", audit_every=0) as accountant:
        for step in range(12):
            rough = step == 9
            optimizer.param_groups[0]["lr"] = 5e-2 if rough and sign == "fall" else 1e-2
            train_step(accountant, model, optimizer, batch(4, 0), clip=1e-3 if rough and sign == "clip" else None)
            assert (accountant.last.accounts["validation"] is not None) == (step < 5 or rough), step


def test_a_resumed_run_knows_what_is_usual() -> None:
    model, fn = tiny(), validation()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with inrun.Accountant(model, optimizer, fn, method="midpoint", audit_every=0) as accountant:
        for step in range(6):
            train_step(accountant, model, optimizer, batch(4, step))
        state = accountant.state_dict()
    for known, measured in ((state, False), ({k: v for k, v in state.items() if k != "usual"}, True)):
        with inrun.Accountant(model, optimizer, fn, method="midpoint", audit_every=0) as accountant:
            accountant.load_state_dict(known)
            result = train_step(accountant, model, optimizer, batch(4, 6))
            assert (result.accounts["validation"] is not None) == measured


@pytest.mark.parametrize("update", ["sgd", "frozen", "realised"])
def test_other_updates_refine_their_own_way(update: str) -> None:
    """Points mend the quadrature, not the proxy: what is explained is the way that is scored."""
    results, _ = train(ROUGH["adamw"], validation(), audit_every=1, update=update)
    assert max(next(iter(r.accounts.values())).points for r in results) > 1
    if update == "realised":
        assert max(off(results)) <= RESIDUAL


@pytest.mark.parametrize("method", ["first", "lookahead", "second"])
def test_other_methods_take_no_points(method: str) -> None:
    model = tiny()
    optimizer = ROUGH["sgd"](model.parameters())
    with inrun.Accountant(model, optimizer, validation(), method=method, audit_every=1) as accountant:
        assert train_step(accountant, model, optimizer, batch(4, 0)).accounts["validation"].points is None

"""One backpropagation serves training and validation rows; training and the model stay what they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper_cases import CASES, Case
from torch import Tensor, nn

import inrun
from inrun.ledger import StepRecord
from inrun.paper import GhostScorer
from reference import gradients, relative_error

N, M = 4, 3
#: eps: attention ignores the bias of its keys, whose gradient is rounding, which AdamW would scale up.
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3),
}


class CountedBackward(torch.autograd.Function):
    """The identity, which counts how often a gradient passes."""

    count = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        CountedBackward.count += 1
        return gradient.clone()


def train(case: Case, optimizer: str, clip: float | None = None, **options: Any) -> tuple[list[Tensor], GhostScorer | None]:
    """Train four steps, with a scorer if there are options; return the weights."""
    model = case.model()
    opt = OPTIMIZERS[optimizer](model)
    scorer = GhostScorer(model, opt, **options) if options else None
    held = case.draw(M, 99)
    for number in range(4):
        rows = case.draw(N, number)
        if scorer is None:
            case.row_losses(model, rows).mean().backward()
            update(model, opt, clip)
            continue
        with scorer.step(range(N), validation_rows=M):
            losses = case.row_losses(model, torch.cat([rows, held]))
            train_loss = losses[:N] / N if options["form"] == "direct" else losses[:N].mean()
            scorer.loss(train_loss, losses[N:].mean()).backward()
            update(model, opt, clip)
    return [p.detach() for p in model.parameters()], scorer


def update(model: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> None:
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("form", ["auto", "direct"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("name", ["perceptron", "reused", "norms", "images", "tables", "tiny GPT"])
def test_training_is_plain_training(name: str, optimizer: str, form: str) -> None:
    plain, _ = train(CASES[name], optimizer, clip=0.05)
    for order in (1, 2):
        weights, _ = train(CASES[name], optimizer, clip=0.05, form=form, order=order)
        assert all(relative_error(w, p) < 1e-12 for w, p in zip(weights, plain, strict=True))
    unclipped, _ = train(CASES[name], "sgd", form=form)
    assert any(relative_error(w, p) > 1e-6 for w, p in zip(unclipped, plain, strict=True))  # the control


def test_one_backpropagation_equals_separate_passes() -> None:
    """Contributions, gradient and losses of a merged step are those of two passes; it runs one backward."""
    case = CASES["norms"]
    tapped = Case(lambda: nn.Sequential(case.build(), Tapped()), case.draw, case.losses)
    model = tapped.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, held, parameters = case.draw(N, 0), case.draw(M, 1), list(model.parameters())
    scorer = GhostScorer(model, optimizer)
    for passes in (3, 1):  # the first step also checks, by two backpropagations, whose rows are whose
        loss = tapped.row_losses(model, held).mean()
        total = gradients(tapped.row_losses(model, rows).mean(), parameters)
        towards = gradients(tapped.row_losses(model, held).mean(), parameters)
        CountedBackward.count = 0
        with scorer.step(range(N), validation_rows=M):
            losses = tapped.row_losses(model, torch.cat([rows, held]))
            scorer.loss(losses[:N].mean(), losses[N:].mean()).backward()
            assert CountedBackward.count == passes
            merged = [p.grad.clone() for p in parameters if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        assert all(relative_error(a, b) < 1e-12 for a, b in zip(merged, total, strict=True))
        data = torch.stack([0.1 * (g * v).sum() for g, v in zip(total, towards, strict=True)]).sum()
        assert relative_error(scorer.last.contributions.sum(), data) < 1e-12
        assert scorer.last.validation_loss == pytest.approx(float(loss.detach()), rel=1e-12)


class Tapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return CountedBackward.apply(x)


class Unused(nn.Module):
    """A layer that the loss does not depend on, and one that only the validation loss could see."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.used(x)


@pytest.mark.parametrize("form", ["auto", "direct"])
def test_a_parameter_without_gradient_keeps_none(form: str) -> None:
    """Weight decay would move it otherwise."""
    case = Case(Unused, CASES["linear"].draw, CASES["linear"].losses)
    plain, _ = train(case, "sgd")
    weights, _ = train(case, "sgd", form=form, order=2)
    assert all(relative_error(w, p) < 1e-12 for w, p in zip(weights, plain, strict=True))


def test_the_model_is_left_as_it_was() -> None:
    case = CASES["images"]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].bias.requires_grad_(False)
    trained = [p.requires_grad for p in model.parameters()]
    scorer = GhostScorer(model, optimizer, order=2)
    rows = case.draw(N + M, 0)
    expected = model(rows)
    with scorer.step(range(N), validation_rows=M):
        with torch.no_grad():  # a forward beside the batch, of another size, is not observed
            model(rows[:2])
        losses = case.losses(out := model(rows), rows)
        assert torch.equal(out, expected)
        assert [p.requires_grad for p in model.parameters()] == trained
        scorer.loss(losses[:N].mean(), losses[N:].mean()).backward()
        optimizer.step()
    assert [p.requires_grad for p in model.parameters()] == trained
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks


def test_a_failed_forward_leaves_nothing_frozen_and_the_next_step_runs() -> None:
    case = CASES["perceptron"]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained = [p.requires_grad for p in model.parameters()]
    scorer = GhostScorer(model, optimizer)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        with scorer.step(range(N), validation_rows=M):
            model(torch.zeros(N + M, 5, dtype=torch.float64))
    assert [p.requires_grad for p in model.parameters()] == trained
    with scorer.step(range(N), validation_rows=M):
        losses = case.row_losses(model, case.draw(N + M, 0))
        scorer.loss(losses[:N].mean(), losses[N:].mean()).backward()
        optimizer.step()
    assert scorer.steps_done == 1


# The ledger


@pytest.mark.parametrize("order", [1, 2])
def test_a_folder_gets_contributions_and_accounts(tmp_path: Path, order: int) -> None:
    _, scorer = train(CASES["perceptron"], "sgd", clip=0.5, form="auto", order=order, ledger=tmp_path / "run")
    assert scorer is not None
    scorer.close()
    _, memory = train(CASES["perceptron"], "sgd", clip=0.5, form="auto", order=order)
    assert memory is not None and isinstance(memory.ledger, inrun.MemoryLedger)
    read = inrun.Ledger.open(tmp_path / "run")
    assert read.about["method"] == ("first" if order == 1 else "second")
    found = read.contributions().to_pydict()
    assert found["sample_id"] == list(range(N)) * 4
    assert found["step"] == [step for step in range(4) for _ in range(N)]
    assert np.allclose(found["contribution"][-N:], scorer.last.contributions.numpy(), rtol=1e-6)
    account = read.accounts().to_pylist()[-1]
    assert account["data"] == pytest.approx(float(scorer.last.contributions.sum()))
    assert (account["lr"], account["n_samples"], account["skipped"]) == (0.1, N, None)
    scores = read.scores().sort_by("sample_id")["score"].to_pylist()
    assert scores == memory.ledger.scores().sort_by("sample_id")["score"].to_pylist()
    assert scores == pytest.approx(np.reshape(found["contribution"], (4, N)).sum(0).tolist(), rel=1e-6)


def test_a_step_that_is_not_finite_is_recorded_as_skipped(caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        records: list[StepRecord] = []  # noqa: RUF012 - one test

        def write(self, record: StepRecord) -> None:
            self.records.append(record)

    case = CASES["linear"]
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scorer = GhostScorer(model, optimizer, ledger=(writer := Writer()))
    for bad in (0, N):  # a training row, a validation row
        model.load_state_dict(case.model().state_dict())
        rows = case.draw(N + M, 0)
        rows[bad] = float("inf")
        with caplog.at_level(logging.WARNING), scorer.step(range(N), validation_rows=M):
            losses = case.row_losses(model, rows)
            scorer.loss(losses[:N].mean(), losses[N:].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert scorer.last.skipped is not None and not scorer.last.contributions.any()
        assert writer.records[-1].contributions == {}
        assert writer.records[-1].accounts[0]["skipped"] == scorer.last.skipped
        assert scorer.last.skipped in caplog.text
    assert "validation" in (scorer.last.skipped or "") and scorer.steps_done == 2

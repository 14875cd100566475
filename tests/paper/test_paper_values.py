"""Values of the ghost products against one-sample-at-a-time autograd, and against the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paper_cases import CASES, Case, TinyGPT, next_token, tokens, truth
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inrun
from inrun.paper import GhostScorer, ScoredStep
from reference import relative_error

N, M, LR = 4, 3, 0.3
FORMS = ("auto", "gram", "formed", "direct")


def score(
    case: Case,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Tensor,
    held: Tensor,
    clip: float | None = None,
    scale: float = 1.0,
    **options: Any,
) -> tuple[ScoredStep, list[Tensor | None]]:
    """Run one step; return its result and the gradients that the optimizer got."""
    scorer, n = GhostScorer(model, optimizer, **options), len(rows)
    with scorer.step(range(n), validation_rows=len(held)):
        losses = case.row_losses(model, torch.cat([rows, held]))
        train = losses[:n] / n if options.get("form") == "direct" else losses[:n].mean()
        (scorer.loss(train, losses[n:].mean()) * scale).backward()
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= scale
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        got = [None if p.grad is None else p.grad.clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return scorer.last, got


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", list(CASES))
def test_every_form_agrees_with_one_sample_at_a_time(name: str, order: int) -> None:
    case = CASES[name]
    rows, held = case.draw(N, 1), case.draw(M, 2)
    rates = [LR] * sum(p.requires_grad for p in case.model().parameters())
    exact = truth(case, case.model(), rows, held, rates)
    expected = exact.values(rates, order)
    for form in FORMS:
        model = case.model()
        result, gradients = score(case, model, sgd(model), rows, held, order=order, form=form)
        assert relative_error(result.contributions, expected) < 1e-9, form
        largest = max(float(total.abs().max()) for total in exact.total)
        for g, total in zip(gradients, exact.total, strict=True):  # that of attention's key bias is rounding
            got = torch.zeros_like(total) if g is None else g
            assert float((got - total).abs().max()) < 1e-12 * largest
        chosen = set(result.forms.values())
        assert "gram" not in chosen if form in ("formed", "direct") else "gram" in chosen or form == "auto"
        # The controls: a sign, a swapped row, the other order.
        assert relative_error(-result.contributions, expected) > 1
        assert relative_error(result.contributions[[1, 0, 2, 3]], expected) > 1e-3
        assert relative_error(result.contributions, exact.values(rates, 3 - order)) > 1e-5


def test_cost_decides_by_parameter() -> None:
    """2T² against d₁d₂: 4 positions and 3 validation rows, 2·4·12 = 96 numbers in gram form."""
    case = CASES["sequences"]
    model = case.model()
    result, _ = score(case, model, sgd(model), case.draw(N, 1), case.draw(M, 2))
    assert result.forms == {"0.weight": "gram", "0.bias": "formed", "2.weight": "gram", "2.bias": "formed"}
    result, _ = score(case, model, sgd(model), case.draw(N, 1), case.draw(8, 2))
    assert result.forms["0.weight"] == "formed"  # 2·4·32 > 6·40
    assert result.forms["2.weight"] == "gram"


@pytest.mark.parametrize("order", [1, 2])
def test_learning_rates_by_group_and_the_clip_factor_count(order: int) -> None:
    case = CASES["perceptron"]
    rows, held = case.draw(N, 1), case.draw(M, 2)
    names = [name for name, p in case.model().named_parameters() if p.requires_grad]
    rates = [0.5 if "weight" in name else 0.2 for name in names]
    exact = truth(case, case.model(), rows, held, rates)
    norm = torch.stack([g.norm() for g in exact.total]).norm()
    clip = float(norm) / 3
    for form in FORMS:
        model = case.model()
        groups = [{"params": [p], "lr": r} for p, r in zip([p for p in model.parameters() if p.requires_grad], rates, strict=True)]
        result, _ = score(case, model, torch.optim.SGD(groups), rows, held, clip, 64.0, order=order, form=form)
        assert abs(result.clip - 1 / 3) < 1e-5
        assert relative_error(result.contributions, exact.values(rates, order, result.clip)) < 1e-9
        assert relative_error(result.contributions, exact.values(rates, order)) > 0.1  # the control


def test_maximising_turns_the_sign() -> None:
    case = CASES["linear"]
    rows, held = case.draw(N, 1), case.draw(M, 2)
    down, up = case.model(), case.model()
    lowered, _ = score(case, down, torch.optim.SGD(down.parameters(), lr=LR), rows, held)
    raised, _ = score(case, up, torch.optim.SGD(up.parameters(), lr=LR, maximize=True), rows, held)
    assert torch.equal(lowered.contributions, -raised.contributions)


def test_second_order_predicts_the_fall_better_than_first() -> None:
    """Positive means that the loss falls; what is left out is of order η² and η³."""
    case = CASES["tiny GPT"]
    rows, held = case.draw(N, 1), case.draw(M, 2)
    errors = []
    for order in (1, 2):
        model = case.model()
        before = case.row_losses(model, held).mean()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR / 10)
        result, _ = score(case, model, optimizer, rows, held, order=order)
        fall = float((before - case.row_losses(model, held).mean()).detach())
        errors.append(abs(float(result.contributions.sum()) - fall))
        assert fall > 0
    assert errors[1] < errors[0] / 10


def test_the_hessian_is_zero_where_the_loss_is_linear() -> None:
    linear = Case(lambda: nn.Linear(6, 3), CASES["linear"].draw, lambda out, rows: out.sum(1))
    model = linear.model()
    rows, held = linear.draw(N, 1), linear.draw(M, 2)
    first, _ = score(linear, model, sgd(model), rows, held)
    second, _ = score(linear, model, sgd(model), rows, held, order=2)
    assert first.contributions.any()
    assert torch.equal(first.contributions, second.contributions)


@pytest.mark.parametrize("order", [1, 2])
def test_checkpointed_segments_count_once(order: int) -> None:
    class Checkpointed(TinyGPT):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=False)
            return self.head(self.norm(hidden))

    rows, held = tokens(N, 1), tokens(M, 2)
    found = []
    for build in (TinyGPT, Checkpointed):
        case = Case(build, tokens, next_token)
        model = case.model()
        found.append(score(case, model, sgd(model), rows, held, order=order)[0].contributions)
    assert relative_error(found[1], found[0]) < 1e-12


def test_the_direct_form_takes_every_layer_and_samples_apart() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0])

    case = Case(Recurrent, CASES["sequences"].draw, CASES["sequences"].losses)
    rows, held = case.draw(N, 1), case.draw(M, 2)
    model = case.model()
    rates = [LR] * len(list(model.parameters()))
    expected = truth(case, model, rows, held, rates).values(rates, 2)
    scorer = GhostScorer(model, optimizer := sgd(model), order=2, form="direct")
    with scorer.step(range(N), validation_rows=M):
        shares = torch.cat([case.row_losses(model, rows[j : j + 1]) / N for j in range(N)])
        scorer.loss(shares, case.row_losses(model, held).mean()).backward()
        optimizer.step()
    assert relative_error(scorer.last.contributions, expected) < 1e-9


# Against the engine


METHODS = {1: "first", 2: "second"}


def engine_contributions(case: Case, order: int, rows: Tensor, held: Tensor, clip: float) -> Tensor:
    """Return what the engine says of one step, ``[n]``."""
    model = case.model()
    optimizer = sgd(model)
    validation = lambda m: case.row_losses(m, held).mean()  # noqa: E731
    with inrun.Accountant(model, optimizer, validation, method=METHODS[order]) as accountant:
        with accountant.step(range(len(rows))):
            case.row_losses(model, rows).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        return accountant.last.contributions["validation"]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", ["perceptron", "norms", "images", "tables", "tiny GPT"])
def test_agrees_with_the_engine(name: str, order: int) -> None:
    case = CASES[name]
    rows, held = case.draw(N, 1), case.draw(M, 2)
    expected = engine_contributions(case, order, rows, held, 0.1)
    for form in FORMS:
        model = case.model()
        result, _ = score(case, model, sgd(model), rows, held, clip=0.1, order=order, form=form)
        assert relative_error(result.contributions, expected) < 1e-9

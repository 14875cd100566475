"""What the paper's algorithms cannot do is refused by name; bad input gets one clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from paper_cases import CASES
from torch import Tensor, nn

from inrun.errors import (
    ConfigurationError,
    CoverageError,
    IdsError,
    InrunError,
    LedgerError,
    OptimizerError,
    RowOwnershipError,
    StepError,
    ValidationError,
)
from inrun.paper import GhostScorer

N, M, D = 4, 3, 6


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def new_scorer(model: nn.Module, **options: Any) -> GhostScorer:
    return GhostScorer(model, sgd(model), **options)


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale)


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "recurrent": (lambda: nn.LSTM(D, 3), "LSTM"),
    "attention": (lambda: nn.MultiheadAttention(D, 2), "MultiheadAttention"),
    "batch norm": (lambda: nn.BatchNorm1d(D), "BatchNorm1d"),
    "transposed convolution": (lambda: nn.ConvTranspose1d(D, 3, 2), "ConvTranspose1d"),
    "raw parameter": (Raw, "Raw"),
    "own forward": (lambda: Doubling(D, 3), "Doubling"),
    "reparametrised": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)), "ParametrizationList"),
    "sparse table": (lambda: nn.Embedding(5, D, sparse=True), "Embedding with sparse"),
    "bounded table": (lambda: nn.Embedding(5, D, max_norm=1.0), "Embedding with max_norm"),
    "frequencies": (lambda: nn.Embedding(5, D, scale_grad_by_freq=True), "Embedding with scale_grad_by_freq"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_layers_without_a_ghost_product_are_refused_by_name(name: str) -> None:
    build, kind = REFUSED[name]
    model = nn.Sequential()
    model.add_module("odd", build())
    with pytest.raises(CoverageError, match=rf"'odd.*' \({kind}.*form=\"direct\""):
        new_scorer(model)
    for p in model.parameters():
        p.requires_grad_(False)
    model.add_module("head", nn.Linear(D, 3))
    new_scorer(model)  # frozen, it is fine


def test_a_long_list_is_cut() -> None:
    with pytest.raises(CoverageError, match="and 2 more"):
        new_scorer(nn.Sequential(*(nn.PReLU() for _ in range(7))))


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"order": 3}, ConfigurationError, "order is 3"),
        ({"order": True}, ConfigurationError, "order is True"),
        ({"form": "shared"}, ConfigurationError, "auto, gram, formed and direct"),
        ({"ledger": 5}, LedgerError, "ledger is int"),
    ],
)
def test_options(options: dict[str, Any], error: type[InrunError], said: str) -> None:
    with pytest.raises(error, match=said):
        new_scorer(nn.Linear(D, 3), **options)


def test_model_and_optimizer() -> None:
    model, other = nn.Linear(D, 3), nn.Linear(D, 3)
    with pytest.raises(ConfigurationError, match="got a Linear and a Linear"):
        GhostScorer(model, other)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="2 parameters of the optimizer are not in the model"):
        GhostScorer(model, sgd(other))
    with pytest.raises(ConfigurationError, match="OptimizedModule is not supported"):
        GhostScorer(torch.compile(model), sgd(model))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (5, "int"),
        ("abcd", "str"),
        (["a", "b"], "integers"),
        ([0.5, 1.0], "float32"),
        ([True, False], "bool"),
        ([], r"\(0,\)"),
        ([[1, 2], [3, 4]], r"\(2, 2\)"),
        ([2**70], "64 bits"),
    ],
)
def test_ids(ids: Any, said: str) -> None:
    scorer = new_scorer(nn.Linear(D, 3))
    with pytest.raises(IdsError, match=said), scorer.step(ids, validation_rows=1):
        pass


@pytest.mark.parametrize("m", [0, -1, 1.5, True, None])
def test_validation_rows(m: Any) -> None:
    scorer = new_scorer(nn.Linear(D, 3))
    with pytest.raises(StepError, match="validation_rows is"), scorer.step([1], validation_rows=m):
        pass


def run(
    model: nn.Module,
    rows: Tensor,
    n: int = N,
    m: int = M,
    losses: Callable[[Tensor], Tensor] = lambda out: out.square().flatten(1).sum(1),
    split: Callable[[Tensor, int], tuple[Tensor, Tensor]] = lambda x, n: (x[:n].mean(), x[n:].mean()),
    between: Callable[[nn.Module, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    **options: Any,
) -> GhostScorer:
    """Run one step in which one thing is odd."""
    optimizer = sgd(model)
    scorer = GhostScorer(model, optimizer, **options)
    with scorer.step(range(n), validation_rows=m):
        scorer.loss(*split(losses(model(rows)), n)).backward()
        between(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return scorer


def test_the_batch_has_one_row_per_id_and_validation_row() -> None:
    run(nn.Linear(D, 3), torch.randn(7, D))
    for n, m in ((5, 3), (3, 3), (1, 7), (7, 1), (4, 7)):
        with pytest.raises(RowOwnershipError, match=rf"layer '' maps shape \(7, 6\).*the {n + m} rows"):
            run(nn.Linear(D, 3), torch.randn(7, D), n, m)


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (lambda x, n: (x[n:].mean(), x[:n].mean()), "training loss depends on rows of the other kind"),
        (lambda x, n: (x.mean(), x[n:].mean()), "training loss depends on rows of the other kind"),
        (lambda x, n: (x[:n].mean(), x.mean()), "validation loss depends on rows of the other kind"),
        (lambda x, n: (x[: n + 1].mean(), x[n + 1 :].mean()), "training loss depends"),
        (lambda x, n: (x[:n].mean(), x[n:].mean() + x[0] / 100), "validation loss depends"),
    ],
)
def test_each_loss_is_of_its_own_rows(split: Any, said: str) -> None:
    with pytest.raises(RowOwnershipError, match=said):
        run(nn.Linear(D, 3), torch.randn(7, D), split=split)


def test_a_new_shape_is_checked_again() -> None:
    """Positions of shape [t] look like one token per row where t is the number of rows."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, D), nn.Embedding(9, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.tokens(x) * self.positions(torch.arange(x.shape[1]))

    model = Positions()
    scorer = GhostScorer(model, optimizer := sgd(model))
    for t in (5, 5, 7):
        rows = torch.randint(0, 9, (7, t))

        def step(rows: Tensor = rows) -> None:
            with scorer.step(range(N), validation_rows=M):
                losses = model(rows).square().sum((1, 2))
                scorer.loss(losses[:N].mean(), losses[N:].mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

        if t < 7:
            step()
        else:
            with pytest.raises(RowOwnershipError, match="'positions'"):
                step()


def test_layers_with_other_dimensions_first_are_refused() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.transpose(0, 1)).transpose(0, 1)

    with pytest.raises(RowOwnershipError, match=r"'layer' maps shape \(5, 7, 6\)"):
        run(Flat(), torch.randn(7, 5, D))


def test_batch_norm_without_parameters_mixes_rows_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False), nn.Linear(D, 3))
    with pytest.raises(StepError, match="batch norm '1' in training mode"):
        run(model, torch.randn(7, D))
    run(model.eval(), torch.randn(7, D))


def test_a_parameter_that_is_read_outside_its_layer_is_refused() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ self.layer.weight

    model = Functional()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CoverageError, match="'layer.weight' is used outside"):
        run(model, torch.randn(7, D))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_inputs_that_are_overwritten_are_refused() -> None:
    class Overwriting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x) * 1.0
            y = self.second(x)
            x.add_(1.0)
            return x + y

    with pytest.raises(StepError, match="'second' was changed in place"):
        run(Overwriting(), torch.randn(7, D))


def test_inputs_by_keyword_are_refused() -> None:
    class Keyword(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](input=x)

    with pytest.raises(StepError, match="'0' got its input by keyword"):
        run(Keyword(nn.Linear(D, 3)), torch.randn(7, D))


@pytest.mark.parametrize(
    ("split", "form", "said"),
    [
        (lambda x, n: (x[:n], x[n:]), "auto", r"validation loss has shape \(3,\)"),
        (lambda x, n: (x[: n - 1], x[n:].mean()), "auto", r"training loss has shape \(3,\).*\(4,\), or a scalar"),
        (lambda x, n: (x[:n].mean(), x[n:].mean()), "direct", r"training loss has shape \(\).*shape \(4,\)"),
        (lambda x, n: (x[:n].mean(), x[n:].mean().detach()), "auto", "validation loss has no graph"),
        (lambda x, n: (x[:n].mean().detach(), x[n:].mean()), "auto", "training loss has no graph"),
    ],
)
def test_losses(split: Any, form: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        run(nn.Linear(D, 3), torch.randn(7, D), split=split, form=form)


def change_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.mul_(0.5)


def change_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.2


def step_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@pytest.mark.parametrize(
    ("between", "error", "said"),
    [
        (change_one, OptimizerError, "gradient of '0.weight' was changed by another factor"),
        (change_rate, StepError, "a learning rate changed"),
        (step_twice, StepError, "the optimizer stepped twice"),
    ],
)
def test_between_backward_and_update(between: Any, error: type[InrunError], said: str) -> None:
    with pytest.raises(error, match=said):
        run(nn.Sequential(nn.Linear(D, 3), nn.Linear(3, 2)), torch.randn(7, D), between=between)


def test_a_step_needs_a_backward_an_update_and_nothing_twice() -> None:
    case = CASES["linear"]
    model = case.model()
    scorer = GhostScorer(model, optimizer := sgd(model))
    rows = case.draw(N + M, 0)
    before = model.weight.detach().clone()

    def loss() -> Tensor:
        losses = case.row_losses(model, rows)
        return scorer.loss(losses[:N].mean(), losses[N:].mean())

    with pytest.raises(StepError, match="no step has finished"):
        _ = scorer.last
    with pytest.raises(StepError, match="outside a step"):
        loss()
    with pytest.raises(StepError, match=r"without scorer.loss\(...\).backward"), scorer.step(range(N), validation_rows=M):
        loss()
    with pytest.raises(StepError, match="no backward has run before"), scorer.step(range(N), validation_rows=M):
        case.row_losses(model, rows).mean().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(StepError, match=r"without optimizer.step"), scorer.step(range(N), validation_rows=M):
        loss().backward()
    with pytest.raises(StepError, match="gradient from before the step"), scorer.step(range(N), validation_rows=M):
        pass
    optimizer.zero_grad(set_to_none=False)
    with pytest.raises(StepError, match="called twice"), scorer.step(range(N), validation_rows=M):
        loss(), loss()
    with pytest.raises(StepError, match="one backward"), scorer.step(range(N), validation_rows=M):
        twice = loss()
        twice.backward()
        twice.backward()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="a step is open"), scorer.step(range(N), validation_rows=M):
        with scorer.step(range(N), validation_rows=M):
            pass
    with pytest.raises(CoverageError, match="no layer of the model ran"), scorer.step(range(N), validation_rows=M):
        free = torch.ones(7, requires_grad=True)
        scorer.loss(free[:N].sum(), free[N:].sum()).backward()
    assert scorer.steps_done == 0
    with scorer.step(range(N), validation_rows=M):  # and after all that, a step
        loss().backward()
        optimizer.step()
    assert scorer.steps_done == 1 and not torch.equal(model.weight, before)

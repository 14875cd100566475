"""Odd models (``tests/odd_models.py``) are scored as one sample at a time, or refused by name: whose row is it?"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inrun.engine import Accountant, quadrature
from inrun.engine.rows import RowProbe
from inrun.errors import IdsError, InrunError, RowOwnershipError
from inrun.layers.layout import Layout
from loops import METHODS
from odd_models import MOVED, ODD, D, Odd, draw, linear, mixup, model, odd, table, words
from reference import gradients, relative_error

RATE = 1e-3
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def loss_of(out: Tensor) -> Tensor:
    return out if out.dim() == 0 else out.square().sum() + out.sin().sum()


def part(x: Any, j: int, n: int) -> Any:
    rows = len(x) // n
    return x[j * rows : (j + 1) * rows]


def one_at_a_time(case: Odd, net: nn.Module, batch: tuple[Any, ...], n: int) -> list[list[Tensor]]:
    found = []
    for j in range(n):
        twin = copy.deepcopy(net)
        loss = loss_of(case.call(twin, *(part(x, j, n) for x in batch)))
        for p in twin.parameters():
            p.grad = None
        found.append(gradients(loss, list(twin.parameters())))
    return found


def errors(case: Odd, method: str) -> list[float]:
    """Train; return the error of every step's scores, relative to the largest."""
    torch.manual_seed(0)
    net = case.build().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    value = lambda m: loss_of(case.call(m, *case.held))  # noqa: E731
    found = []
    with Accountant(net, optimizer, value, audit_every=case.audit_every, **METHODS[method]) as accountant:
        for step, batch in enumerate(case.batches):
            case.before(net, step)
            n = len(batch[0])
            each = one_at_a_time(case, net, batch, n)
            earlier, before = copy.deepcopy(net), [p.detach().clone() for p in net.parameters()]
            optimizer.zero_grad()
            with accountant.step(range(n)):
                loss_of(case.call(net, *batch)).backward()
                optimizer.step()
            got = accountant.last.contributions["validation"]
            assert accountant.last.skipped is None
            twin = (earlier if method == "first" else copy.deepcopy(net)).eval()
            with torch.no_grad():
                for p, a, b in zip(twin.parameters(), before, net.parameters(), strict=True):
                    p.copy_(a if method == "first" else (a + b) / 2)
            slope = gradients(value(twin), list(twin.parameters()))
            truth = torch.stack([RATE * sum((g * v).sum() for g, v in zip(gs, slope, strict=True)) for gs in each])
            found.append(relative_error(got, truth))
            assert n == 1 or relative_error(got.roll(1), truth) > 1e-4  # the control
    return found


@pytest.mark.parametrize("method", ["first", "exact"])
@pytest.mark.parametrize("name", ODD)
def test_odd_models(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))
    case = ODD[name]
    if not case.refused:
        assert max(errors(case, method)) < case.near
        return
    with pytest.raises(InrunError) as error:
        errors(case, method)
    text = f"{type(error.value).__name__}: {error.value}"
    assert re.search(case.refused, text), text


def test_control_sums_do_not_see_whose_row_is_whose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is taken for another passes conservation, and the scores are wrong."""
    case = odd(model(lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), inner=linear()), (3, 3, D))
    assert max(errors(case, "first")) < case.near

    def first(self: RowProbe, outputs: Any) -> dict[Any, str]:
        for tap in self.taps:
            tap.layout = Layout("first", 3)
        return dict.fromkeys(self.taps, "first")

    monkeypatch.setattr(RowProbe, "read", first)
    assert max(errors(case, "first")) > 0.1


def attached(net: nn.Module, held: Tensor, **options: Any) -> Accountant:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    return Accountant(net, optimizer, lambda m: loss_of(m(held)), **({"method": "first", "audit_every": 0} | options))


def step(accountant: Accountant, x: Tensor, ids: Any = None) -> Tensor:
    net, (optimizer,) = accountant.model, accountant.optimizers
    optimizer.zero_grad()
    with accountant.step(range(len(x)) if ids is None else ids):
        loss_of(net(x)).backward()
        optimizer.step()
    return accountant.last.contributions["validation"]


@pytest.mark.parametrize("audit_every", [None, 4])
def test_rows_that_mix_now_and_then_are_found(audit_every: int | None) -> None:
    found = 0
    for seed in range(5):
        x = draw(6, D)
        net = model(lambda m, x: mixup(m, x) if m.training and torch.rand(()) < 0.3 else m.inner(x), inner=linear())().double()
        torch.manual_seed(seed)
        accountant = attached(net, x[:1], audit_every=audit_every)
        try:
            for _ in range(50):
                step(accountant, x)
        except RowOwnershipError as error:
            found += bool(re.search(MOVED.split(": ")[1], str(error)))
    assert found >= 4


def test_an_order_that_data_decides_is_read_every_step() -> None:
    """Rows are sorted by length inside; in the first steps all are as long as each other, which hides that."""
    by_length = model(lambda m, x: m.inner(x[(o := (x != 0).sum(1)[:, 0].sort(stable=True)[1])])[o.argsort()], inner=linear())
    full, some = draw(4, 3, D), draw(4, 3, D, seed=1)
    some[0, 1:] = some[2, 2:] = 0
    assert max(errors(Odd(by_length, [(full,)] * 5 + [(some,)] * 2, (full[:2],), audit_every=0), "first")) < 1e-9


@pytest.mark.parametrize(
    ("n", "given", "error"), [(5, 6, IdsError), (12, 6, IdsError), (3, 6, RowOwnershipError), (2, 6, RowOwnershipError)]
)
def test_another_number_of_ids_than_rows(n: int, given: int, error: type[Exception]) -> None:
    accountant = attached(
        model(lambda m, x: m.inner(torch.tanh(m.words(x))), inner=linear(), words=table())().double(), words(2, 4)
    )
    with pytest.raises(error, match=rf"(got {n} sample ids.*\[{given}\]|for {n} samples)"):
        step(accountant, words(given, 4), range(n))
    assert step(accountant, words(given, 4)).shape == (given,)


def test_what_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at sizes that were seen, not for outputs that nobody uses; and anew at every new size, for a while."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.LSTM(D, D, batch_first=True), nn.Linear(D, 3)
            self.states = 0.0

        def forward(self, x: Tensor) -> Tensor:
            out, (last, _) = self.body(x)
            return self.head(out) if not self.states else self.head(out + last.transpose(0, 1))

    reads: list[int] = []
    read = RowProbe.read
    monkeypatch.setattr(RowProbe, "read", lambda self, outputs: (reads.append(1), read(self, outputs))[1])
    net = Tagger().double()
    accountant = attached(net, draw(2, 5, D))
    counts = []
    for n in (4, 4, 3, 3, 4, 3, 4):
        step(accountant, draw(n, 5, D))
        counts.append(len(reads))
    assert counts == [1, 1, 2, 2, 2, 2, 2]
    net.states = 1.0
    with pytest.raises(RowOwnershipError, match="run the step again"):
        step(accountant, draw(4, 5, D))
    step(accountant, draw(4, 5, D))


def test_a_model_that_is_no_longer_finite_is_not_scored() -> None:
    net = nn.Sequential(nn.Linear(D, D), nn.Linear(D, 1)).double()
    with torch.no_grad():
        net[0].weight.fill_(float("inf"))
    accountant = attached(net, draw(2, D), audit_every=1)
    step(accountant, draw(3, D))
    assert accountant.last.skipped is not None

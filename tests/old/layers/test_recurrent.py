"""Recurrent networks train as the framework's own: dropout between layers, states that come from outside, packed outputs."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import CoverageError
from reference import relative_error


class Language(nn.Module):
    """Sequences with a first state that depends on the sample, and a head."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.first, self.head = layer, nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x[:, 0])).unsqueeze(0).expand(self.layer.num_layers, -1, -1).contiguous()
        out, _ = self.layer(x, (h, h.sin()) if isinstance(self.layer, nn.LSTM) else h)
        return self.head(out)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_training_is_the_frameworks(kind: type[nn.RNNBase]) -> None:
    """With the same random state, dropout between layers draws the same mask: gradients agree to rounding."""
    torch.manual_seed(0)
    model = Language(kind(6, 5, 3, batch_first=True, dropout=0.4)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 7, 6).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), credit="step", audit_every=1) as accountant:
        with accountant.step(range(4)):
            torch.manual_seed(3)
            model(x).square().sum().backward()
            optimizer.step()
        assert accountant.last.contributions["validation"].shape == (4,)
    torch.manual_seed(3)
    plain(x).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert relative_error(p.grad, q.grad) < 1e-12, name


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        width = layer.hidden_size * (2 if layer.bidirectional else 1)
        self.layer, self.head = layer, nn.Linear(width, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        by_length = bool((lengths.diff() <= 0).all())
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=by_length)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 2, 4], [7, 5, 5, 1]])
def test_dropout_of_packed_sequences_is_the_frameworks(kind: type[nn.RNNBase], both_ways: bool, lengths: list[int]) -> None:
    """Masks are drawn for the packed rows, in their order: two steps from the same seed give the same weights."""
    x = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(1)).double()
    found = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Packed(kind(6, 5, 3, batch_first=True, dropout=0.4, bidirectional=both_ways)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = (x, torch.tensor(lengths))
        loss = lambda m, given=given: m(*given).square().sum()  # noqa: E731
        accountant = inrun.Accountant(model, optimizer, loss, credit="step", check_rows=False) if attached else None
        torch.manual_seed(3)
        for _ in range(2):
            with accountant.step(range(4)) if accountant else contextlib.nullcontext():
                loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    for plain, scored in zip(*found, strict=True):
        assert relative_error(scored, plain) < 1e-12


def test_dropout_where_the_kernel_must_run_is_refused() -> None:
    model = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 7, 6)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1])[0].square().sum(), credit="step", bitwise=True)
    with accountant, pytest.raises(CoverageError, match="set its dropout to 0"), accountant.step(range(4)):
        model(x)[0].square().sum().backward()

"""Packed documents: the same numbers as one document per row, and refused by name where documents see each other."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.engine import documents as documents_module
from packing import ONE_ROW, TWO_ROWS, Batch, both, gpt_logits, loss_of, packed_gpt
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

Logits = Callable[[nn.Module, Batch], Tensor]


@pytest.fixture(params=[16, 1], ids=["whole", "chunks"])
def cost(request, monkeypatch) -> int:
    """With a low cost of chunks, small documents are cut into several."""
    monkeypatch.setattr(documents_module, "CHUNK_COST", request.param)
    return request.param


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model: nn.Module, logits: Logits, optimizer: str, arrangement: str, rows, steps: int = 3, **options):
    """Train on packed batches or on the same documents one per row; return the accountant, results and settled credits."""
    opt = make_optimizer(model, optimizer)
    held_out = both(rows, 50)[1]
    ledger = inrun.ledger.MemoryLedger({})
    accountant = inrun.Accountant(
        model, opt, lambda m: loss_of(logits(m, held_out), held_out.labels), audit_every=1, ledger=ledger, **options
    )
    results = []
    for step in range(steps):
        packed, plain, ids = both(rows, step)
        batch, given = (packed, packed.ids) if arrangement == "packed" else (plain, ids)
        with accountant.step(given):
            loss_of(logits(model, batch), batch.labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        results.append(accountant.last)
    return accountant, results


def table(accountant) -> dict[int, float]:
    scores = accountant.scores().to_pydict()
    return dict(zip(scores["sample_id"], scores["score"], strict=True))


def assert_same(make, logits: Logits, rows, optimizer: str, tolerance: float = 1e-9, **options) -> None:
    model = make()
    twin = copy.deepcopy(model)
    packed, got = train(model, logits, optimizer, "packed", rows, **options)
    plain, expected = train(twin, logits, optimizer, "rows", rows, **options)
    for a, b in zip(got, expected, strict=True):
        assert a.sample_ids.tolist() == b.sample_ids.tolist()
        assert relative_error(a.contributions["validation"], b.contributions["validation"]) < tolerance
        assert b.contributions["validation"].abs().max() > 1e-8
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) < tolerance
    mine, theirs = table(packed), table(plain)
    assert mine.keys() == theirs.keys()
    largest = max(abs(x) for x in theirs.values())
    assert max(abs(mine[i] - theirs[i]) for i in theirs) < 1e-5 * largest  # the ledger keeps single precision


GAMES = [
    {"credit": "step", "method": "first"},
    {"credit": "step", "method": "lookahead"},
    {"credit": "step", "method": "second"},
    {"credit": "step", "method": "midpoint"},
    {"credit": "whole", "credit_memory": "exact"},
    {"credit": "whole", "credit_memory": "sketch"},
    {"credit": "whole", "credit_memory": "sketch", "sketch": 64},
]


@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(str(x) for x in g.values()))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_packed_documents_equal_documents_in_rows(game, optimizer, cost) -> None:
    assert_same(packed_gpt, gpt_logits, TWO_ROWS, optimizer, **game)

"""Learning rate and clip factor of every optimizer are in the accounts; books from before these columns are read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import nn

import inrun
from inrun.analysis import summarise
from inrun.ledger import parts, schema
from inrun.ledger.verify import verify


def train(folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[2].parameters(), lr=0.02)]
    x = torch.randn(5, 3).double()
    with inrun.Accountant(
        model, optimizers, lambda m: m(x[:1]).square().sum(), method="step", ledger=folder, audit_every=1
    ) as accountant:
        for _ in range(2):
            with accountant.step(range(5)):
                model(x).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(model[2].parameters(), 1e-3)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            assert accountant.last.lr == (0.1, 0.02)
            assert accountant.last.clip[0] == 1.0 > accountant.last.clip[1]


def test_one_number_per_optimizer(tmp_path: Path) -> None:
    train(tmp_path / "run")
    rows = inrun.Ledger.open(tmp_path / "run").accounts().to_pylist()
    assert [row["lr_by_optimizer"] for row in rows] == [[0.1, 0.02]] * 2
    assert all(row["clip_by_optimizer"][0] == 1.0 > row["clip_by_optimizer"][1] for row in rows)
    assert [(row["lr"], row["clip"]) for row in rows] == [(0.1, 1.0)] * 2


def test_measured_steps_name_their_largest_tensors(tmp_path: Path) -> None:
    train(tmp_path / "run")
    for row in inrun.Ledger.open(tmp_path / "run").accounts().to_pylist():
        assert sorted(row["tensors"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert sum(row["tensor_shares"]) == pytest.approx(1.0) and row["tensor_shares"] == sorted(
            row["tensor_shares"], reverse=True
        )


def test_books_from_before_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of earlier releases lack columns, and have one that is gone."""
    older = pa.schema([f for f in schema.ACCOUNTS if f.name not in parts.NEWEST])
    older = older.insert(5, pa.field("optimizer", pa.float64()))
    with monkeypatch.context() as patch:
        patch.setattr("inrun.ledger.buffer.ACCOUNTS", older)
        train(tmp_path / "run")
    run = inrun.Ledger.open(tmp_path / "run")
    part = next((tmp_path / "run" / "accounts").glob("*.parquet"))
    assert "lr_by_optimizer" not in parts.parse_part(part.read_bytes()).column_names  # the control
    assert not verify(tmp_path / "run").problems
    accounts = run.accounts()
    assert accounts.schema.names == schema.ACCOUNTS.names
    assert accounts["lr_by_optimizer"].null_count == accounts["tensors"].null_count == len(accounts)
    assert "validation" in str(summarise(accounts, "step"))
    assert run.scores(view="per_lr").num_rows == 5

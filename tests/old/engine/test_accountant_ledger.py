"""The accountant with books on disk."""

from __future__ import annotations

import json

import pytest
import torch

import inrun
from inrun.errors import LedgerError
from tiny import batch, tiny, train_step, validation


def run(ledger, steps=range(4), state=None, method="first"):
    model = tiny(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {"a": validation(1), "b": inrun.folds(lambda m: torch.stack([validation(2)(m), validation(3)(m)]), 2)}
    accountant = inrun.Accountant(model, optimizer, losses, ledger=ledger, audit_every=2, method=method)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        accountant.load_state_dict(state["accountant"])
    for step in steps:
        train_step(accountant, model, optimizer, batch(3, step), ids=[5, -7, 2**62 + step])
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "accountant": accountant.state_dict()}
    return accountant, saved


def test_a_folder_holds_what_memory_holds(tmp_path) -> None:
    on_disk, _ = run(tmp_path / "run")
    in_memory, _ = run(None)
    on_disk.close()
    reader = inrun.Ledger.open(tmp_path / "run")
    key = [("validation", "ascending"), ("sample_id", "ascending")]
    assert reader.scores().sort_by(key).equals(in_memory.scores().sort_by(key))
    assert on_disk.scores().equals(reader.scores())  # still readable after close
    assert reader.accounts().to_pylist() == in_memory.ledger.accounts().to_pylist()
    assert str(on_disk.summary()) == str(in_memory.summary())
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["method"] == "first"
    assert about["update"] == "frozen"
    assert about["validation"] == ["a", "b"]
    assert about["schema"] == 1
    assert "torch" in about["software"]
    with pytest.raises(LedgerError, match="resume"):
        run(tmp_path / "run")


@pytest.mark.parametrize("method", ["first", "lookahead", "midpoint"])
def test_resume_from_a_checkpoint(tmp_path, method: str) -> None:
    """Steps after the checkpoint are run again and count once."""
    whole, _ = run(tmp_path / "whole", range(8), method=method)
    first, saved = run(tmp_path / "run", range(5), method=method)
    json.dumps(saved["accountant"])  # plain data
    model, optimizer = first.model, first.optimizers[0]
    for step in (5, 6):  # written after the checkpoint, then lost with the process
        train_step(first, model, optimizer, batch(3, step), ids=[1, 2, 3])
    first.close()
    # The saved tensors were live: make the run to the checkpoint again instead of copying them.
    _, fresh = run(None, range(5), method=method)
    fresh["accountant"] = saved["accountant"]
    ledger = inrun.Ledger.resume(tmp_path / "run", saved["accountant"]["ledger"])
    second, _ = run(ledger, range(5, 8), fresh, method=method)
    ledger.close()
    whole.close()
    a, b = inrun.Ledger.open(tmp_path / "whole"), inrun.Ledger.open(tmp_path / "run")
    assert a.contributions().equals(b.contributions())
    assert a.accounts().equals(b.accounts())
    assert second.steps_done == 8

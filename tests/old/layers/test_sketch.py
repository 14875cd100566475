"""Segment sums: signed, added up, and with entries cut off, whichever way they are taken."""

from __future__ import annotations

import pytest
import torch

from inrun.old.layers.sketch import PIECE, segment_sums


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("entries", [64, PIECE // 2, 2 * PIECE + 32], ids=["at once", "some rows at a time", "a row in parts"])
def test_segment_sums(entries: int, rows: int, cut: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, entries, generator=draw, dtype=torch.float64)
    x[:, ::50] *= 1e4
    before = x.clone()
    signs = torch.randint(0, 2, (entries,), generator=draw).double() * 2 - 1
    most = torch.linspace(2.0, 5.0, rows, dtype=torch.float64).unsqueeze(1)  # another one for every row
    expected = torch.stack([row.clamp(-float(m), float(m)) if cut else row for row, m in zip(x, most, strict=True)]) * signs
    found = segment_sums(x, signs, 32, most if cut else None)
    torch.testing.assert_close(found, expected.view(rows, -1, 32).sum(2))
    assert torch.equal(x, before)

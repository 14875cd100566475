"""Why a step was not scored."""

from __future__ import annotations

import pytest

from inrun.ledger import Skip


@pytest.mark.parametrize("reason", Skip)
def test_reasons_come_back_from_their_texts(reason: Skip) -> None:
    assert Skip.parse(reason.text()) is Skip.parse(reason.text("[nan, 1.0]")) is reason


def test_texts_of_earlier_ledgers() -> None:
    assert Skip.parse("validation loss is not finite: [nan]") is Skip.VALIDATION_LOSS
    assert Skip.parse("gradient is not finite and the optimizer did not step") is Skip.NO_STEP
    assert Skip.parse("gradient or contributions are not finite") is Skip.CONTRIBUTIONS
    assert Skip.parse("gradient is not finite") is Skip.parse("") is None
    assert [reason for reason in Skip if not reason.stepped] == [Skip.NO_STEP, Skip.DROPPED]

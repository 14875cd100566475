"""``import inrun`` offers all there is, and imports next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import inrun

SOURCE = Path(inrun.__file__).parent
#: Rooms that are commands, or parts that others are made of: reached by an import of their own.
INNER = {"old", "cli", "demo", "experiments", "notebook"}


def test_dir_names_every_room_and_public_name() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert rooms - INNER <= set(dir(inrun))
    assert set(inrun.__all__) <= set(dir(inrun)) and not INNER & set(inrun._rooms)
    assert not {"Any", "TYPE_CHECKING", "annotations"} & set(dir(inrun))


def test_all_that_dir_names_is_there() -> None:
    for name in dir(inrun):
        assert getattr(inrun, name) is not None or name in ("__doc__", "__cached__")


def test_rooms_are_attributes_without_an_import() -> None:
    code = (
        "import sys, inrun; names = dir(inrun); assert 'torch' not in sys.modules and 'pyarrow' not in sys.modules;"
        "inrun.ledger, inrun.analysis, inrun.figures; assert 'torch' not in sys.modules and 'IPython' not in sys.modules;"
        "assert 'trl' in dir(inrun.integrations) and 'matplotlib' not in sys.modules and 'plotly' not in sys.modules;"
        "assert callable(inrun.baselines.run) and callable(inrun.Ledger.open)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", [inrun, inrun.integrations])
def test_unknown_names_are_attribute_errors(module: object) -> None:
    with pytest.raises(AttributeError, match="no attribute 'scorse'"):
        module.scorse  # noqa: B018
    assert not hasattr(module, "__wrapped__")


def test_trainers_are_attributes() -> None:
    pytest.importorskip("accelerate")
    assert callable(inrun.integrations.accelerate.attach)

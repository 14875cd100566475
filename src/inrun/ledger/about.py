"""``run.json``: what a run is, and which version of the layout it has."""

from __future__ import annotations

import json
import platform
import secrets
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from inrun.errors import LedgerError
from inrun.ledger.manifest import read_inside
from inrun.ledger.record import SIGN, UNIT

#: The version of the layout; a reader refuses newer ones.
SCHEMA = 1
NAME = "run.json"


def read_about(run: Path) -> dict[str, Any]:
    """Read ``run.json``; LedgerError if there is no run, or it was written by a newer version."""
    path = run / NAME
    if not path.is_file():
        if (run / "config.yaml").is_file():  # `inrun train` writes it before it reads its data
            raise LedgerError(
                f"{run} has no books yet: its training has only just begun, failed before its first step, or goes without scores"
            )
        raise LedgerError(f"{run} holds no run: there is no run.json. A run is a folder written by inrun.Ledger or inrun train")
    try:
        about = json.loads(read_inside(run, path))
        schema = about["schema"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LedgerError(f"{path} is damaged ({type(error).__name__}: {error}); inrun verify {run} says more") from None
    if not isinstance(schema, int) or schema > SCHEMA:
        raise LedgerError(f"{run} was written with ledger schema {schema!r}; this inrun reads up to {SCHEMA}: install a newer one")
    return dict(about)


def method_of(about: Mapping[str, Any]) -> str:
    """Return the method that scored a run, by its ``run.json``: a name of ``inrun.methods.METHODS``, or what else it says."""
    method = str(about.get("method", "?"))
    # Runs from before there were four methods name the update, and perhaps the credit, beside it.
    if about.get("credit") == "whole":
        return "whole"
    if about.get("update", "sgd") == "sgd":
        return method
    return "step"


def credit_of(about: Mapping[str, Any]) -> Literal["whole", "step"]:
    """Say what the scores of a run add up, by its ``run.json``.

    Returns:
        "whole" if a use of a sample earns credit over all later steps, through the optimizer's momentum; "step" if only the step
        itself counts.
    """
    return "whole" if method_of(about) == "whole" else "step"


def describe_run(about: dict[str, Any]) -> bytes:
    """Return the content of ``run.json`` for a new run; LedgerError if ``about`` is not plain data."""
    described = {**about, "schema": SCHEMA, "run_id": secrets.token_hex(8), "sign": SIGN, "unit": UNIT, "software": software()}
    try:
        return json.dumps(described, indent=2).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise LedgerError(
            f"about cannot be written as JSON ({error}); accepted are plain dicts, lists, texts and numbers"
        ) from None


def software() -> dict[str, str]:
    """Return versions that matter for reading the numbers later; torch only if it is loaded."""
    found = {"inrun": version("inrun"), "python": platform.python_version(), "numpy": np.__version__, "pyarrow": pa.__version__}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found

"""What a golden run leaves behind: measured with inrun, stored in a file, and compared.

A record is a flat dictionary of tensors, U uses (rows of steps) and T steps:

==========================  ====================================================================
``weights.NAME``            parameters and buffers after training with ``bitwise=True``
``uses.step`` ``.row``      of every use, ``[U]``: its step, its row in the step, ...
``uses.sample_id``          ... and its sample
``contributions.SET``       the step's own share of the fall of a validation loss, ``[U]``
``credits.SET``             the settled exact credit after closing, float32 ``[U]``
``paid``                    the share of a use's push that was paid when it was settled, ``[U]``
``first.SET``               contributions of ``method="first"``, ``[U]``
``accounts.SET.COLUMN``     the accounts of whole credit, ``[T]``; COLUMN as in ``ACCOUNTS``
``unspread.KEY``            only in files made before windows ended unpaid: see :func:`expected`
==========================  ====================================================================
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import inrun
from golden.runs import Run, Training, train

Record = dict[str, Tensor]

FOLDER = Path(__file__).parent / "stored"
#: Amounts are compared with the largest |data| of the run, losses with themselves.
AMOUNTS = ("data", "decay", "inherited", "residual")
LOSSES = ("loss_before", "loss_after")
ACCOUNTS = (*AMOUNTS, *LOSSES, "lr", "clip", "points")

#: Allowed differences relative to the largest stored number: of credits, contributions, data, decay
#: and inherited (accounts relative to the largest |data|); of losses; of learning rates and clip
#: factors; of weights where rounding may differ.
SCORES, LOSS, OPTION, WEIGHTS = 1e-6, 1e-9, 1e-9, 1e-8
#: Of the residual, which is a difference of numbers that may each be off by SCORES.
RESIDUAL = 4e-6
#: Allowed absolute difference of paid shares, which are sums of float32 numbers.
PAID = 1e-5


# The engine


def attach(training: Training, method: str, bitwise: bool) -> inrun.Accountant:
    """Attach inrun to a training run. The only place that knows how its constructor is spelled."""
    return inrun.Accountant(
        training.model,
        training.optimizer,
        training.validation,
        method=method,
        sketch="exact" if method == "whole" else None,
        audit_every=1,
        bitwise=bitwise,
    )


# Measuring


def weights_of(model: nn.Module) -> Record:
    """Return copies of all parameters, frozen ones too, and of the buffers of a checkpoint."""
    state = model.state_dict()
    found = dict(model.named_parameters())  # a tied weight has one name here
    found |= {name: b for name, b in model.named_buffers() if name in state}
    return {f"weights.{name}": x.detach().clone() for name, x in found.items()}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: backward passes of norms add up in an order that depends on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def plain_weights(run: Run) -> Record:
    """Train without inrun; return the weights."""
    training = run.build()
    train(run, training)
    return weights_of(training.model)


@one_thread()
def whole(run: Run, bitwise: bool) -> Record:
    """Train with exact whole credit; return everything but ``first``."""
    training = run.build()
    accountant = attach(training, "whole", bitwise)
    results = train(run, training, accountant)
    accountant.close()
    record = weights_of(training.model) | _uses(results)
    record |= _contributions("contributions", results)
    record |= _settled(accountant.ledger.credits().to_pydict(), record)
    accounts = accountant.ledger.accounts().to_pydict()
    for name in training.validation:
        places = [i for i, label in enumerate(accounts["validation"]) if label == name]
        for column in ACCOUNTS:
            values = [accounts[column][i] for i in places]
            record[f"accounts.{name}.{column}"] = torch.tensor(values, dtype=torch.float64)
    return record


@one_thread()
def first(run: Run, bitwise: bool) -> Record:
    """Train with ``method="first"``; return its contributions."""
    training = run.build()
    accountant = attach(training, "first", bitwise)
    results = train(run, training, accountant)
    accountant.close()
    return _contributions("first", results)


def measure(run: Run, bitwise: bool = True) -> Record:
    """Return the record of a run, with ``bitwise=True`` or the default."""
    return whole(run, bitwise) | first(run, bitwise)


def _uses(results: list[Any]) -> Record:
    """Return which use is which: steps in order, rows in order."""
    ids = [r.sample_ids.cpu().long() for r in results]
    return {
        "uses.step": torch.cat([torch.full_like(x, t) for t, x in enumerate(ids)]),
        "uses.row": torch.cat([torch.arange(len(x)) for x in ids]),
        "uses.sample_id": torch.cat(ids),
    }


def _contributions(name: str, results: list[Any]) -> Record:
    found = {}
    for key in results[0].contributions:
        steps = [r.contributions[key].detach().cpu().double() for r in results]
        found[f"{name}.{key}"] = torch.cat(steps)
    return found


def _settled(table: dict[str, list[Any]], uses: Record) -> Record:
    """Return credits and paid shares in the order of the uses; NaN where a use is not settled."""
    keys = [uses[f"uses.{key}"].tolist() for key in ("step", "row", "sample_id")]
    place = {use: i for i, use in enumerate(zip(*keys, strict=True))}
    record, filled = {}, set()
    columns = ("step", "row", "sample_id", "validation", "credit", "paid")
    for *use, name, credit, paid in zip(*(table[c] for c in columns), strict=True):
        i = place[tuple(use)]
        assert (name, i) not in filled, f"use {use} is settled twice for {name}"
        filled.add((name, i))
        for key, value in ((f"credits.{name}", credit), ("paid", paid)):
            record.setdefault(key, torch.full((len(place),), torch.nan))[i] = value
    return record


# Storing


def environment() -> dict[str, str]:
    """Return what decides, beside the code, how sums are rounded."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "cpu": models[0] if models else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the file of a run."""
    return folder / f"{name}.safetensors"


def store(name: str, record: Record, folder: Path = FOLDER) -> Path:
    """Write the record of a run; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(name, folder)
    tensors = {key: value.contiguous() for key, value in record.items()}
    save_file(tensors, path, {"environment": json.dumps(environment(), sort_keys=True)})
    return path


def load(name: str) -> tuple[Record, dict[str, str]]:
    """Return the stored record of a run, and the environment in which it was made."""
    with safe_open(path_of(name), "pt") as file:
        record = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return record, json.loads(file.metadata()["environment"])


def expected(name: str) -> tuple[Record, bool]:
    """Return the stored numbers that the engine has to give.

    When the window of a use ends, less than 1 % of its push is still to come, and nobody is paid
    for it. The engine that measured the files spread it over the uses that were still open. The file
    of a run in which windows end also holds ``unspread.KEY``, measured with spreading switched
    off; these numbers count.

    Returns:
        The numbers, and whether they were measured in this environment, so that weights must be
        equal bit for bit.
    """
    record, made_in = load(name)
    defined = {k.removeprefix("unspread."): record.pop(k) for k in [*record] if "unspread." in k}
    return record | defined, made_in == environment()


# Comparing


def disagreements(expected: Record, got: Record, same_bits: bool = True) -> list[str]:
    """Compare a record with the stored one.

    Args:
        expected: The stored numbers.
        got: The measured ones.
        same_bits: Whether weights must be equal bit for bit, or to rounding.

    Returns:
        A sentence per tensor that is missing, not stored, or differs by more than is allowed.
    """
    found = [f"{key} is missing" for key in sorted(expected.keys() - got.keys())]
    found += [f"{key} is not stored" for key in sorted(got.keys() - expected.keys())]
    for key in sorted(expected.keys() & got.keys()):
        a, b = expected[key].double(), got[key].double()
        if a.shape != b.shape:
            found.append(f"{key} has the shape {tuple(b.shape)}, stored is {tuple(a.shape)}")
            continue
        difference, allowed = float((a - b).abs().max()), _allowed(key, expected, same_bits)
        if not difference <= allowed:  # also where it is not a number
            found.append(
                f"{key} differs by {difference:.3g}, allowed is {allowed:.3g}; the largest "
                f"stored number is {float(a.abs().max()):.3g}"
            )
    return found


def _allowed(key: str, expected: Record, same_bits: bool) -> float:
    """Return the absolute difference that is allowed of a tensor."""
    group, column = key.split(".")[0], key.split(".")[-1]
    scale = float(expected[key].abs().max())
    if group == "weights":
        return 0.0 if same_bits else WEIGHTS * scale
    if group in ("contributions", "credits", "first"):
        return SCORES * scale
    if group == "paid":
        return PAID
    if column in AMOUNTS:
        data = float(expected[f"{key.removesuffix(column)}data"].abs().max())
        return (RESIDUAL if column == "residual" else SCORES) * data
    if column in LOSSES:
        return LOSS * scale
    return OPTION * scale if column in ("lr", "clip") else 0.0  # uses, points

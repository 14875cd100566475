"""Several processes in single precision: they add nothing to the rounding of one, and what is left is that of the gradient itself.

Adam's first moves divide by |G|. Where samples cancel to a small part of themselves, the rounding of their sum, 6e-8 of Σ|g_n|, is
a larger part of G, and so of P = η/|G|: a sum in another order is another P, whoever adds it up.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))

from job import launch
from jobs import SINGLE
from rounding import run

SEVERAL = ["ddp", "fsdp"]


@functools.cache
def several(name: str) -> dict[str, Any]:
    """What two processes found, put together."""
    parts = [x[name] if name in x else {"error": x["log"]} for x in launched()]
    assert not any("error" in x for x in parts), [x.get("trace", x.get("error")) for x in parts]
    assert all(map(torch.equal, parts[0]["weights"], parts[1]["weights"]))
    joined = {k: [torch.cat(x) for x in zip(*(p[k] for p in parts), strict=True)] for k in ("contributions", "references")}
    return {**joined, "weights": parts[0]["weights"]}


@functools.cache
def launched() -> list[dict[str, Any]]:
    return launch("float32", seconds=200.0, extra={"JOB_MODULE": "rounding"})


@functools.cache
def one(apart: bool = False, scored: bool = True) -> dict[str, Any]:
    """One process with the same batches: in one backward, or in the slices that ranks have."""
    return run(None, [0, 1], apart, scored)


def gaps(a: list[Tensor], b: list[Tensor]) -> list[float]:
    """Step by step, relative to the norm of the batch's contributions."""
    return [float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True)]


def off(a: Tensor, b: Tensor) -> Tensor:
    """Entry by entry, relative to the largest."""
    return (a - b).abs() / b.abs().max()


def test_contributions_are_those_of_the_gradient_that_was_used() -> None:
    """To 1e-6 of what plain autograd makes of it in all steps; in one batch, in slices, and in two processes."""
    for found in (one(), one(apart=True), *map(several, SEVERAL)):
        assert max(gaps(found["contributions"], found["references"])) < 1e-6

    # Two processes are one that adds up the same slices, to rounding; under DDP the weights are the same bit for bit.
    for name in SEVERAL:
        assert max(gaps(several(name)["contributions"], one(apart=True)["contributions"])) < 2e-6
    assert all(map(torch.equal, several("ddp")["weights"], one(apart=True)["weights"]))

    # One batch and two slices of it are two gradients: their exact contributions differ as those found do. No way to compute them
    # could bring them nearer: what differs is what the optimizer divided by.
    exact = gaps(one(apart=True)["references"], one()["references"])
    assert exact[0] > 5e-6 and max(exact[1:]) < 1e-6, exact
    for name in SEVERAL:
        found = gaps(several(name)["contributions"], one()["contributions"])
        assert abs(found[0] - exact[0]) < 1e-6 and max(found[1:]) < 2e-6, (name, found)


def test_weights_differ_as_those_of_plain_training_do() -> None:
    """By keys' biases alone, whose gradient is nothing but rounding: attention does not depend on them."""
    plain, alone = several("plain ddp")["weights"], one(scored=False)["weights"]
    assert all(map(torch.equal, plain, one(apart=True, scored=False)["weights"]))
    for a, b in ((plain, alone), *((several(name)["weights"], one()["weights"]) for name in SEVERAL)):
        apart = {name: off(x, y) for (name, _), x, y in zip(SINGLE().named_parameters(), a, b, strict=True)}
        for name, found in apart.items():
            if name.endswith("qkv.bias"):
                width = len(found) // 3
                keys, found = found[width : 2 * width], torch.cat([found[:width], found[2 * width :]])
                assert 1e-5 < float(keys.max()) < 2e-4
            assert float(found.max()) < 1e-5, name

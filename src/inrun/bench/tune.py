"""`inrun bench --tune`: every form of every layer shape, timed on this machine, beside what the cost model would take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.bench.measure import keep_freed_memory
from inrun.bench.shape import DTYPES, Shape
from inrun.old.layers import Outer, find_rule
from inrun.old.layers.forms import Contraction
from inrun.old.layers.merged import gram

PASSES = ("separate", "merged")


@dataclass(frozen=True)
class Tuned:
    """The forms of one layer shape in one kind of pass."""

    #: "separate" (v is known) or "merged" (v is made of the validation rows of the same pass).
    kind: str
    rows: int
    columns: int
    positions: int
    #: How many layers of the model have this weight.
    layers: int
    #: Milliseconds by form, the weight gradient included, and those of the weight gradient alone.
    milliseconds: dict[str, float]
    alone: float
    #: What the cost model takes, and what was fastest here.
    model: str
    fastest: str

    @property
    def lost(self) -> float:
        """Return the milliseconds per layer that the cost model's choice costs over the fastest."""
        return self.milliseconds[self.model] - self.milliseconds[self.fastest]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "lost": self.lost}


def layer_shapes(model: nn.Module) -> Counter[tuple[int, int]]:
    """Return the weights whose gradients are outer products, by shape ``[p, q]``."""
    found: Counter[tuple[int, int]] = Counter()
    for module in model.modules():
        rule = find_rule(module)
        weight = getattr(module, "weight", None)
        if rule is not None and rule.grams("weight") and isinstance(weight, nn.Parameter) and weight.requires_grad:
            found[weight.shape[0], weight.shape[1]] += 1
    return found


def _best(run: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the milliseconds of the fastest of some rounds."""
    best = float("inf")
    for _ in range(rounds + 1):  # the first warms up
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        run()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def forms_of(kind: str, training: Outer, validation: Outer, v: Tensor) -> dict[str, Callable[[], Any]]:
    """Return what each form does for one layer in one step, weight gradient included."""
    if kind == "separate":
        return {
            "shared": lambda: training.total_and_contract(v, False),
            "project": lambda: (training.total(), training.contract(v)),
        }
    return {
        "shared": lambda: training.total_and_contract(validation.total().unsqueeze(0), False),
        "project": lambda: (training.total(), training.contract(validation.total().unsqueeze(0))),
        "gram": lambda: (training.total(), gram(training, validation).sum(1)),
    }


@torch.no_grad()
def tune(shape: Shape, rounds: int, tell: Callable[[str, int, int], None] = lambda name, done, total: None) -> list[Tuned]:
    """Time every form of every layer shape of a model, in separate and in merged passes.

    Args:
        shape: Model and batch.
        rounds: Rounds per form; the best counts.
        tell: Called with what is being timed and progress.
    """
    shape.check()
    keep_freed_memory()
    dtype, t, n, m = DTYPES[shape.dtype], shape.context, shape.batch, shape.validation_rows
    weights = sorted(layer_shapes(shape.build()).items())
    generator = torch.Generator().manual_seed(shape.seed)
    found: list[Tuned] = []
    total = len(weights) * len(PASSES)
    for (p, q), layers in weights:

        def draw(rows: int, size: int) -> Tensor:
            return torch.randn(rows, t, size, generator=generator).to(shape.device, dtype)

        training, validation = Outer(draw(n, p), draw(n, q)), Outer(draw(m, p), draw(m, q))
        v = validation.total().unsqueeze(0)
        alone = _best(training.total, shape.device, rounds)
        for kind in PASSES:
            tell(f"{kind} {p} x {q}", len(found), total)
            runs = forms_of(kind, training, validation, v)
            if dtype == torch.bfloat16:
                runs.pop("shared")  # sums run in single precision at least
            times = {form: _best(run, shape.device, rounds) for form, run in runs.items()}
            sizes = Contraction(n, t, p, q, m=m if kind == "merged" else 0)
            model = sizes.cheapest(tuple(runs), dtype, torch.device(shape.device).type)
            fastest = min(times, key=lambda form: times[form])
            found.append(Tuned(kind, p, q, t, layers, times, alone, model, fastest))
    return found

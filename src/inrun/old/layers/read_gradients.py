"""What the gradients of parameters that are read are, seen from the parameter: q = f(p), g_n = Jᵀ d_n, ⟨g_n, v⟩ = ⟨d_n, J v⟩."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inrun.old.layers.layout import by_sample, sum_positions
from inrun.old.layers.linear import LinearOwner
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.shapes import Formed, GradientShape, LookUp, Outer, Parts
from inrun.old.layers.sketch import SketchPlan


@dataclass(frozen=True)
class Way:
    """The way from a parameter p to q = f(p), for gradients at q and directions at p."""

    parameter: Tensor
    function: Callable[[Tensor], Tensor] | None
    linear: bool

    def push(self, v: Tensor) -> Tensor | None:
        """Return J v for directions ``[k, *shape of p]``; None where torch has neither of the derivatives that would give it."""
        function = self.function
        if function is None:
            return v
        if self.linear:
            return torch.stack([function(d) for d in v])
        p = self.parameter.detach().to(v.dtype)
        try:
            return torch.stack([torch.func.jvp(function, (p,), (d,))[1] for d in v])
        except RuntimeError:  # no forward-mode derivative (weight norms), or one that fails (weight norm over all entries)
            return self._push_by_transposing(p, function, v)

    def _push_by_transposing(self, p: Tensor, function: Callable[[Tensor], Tensor], v: Tensor) -> Tensor | None:
        """Return J v from u ↦ Jᵀu, which is linear: its own transpose is J. None where that cannot be differentiated."""
        out, back = torch.func.vjp(function, p)[:2]
        try:
            onward = torch.func.vjp(lambda u: back(u)[0], torch.zeros_like(out))[1]
            return torch.stack([onward(d)[0] for d in v])
        except (NotImplementedError, RuntimeError) as problem:
            if "not implemented" not in str(problem):
                raise
            return None

    def pull(self, d: Tensor) -> Tensor:
        """Return Jᵀ d_n for gradients ``[n, *shape of q]``."""
        if self.function is None:
            return d
        back = torch.func.vjp(self.function, self.parameter.detach().to(d.dtype))[1]
        with warnings.catch_warnings():
            # Which kernel lacks a batching rule does not help anybody.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            found: Tensor = torch.func.vmap(back)(d)[0]
        if self.linear or _agrees(found, back, d):
            return found
        return torch.stack([back(x)[0] for x in d])


@torch.no_grad()
def _agrees(found: Tensor, back: Callable[[Tensor], tuple[Tensor, ...]], d: Tensor) -> bool:
    """See that Σ_n r_n Jᵀd_n = Jᵀ Σ_n r_n d_n: torch's batching rules are not all right (``_cdist_backward`` of torch 2.13)."""
    weights = torch.linspace(1.0, 2.0, len(d), dtype=d.dtype, device=d.device)
    expected = back(torch.tensordot(weights, d, 1))[0]
    size = torch.tensordot(weights, found.abs(), 1).sum()
    off = (torch.tensordot(weights, found, 1) - expected).abs().sum()
    return bool(off <= 1e-3 * size) or not bool(torch.isfinite(size))


class Through(GradientShape):
    """Gradients of a parameter that are known at a function of it. Totals are those at the function."""

    def __init__(self, inner: GradientShape, way: Way) -> None:
        """Hold the gradients at q, and the way to it."""
        self.inner, self.way = inner, way

    def contract(self, v: Tensor) -> Tensor:
        """Push the direction, or pull the gradients where that cannot be."""
        pushed = self.way.push(v)
        return Formed(self.form()).contract(v) if pushed is None else self.inner.contract(pushed)

    def total(self) -> Tensor:
        """Return the gradient at q."""
        return self.inner.total()

    def total_and_contract(self, v: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
        """Push the direction, or pull the gradients where that cannot be."""
        pushed = self.way.push(v)
        if pushed is None:
            return self.inner.total(), Formed(self.form()).contract(v)
        return self.inner.total_and_contract(pushed, False)

    def form(self) -> Tensor:
        """Pull the gradients."""
        return self.way.pull(self.inner.form())

    def sketch(self, signs: Tensor, weights: Tensor, plan: SketchPlan) -> tuple[Tensor, ...]:
        """Sketch the gradients at the parameter."""
        return Formed(self.form()).sketch(signs, weights, plan)

    def keep(self, kind: type[GradientShape], buffer: Tensor | None = None) -> GradientShape:
        """Keep them formed at the parameter (their total is still the one at q), or as the look-up that they are."""
        if kind is LookUp and self.way.function is None:
            return self.inner
        assert kind is Formed
        return FormedThrough(self.form(), self.inner)


class FormedThrough(Formed):
    """Formed gradients of a parameter whose total is wanted elsewhere."""

    def __init__(self, g: Tensor, inner: GradientShape) -> None:
        """Hold the gradients at p, and those at q."""
        super().__init__(g)
        self.inner = inner

    def total(self) -> Tensor:
        """Return the gradient at q."""
        return self.inner.total()


class ReadRule(LayerRule):
    """Parameters that are read: every use is scored where it meets the samples."""

    label = "read"
    reads = True
    turns = True


class TableRule(ReadRule):
    """A table that is read row by row, and is a parameter as it is; ``constants`` are its number of rows, and that of the padding.

    Kept as output gradients and tokens: a vocabulary may be large.
    """

    def kept_as(
        self, constants: Any, name: str, parameter: Tensor, inputs: tuple[Tensor, ...], dtype: torch.dtype, n: int
    ) -> tuple[type[GradientShape], Parts]:
        """Output gradients and tokens."""
        t = inputs[0].numel() // max(n, 1)
        return LookUp, (((n, t, parameter.shape[1]), torch.promote_types(dtype, torch.float32)), ((n, t), torch.float64))

    def restore(self, constants: Any, kind: type[GradientShape], parts: tuple[Tensor, ...]) -> GradientShape:
        """Put rows and padding back."""
        return LookUp.of(parts, *constants)


class SpreadRule(LayerRule):
    """One copy per sample; ``constants`` are the ways by name."""

    label = "read"

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """The gradients of the copies."""
        b = b.to(torch.promote_types(b.dtype, torch.float32))
        return {name: Formed(constants[name].pull(b)) for name in names}


class LookUpRule(LayerRule):
    """Rows of a table that was read; ``constants`` are the ways by name, the number of rows, and the row of the padding."""

    label = "read"

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nt at the rows."""
        ways, rows, padding = constants
        b = by_sample(b.to(torch.promote_types(b.dtype, torch.float32)), n, 1)
        shape = LookUp(inputs[0].reshape(n, -1), b, rows, padding)
        return {name: Through(shape, ways[name]) for name in names}


class LinearReadRule(LayerRule):
    """A product with a weight that was read; ``constants`` are (transposed, the ways of weight and bias)."""

    label = "read"

    class _Owner(LinearOwner):
        """A linear layer, as it is."""

        def run(self, constants: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
            """Multiply."""
            return super().run(constants[0], x, weight, bias)

        def input_gradient(self, constants: Any, saved: tuple[Tensor, ...], weight: Tensor, b: Tensor) -> Tensor:
            """Multiply back."""
            return super().input_gradient(constants[0], saved, weight, b)

    owner = _Owner()

    def gradients(
        self, constants: Any, inputs: tuple[Tensor, ...], b: Tensor, n: int, names: tuple[str, ...]
    ) -> dict[str, GradientShape]:
        """Σ_t b_nt a_ntᵀ at the weight, Σ_t b_nt at the bias."""
        transposed, ways = constants
        a, b = by_sample(inputs[0], n, 1), by_sample(b, n, 1)
        found: dict[str, GradientShape] = {}
        for name in names:
            kind, way = ways.get(name, (name, None))
            inner: GradientShape = (Outer(a, b) if transposed else Outer(b, a)) if kind == "weight" else Formed(sum_positions(b))
            found[name] = inner if way is None or way.function is None else Through(inner, way)
        return found

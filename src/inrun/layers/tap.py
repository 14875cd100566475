"""Taps: autograd functions through which per-sample quantities leave the backward.

A tap sits where a parameter meets data. Its backward forms the per-sample gradients of the operation and returns what
the step asked for (inner products, sketches, rows of tables) as the gradients of *probes*, leaves that hold nothing.
Gradients of the model pass through unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from inrun.errors import InrunError, StepError
from inrun.layers.gradients import LookUp, PerSample
from inrun.layers.layout import Layout
from inrun.torch_private import functions_seen, functions_unseen, unsafe_view


def opened(function: Any) -> Any:
    """Return a Python function of torch whose inner calls are seen: it does not hand itself over as a whole."""
    space = {**function.__globals__, "has_torch_function": lambda _: False}
    found = types.FunctionType(function.__code__, space, function.__name__, function.__defaults__, function.__closure__)
    found.__kwdefaults__ = function.__kwdefaults__
    return found


#: ``torch.autograd.grad`` whose recomputations by checkpointing are seen.
run_grad = opened(torch.autograd.grad)


class Collector(Protocol):
    """Takes the per-sample gradients of one parameter, chunk by chunk."""

    def add(self, low: int, high: int, g: Tensor) -> None:
        """Take the gradients of samples ``low`` to ``high``, ``[m, *shape]``, which may be overwritten."""

    def take_sizes(self, gradient: PerSample) -> None:
        """Take Σ|terms| of every entry, if the step asks for it."""

    def result(self) -> list[Tensor | None]:
        """Return the gradients of the probes."""


class Reader(Protocol):
    """What a step asks of the per-sample gradients of one parameter."""

    def probes(self, tap: Tap) -> list[Tensor]:
        """Return the probes of a tap."""

    def collect(self, n: int, tap: Tap) -> Collector:
        """Return a collector for a tap that fires."""

    def look_up(self, gradient: LookUp, tap: Tap) -> list[Tensor | None] | None:
        """Return the gradients of the probes of a look-up, or None to have the gradients formed."""

    def keep(self, gradient: PerSample, tap: Tap) -> bool:
        """Keep gradients to read them later; return whether that was done."""

    def note(self, dtype: torch.dtype) -> None:
        """Note in which precision a tap computes."""


@dataclass(eq=False)
class Leaf:
    """A trainable parameter. ``reader`` is None where it is not scored."""

    index: int
    name: str
    parameter: Tensor
    reader: Reader | None = None
    #: The tensor that the model calls functions with: the parameter, or a whole one that stands for a split one.
    tensor: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.tensor = self.parameter if self.tensor is None else self.tensor


@dataclass(eq=False)
class Source:
    """A tensor made of parameters and constants alone: a parameter, or what was derived from some."""

    tensor: Tensor
    leaves: tuple[Leaf, ...]

    @property
    def is_leaf(self) -> bool:
        """Whether it is a parameter itself."""
        return len(self.leaves) == 1 and self.leaves[0].tensor is self.tensor

    @property
    def scored(self) -> bool:
        """Whether any of its parameters is scored."""
        return any(leaf.reader is not None for leaf in self.leaves)

    @property
    def name(self) -> str:
        """Return the names of its parameters."""
        return ", ".join(leaf.name for leaf in self.leaves)


#: Maps a tap, the gradient at its output and the saved tensors to the per-sample gradients of its targets.
Rule = Callable[["Tap", Tensor, "tuple[Tensor, ...]"], "Sequence[PerSample | None]"]


@dataclass(eq=False)
class Tap:
    """One place of one forward where parameters meet data."""

    #: The function's name, the parameters, and how often they met before.
    key: tuple[Any, ...]
    rule: Rule
    targets: list[Source]
    #: The tape; its ``probing`` tells backwards that only gradients are wanted.
    tape: Any
    #: What the rule needs beside tensors.
    constants: Any = None
    shape: torch.Size = field(default_factory=torch.Size)
    #: Whether an input is one of the model's inputs, samples first.
    reads_inputs: bool = False
    edge: GradientEdge | None = None
    layout: Layout | None = None
    #: The sample of every row of its input, where the model moved them before.
    moved: Tensor | None = None
    #: Where rows of tables leave, by the place of the table (made by its reader).
    rows: dict[int, Any] = field(default_factory=dict)
    fired: bool = False

    @property
    def function(self) -> str:
        """Return the function's name."""
        return str(self.key[0])

    @property
    def name(self) -> str:
        """Return the parameters and the function, for messages."""
        return f"{self.function}({', '.join(s.name for s in self.targets)})"

    @property
    def readers(self) -> list[Reader]:
        """Return the readers of all scored parameters, in order."""
        return [leaf.reader for s in self.targets for leaf in s.leaves if leaf.reader is not None]

    def probes(self) -> list[Tensor]:
        """Return the probes of all its parameters."""
        return [p for reader in self.readers for p in reader.probes(self)]

    def in_backward(self, b: Tensor) -> Tap:
        """Return the tap as a backward brings it gradient: what trains nothing is nobody's.

        Raises:
            StepError: Gradient of a step comes through a forward of an earlier one.
            RowOwnershipError: Which rows are whose is not known.
        """
        tape = self.tape
        if self.edge is None and tape.active:
            raise StepError(
                f"the backward goes through {self.name} of an earlier step or microbatch, whose samples are not known any more. "
                "Run forward and backward in the same microbatch, and detach what is kept from one step to the next."
            )
        if self.edge is None or tape.silent:
            return replace(self, layout=Layout("all", 1))
        try:
            tape.layouts.check(self, b)
        except InrunError as error:
            if not tape.defers:
                raise
            tape.failed, self.layout = error, Layout("all", 1)
        return self

    def split(self, x: Tensor, features: int) -> Tensor:
        """Return a tensor that lies like the output in normal form, ``[n, t, *features]``."""
        assert self.layout is not None, self.name
        return self.layout.split(x, features)

    def read(self, gradients: Sequence[PerSample | None], totals: bool = False) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return the gradients of the probes, and (if ``totals``) the sums of the targets' gradients over samples."""
        self.fired = True
        if self.tape.blind or self.tape.silent or self.edge is None:
            return [None for _ in self.probes()], [None if g is None or not totals else g.total() for g in gradients]
        probes: list[Tensor | None] = []
        sums: list[Tensor | None] = []
        for source, gradient in zip(self.targets, gradients, strict=True):
            taken, total = self._read(source, gradient, totals)
            probes += taken
            sums.append(total)
        return probes, sums

    def _read(self, source: Source, gradient: PerSample | None, total: bool) -> tuple[list[Tensor | None], Tensor | None]:
        readers = [leaf.reader for leaf in source.leaves if leaf.reader is not None]
        if gradient is None or not readers:
            return [None for r in readers for _ in r.probes(self)], None if gradient is None or not total else gradient.total()
        if isinstance(gradient, LookUp) and source.is_leaf:
            found = readers[0].look_up(gradient, self)
            if found is not None:
                return found, None
        if source.is_leaf and readers[0].keep(gradient, self):
            return [None for _ in readers[0].probes(self)], gradient.total() if total else None
        collectors = [r.collect(gradient.n, self) for r in readers]
        parameters = [leaf.tensor for leaf in source.leaves if leaf.reader is not None]
        if source.is_leaf:
            collectors[0].take_sizes(gradient)
        added: Tensor | None = None
        for low, high, g in gradient.chunks():
            if total:
                part = g.sum(0) if len(g) > 1 else g[0].clone()
                added = part if added is None else added.add_(part)
            pulled = (g,) if source.is_leaf else pull_back(source.tensor, parameters, g)
            for collector, part_of in zip(collectors, pulled, strict=True):
                if part_of is not None:
                    collector.add(low, high, part_of)
        return [x for collector in collectors for x in collector.result()], added


def run_grads(output: Tensor | GradientEdge, inputs: Sequence[Any], g: Tensor) -> tuple[Tensor | None, ...]:
    """Return gradients for a batch of gradients at the output, one after the other where a function cannot run batched.

    A checkpoint that is run again for them must call what it called at first: the tape is on.
    """
    with torch.enable_grad(), functions_seen():
        try:
            return run_grad([output], inputs, [g], retain_graph=True, allow_unused=True, is_grads_batched=True)
        except RuntimeError:
            each = [run_grad([output], inputs, [one], retain_graph=True, allow_unused=True) for one in g]
            return tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*each, strict=True))


def pull_back(value: Tensor, parameters: list[Tensor], g: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients ``[m, *parameter]`` of parameters for gradients ``[m, *value]`` of a tensor made of them."""
    return run_grads(value, parameters, g.to(value.dtype))


class Observe(torch.autograd.Function):
    """The identity on an output; its backward forms per-sample gradients beside the framework's own backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, tap: Tap, count: int, owned: int, *tensors: Tensor) -> Tensor:
        """Save what the rule needs, the first ``count`` tensors. ``owned`` tensors follow, and the probes."""
        ctx.save_for_backward(*tensors[:count])
        ctx.tap, ctx.count, ctx.owned, ctx.probes = tap, count, owned, len(tensors) - count - owned
        return unsafe_view(out, list(out.shape))

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Pass the gradient on."""
        tap: Tap = ctx.tap
        back = b if ctx.needs_input_grad[0] else None
        nothing = [None] * ctx.count
        if tap.tape.probing:
            return (back, None, None, None, *nothing, *[None] * (ctx.owned + ctx.probes))
        tap = tap.in_backward(b)
        for reader in tap.readers:
            reader.note(b.dtype)
        saved = ctx.saved_tensors  # checkpointing may run the forward again here, under the tape
        with functions_unseen(), torch.autocast(b.device.type, enabled=False):
            probes, totals = tap.read(tap.rule(tap, b, saved), totals=ctx.owned > 0)
            # Under autocast the framework rounds them, too.
            owned = [None if x is None else x.to(b.dtype) for x in totals[: ctx.owned]]
        return (back, None, None, None, *nothing, *owned, *probes)


class Spread(torch.autograd.Function):
    """A tensor expanded to the shape of data: the gradient of every entry arrives before it is added up."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, shape: torch.Size, dtype: torch.dtype, tap: Tap, *probes: Tensor) -> Tensor:
        """Expand, in the precision that the function works in."""
        ctx.tap, ctx.shape, ctx.dtype, ctx.probes = tap, source.shape, source.dtype, len(probes)
        return source.to(dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, b: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        """Add up as broadcasting does."""
        tap: Tap = ctx.tap
        if tap.tape.probing:
            return (None, None, None, None, *[None] * ctx.probes)
        tap = tap.in_backward(b)
        for reader in tap.readers:
            reader.note(b.dtype)
        with functions_unseen():
            total = b.sum_to_size(ctx.shape).to(ctx.dtype)
            with torch.autocast(b.device.type, enabled=False):
                probes, _ = tap.read(tap.rule(tap, b, ()))
        return (total, None, None, None, *probes)

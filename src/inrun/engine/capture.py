"""Observes the forward calls of modules and hands their backward to the rules.

Each observed module's ``forward`` is replaced on the instance; outside a step the replacement calls the original and
nothing else. Inside, it runs the module in its shared form or taps its output, with probes (see ``layers.tap``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.buffers import Buffers
from inrun.engine.directions import Direction, Directions
from inrun.engine.ownership import Ownership, Recorder
from inrun.engine.quiet import Arguments
from inrun.engine.sites import Scored, Site
from inrun.errors import CoverageError, DeferredMemoryError, IdsError, StepError
from inrun.layers import ExpandTap, Kept, KeptRowSums, Tap, float_tensors, unused_parameters


@dataclass
class Pending:
    """A contraction that waits for the optimizer's step."""

    scored: Scored
    kept: Kept


@dataclass
class Expected:
    """What one optimizer step keeps between backward and update, as its forwards tell it."""

    limit: int | None
    method: str
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Count one contraction; raise before the memory is taken."""
        self.nbytes += nbytes
        if self.limit is not None and self.nbytes > self.limit:
            raise DeferredMemoryError(
                f'method="{self.method}" has to keep more than {self.nbytes / 1e6:,.0f} MB from the backward until the optimizer '
                f"steps, and deferred_memory allows {self.limit / 1e6:,.0f} MB. Raise it, take fewer samples per optimizer step, "
                'or take method="lookahead", which keeps nothing.'
            )


@dataclass
class Microbatch:
    """What one backward leaves behind for a step."""

    ids: Tensor
    directions: Directions
    #: One probe ``[n, k]`` per lane (parameter group).
    probes: list[Tensor]
    #: Whether the step's sums are checked: on audited steps, and wherever gradient may flow past the rules.
    balanced: bool
    buffers: Buffers
    #: Bytes that the backward will keep, told from the shapes of the forward, and how many are allowed in all.
    expected: Expected
    pending: list[Pending] = field(default_factory=list)
    #: Told of every parameter that is contracted, before its gradient arrives.
    contracts: Callable[[nn.Parameter], None] = lambda parameter: None
    #: Its step has ended: gradient that still flows through it can be scored no more.
    over: bool = False
    #: Parameters whose gradient came through tensors of less than single precision.
    coarse: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    #: Where ``balanced``: Σ_n ⟨g_n, v⟩ per parameter, ``[k]``, of contractions inside the backward.
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    #: Some contraction was made already.
    begun: bool = False
    #: ``sums`` hold all of it.
    countable: bool = True

    def balance_late(self) -> None:
        """Check this step's sums, though it is not audited."""
        if not self.balanced:
            self.balanced, self.countable = True, not self.begun

    def __post_init__(self) -> None:
        """Find the nodes that add to the probes' gradients."""
        self.accumulators: list[Any] = [p.expand_as(p).grad_fn.next_functions[0][0] for p in self.probes]  # type: ignore[union-attr]

    @property
    def n(self) -> int:
        """Return the number of rows."""
        return self.ids.numel()


class Call:
    """One forward call of one site, as its backward sees it (an ``Observer``)."""

    def __init__(self, capture: Capture, site: Site, micro: Microbatch) -> None:
        """Take the probes of the parameters that this call scores."""
        self.capture, self.site, self.micro = capture, site, micro
        self.n = micro.n
        scored = {k: s for k, s in site.scored.items() if not micro.directions.is_zero(s)}
        self.names = tuple(scored)
        self.probes = tuple(micro.probes[s.lane] for s in scored.values())
        self.lanes = {name: s.lane for name, s in scored.items()}

    def expect(self, lead: Tensor) -> None:
        """Count what this call will keep until the optimizer's step."""
        for name in self.names:
            if self._stream(name) is None:
                self.micro.expected.add(self.site.rule.kept_bytes(self.site.module, name, lead, self.n))

    def live(self, name: str) -> bool:
        """Whether the running backward adds to the probes, as it does to ``.grad``.

        ``torch.autograd.grad`` and ``backward(inputs=...)`` do not: what flows there trains nothing, or cannot be scored.
        """
        found = torch._C._will_engine_execute_node(self.micro.accumulators[self.lanes[name]])
        if torch.is_grad_enabled():
            # create_graph=True: a second backward may follow (a gradient penalty), part of which flows past the rules.
            self.micro.balance_late()
        if self.micro.over:
            if found and self.capture.in_step():
                raise StepError(
                    f"gradient flows through a forward of {_title(self.site)} that was made in an earlier step; its samples would "
                    "not be scored. Run forward and backward inside the same step."
                )
            return False
        return found

    def _note(self, name: str, b: Any) -> Scored:
        s = self.site.scored[name]
        self.micro.contracts(s.parameter)
        self.micro.begun = True
        for x in b if isinstance(b, list) else [b]:
            if isinstance(x, Tensor) and x.dtype.itemsize < 4:
                self.micro.coarse[s.parameter] = x.dtype
        return s

    def _stream(self, name: str) -> Direction | None:
        return self.micro.directions.stream(self.site.scored[name], self.site.rule.sparse)

    def direction(self, name: str) -> Tensor | None:
        """Return the directions of a parameter, or None if its contraction is deferred."""
        found = self._stream(name)
        return None if found is None else found.v

    def book(self, name: str, contributions: Tensor) -> Tensor:
        """Note the contraction and scale it for the probe."""
        direction = self._stream(name)
        assert direction is not None
        if not self.live(name):
            return torch.zeros_like(self.micro.probes[self.lanes[name]])
        s = self._note(name, None)
        if self.micro.balanced:
            total = contributions.detach().double().sum(0)
            self.micro.sums[s.parameter] = self.micro.sums.get(s.parameter, 0) + total
        if direction.scale != 1.0:
            contributions = contributions * direction.scale
        return contributions.to(self.probes[0].dtype)

    def rowwise(self, name: str) -> bool:
        """Whether this parameter's gain is corrected row by row when the optimizer steps."""
        s = self.site.scored[name]
        linear = self.micro.directions.rules[s.optimizer].linear
        return not linear and self.site.rule.rows_are_classes(self.site.module, name)

    def keep_rows(self, name: str, sums: Tensor) -> None:
        """Keep a row-by-row contraction."""
        direction = self._stream(name)
        assert direction is not None
        if not self.live(name):
            return
        s = self._note(name, None)
        if self.micro.balanced:
            total = sums.double().sum((0, 2))
            self.micro.sums[s.parameter] = self.micro.sums.get(s.parameter, 0) + total
        self.micro.pending.append(Pending(s, KeptRowSums(sums.mul_(direction.scale))))

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a reused buffer that lasts until the optimizer's step."""
        return self.micro.buffers.next(self.site.scored[name], shape, like)

    def keep(self, name: str, kept: Kept) -> None:
        """Keep a contraction that waits for its direction."""
        if self.live(name):
            self.micro.pending.append(Pending(self._note(name, None), kept))

    def settle(self, name: str, saved: tuple[Any, ...], b: Any) -> Tensor | None:
        """Contract by the rule's project form, or keep for later."""
        if not self.live(name):
            return None
        rule, module, s = self.site.rule, self.site.module, self._note(name, b)
        direction = self._stream(name)
        with self.capture.paused():
            if direction is None:
                take = functools.partial(self.take, name)
                self.micro.pending.append(Pending(s, rule.keep(module, name, saved, b, self.n, take)))
                return None
            if self.rowwise(name):
                self.keep_rows(name, rule.contract_rows(module, name, saved, b, self.n, direction.v))
                return None
            return self.book(name, rule.contract(module, name, saved, b, self.n, direction.v))


class OutputTap(torch.autograd.Function):
    """The identity on all outputs of a module without a rule; contracts the gradients of those that have rows."""

    @staticmethod
    def forward(ctx: Any, call: Call, saved: tuple[Any, ...], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pass the first ``count`` tensors on; the rest are probes."""
        ctx.call, ctx.saved, ctx.count = call, saved, count
        ctx.shapes = [x.shape for x in tensors[:count]]
        ctx.set_materialize_grads(False)
        # Copies: an in-place activation may follow, and some operations keep their own output for their backward.
        return tuple(x.clone() for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Refuse gradient through outputs without rows; contract the rest."""
        call, n = ctx.call, ctx.call.n
        for index, (b, shape) in enumerate(zip(grads, ctx.shapes, strict=True)):
            if b is not None and (len(shape) == 0 or shape[0] % n or index in call.site.shared_outputs):
                names = ", ".join(s.name for s in call.site.scored.values())
                raise CoverageError(
                    f"{names} cannot be scored: {_title(call.site)} has no rule, and gradient flows through its output "
                    f"of shape {tuple(shape)}, which has no row per sample (batch of {n}). Return per-sample outputs and "
                    "take the loss outside, or move the parameter into a small module of its own."
                )
        scores = [None if all(b is None for b in grads) else call.settle(name, ctx.saved, list(grads)) for name in call.names]
        return (None, None, None, *grads, *scores)


def _title(site: Site) -> str:
    return f"{site.name or 'the model itself'} ({type(site.module).__name__})"


class Capture:
    """Patches the modules and routes their calls."""

    def __init__(self, model: nn.Module, sites: list[Site], form: str, check_rows: bool) -> None:
        """Attach to ``sites`` and to the model's own forward; ``form`` is auto, shared or project."""
        self.model, self.sites, self.form = model, sites, form
        self.micro: Microbatch | None = None
        self.recorder: Recorder | None = None
        self.root_call: Arguments | None = None
        #: Called after each observed forward of the model.
        self.after_forward: Callable[[], None] | None = None
        #: Whether a step is open.
        self.in_step: Callable[[], bool] = lambda: True
        self._paused = False
        self._examined: set[Site] = set()
        self._patched: list[tuple[nn.Module, Any]] = []
        self.attach()
        self.ownership = Ownership(model, self.root_forward, self, check_rows)

    def attach(self) -> None:
        """Replace the forwards."""
        for site in self.sites:
            self._patch(site.module, functools.partial(self._run, site))
        self.root_forward = self.model.forward
        self._patch(self.model, functools.partial(self._run_root, self.root_forward))

    def _patch(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._patched.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def close(self) -> None:
        """Put every ``forward`` back."""
        for module, before in reversed(self._patched):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._patched = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let modules run unobserved."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def observing(self) -> bool:
        """Whether a call now would be scored."""
        return self.micro is not None and not self._paused and torch.is_grad_enabled()

    def _run_root(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.recorder is not None or not self.observing:
            return forward(*args, **kwargs)
        assert self.micro is not None
        check_batch(args, kwargs, self.micro.n)
        before, self.root_call = self.root_call, (args, kwargs)
        try:
            out = forward(*args, **kwargs)
        finally:
            self.root_call = before
        if before is None and self.after_forward is not None:
            self.after_forward()
        return out

    def _run(self, site: Site, *args: Any, **kwargs: Any) -> Any:
        if self.recorder is not None and not self._paused:
            return self.recorder.call(site, args, kwargs)
        if not self.observing:
            return site.original(*args, **kwargs)
        assert self.micro is not None
        return self._score(site, self.micro, args, kwargs)

    def _score(self, site: Site, micro: Microbatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if site.is_fallback:
            self.ownership.verify_once(site, micro.n, self.root_call)
            return self._score_fallback(site, micro, args, kwargs)
        lead = site.lead(args, kwargs)
        assert lead is not None
        layout = self.ownership.layout(site, lead.shape, micro.n, self.root_call)
        call = Call(self, site, micro)
        if not call.names:
            return site.original(*args, **kwargs)
        call.expect(lead)
        if layout == "free":
            site.forms.add("project")
            saved = site.rule.observe(site.module, args, kwargs)
            return ExpandTap.apply(site.original(*args, **kwargs), lead.shape[0] == 1, call, saved, *call.probes)
        if self.form != "project" and not kwargs and not torch.is_autocast_enabled(lead.device.type):
            out = site.rule.shared_forward(site.module, args, call, forced=self.form == "shared")
            if out is not None:
                site.forms.add("shared")
                return out
        site.forms.add("project")
        saved = site.rule.observe(site.module, args, kwargs)
        return Tap.apply(site.original(*args, **kwargs), call, saved, *call.probes)

    def _drop_unused(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave parameters that a module only registers, for a child to use, to that child (BERT's head bias)."""
        if site in self._examined:
            return
        self._examined.add(site)
        shared = [name for name, s in site.scored.items() if len(s.uses) > 1]
        if shared:
            with self.paused():
                for name in unused_parameters(site.module, shared, args, kwargs):
                    s = site.scored.pop(name)
                    s.uses = [(other, local) for other, local in s.uses if other is not site]

    def _score_fallback(self, site: Site, micro: Microbatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._drop_unused(site, args, kwargs)
        call = Call(self, site, micro)
        if not call.names:
            return site.original(*args, **kwargs)
        lead = site.lead(args, kwargs)
        if lead is not None:
            call.expect(lead)
        saved = site.rule.observe(site.module, args, kwargs)
        out = site.original(*args, **kwargs)
        saved[0].note_written(site.module)
        tensors = float_tensors(out)
        if not tensors:
            raise CoverageError(f"{_title(site)} has parameters but returns no floating-point tensor to score them by")
        tapped = iter(OutputTap.apply(call, saved, len(tensors), *tensors, *call.probes))
        return replace_float_tensors(out, tapped)


def replace_float_tensors(tree: Any, new: Iterator[Tensor]) -> Any:
    """Return the output with its floating-point tensors replaced, in order."""
    from torch.utils import _pytree as pytree

    leaves, structure = pytree.tree_flatten(tree)
    swapped = [next(new) if isinstance(x, Tensor) and x.is_floating_point() else x for x in leaves]
    return pytree.tree_unflatten(swapped, structure)


def check_batch(args: tuple[Any, ...], kwargs: dict[str, Any], n: int) -> None:
    """Raise unless some tensor the model was called with has one row per id."""
    from torch.utils import _pytree as pytree

    sizes = [x.shape[0] for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
    if sizes and n not in sizes:
        raise IdsError(
            f"got {n} sample ids, but the model was called with tensors whose leading sizes are {sorted(set(sizes))}; "
            "give one id per batch row (repeat an id for rows of the same sample)"
        )

"""What compiled code is told before it runs: for every observed module, its calls and their probes.

Code that is being compiled cannot make probes: they are leaves, and their number and shapes must be known when the graph begins.
So the forward is first run once for every new signature of its arguments, plainly and without gradient, to note which modules it
calls with which shapes (:class:`CallRecorder`). Before each observed forward the probes of these calls are made
(:meth:`Plan.prepare`) and laid on the modules' desks, where compiled code finds them as tensors. A desk is all that compiled
code sees of the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from inrun.errors import StepError
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.sites import Site
from inrun.old.layers import Ask, Call, LayerRule, Layout, OwnedOpaque, TappedOpaque, key_of
from inrun.old.layers.layout import SHARED, TURNED
from inrun.old.layers.trees import flatten
from inrun.torch_private import is_compiled, may_change_size


class Board:
    """One switch for all desks of a model, and what compiled code has to say."""

    def __init__(self) -> None:
        """Nothing is observed."""
        #: Whether what lies on the desks counts.
        self.on = False
        #: Whether calls are expected to find something on their desk.
        self.observing = False
        #: Compiled code ran an observed module for which nothing was prepared.
        self.unprepared = False


class PreparedCall:
    """One call of a module with a rule, ready to run: what it is, and its tensors."""

    def __init__(self, rule: LayerRule, key: int, call: Call, owned: bool, given: tuple[Tensor, ...], probes: tuple[Tensor, ...]):
        """``given`` are directions, signs and weights."""
        self.rule, self.key, self.call, self.owned, self.given, self.probes = rule, key, call, owned, given, probes


class Desk:
    """What one observed module finds when compiled code calls it. Read by code that is being compiled: plain fields only."""

    def __init__(self, board: Board) -> None:
        """Empty."""
        self.board = board
        #: None: run plainly. With one entry it serves all calls, unless ``counts``.
        self.calls: tuple[PreparedCall | None, ...] = ()
        #: Whether the calls have probes of their own, and how many calls there were.
        self.counts = False
        self.done = 0

    def run(self, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call inside compiled code."""
        board = self.board
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        if not board.on:
            if board.observing:
                board.unprepared = True
            return original(*args, **kwargs)
        calls = self.calls
        if len(calls) == 0:
            board.unprepared = True
            return original(*args, **kwargs)
        place = 0
        if self.counts:
            place = min(self.done, len(calls) - 1)
            self.done += 1
        prepared = calls[place]
        if prepared is None:
            return original(*args, **kwargs)
        return run_prepared(prepared, module, original, args, kwargs)


def run_prepared(
    prepared: PreparedCall, module: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run one call with its probes."""
    call, given, probes = prepared.call, prepared.given, prepared.probes
    inputs = prepared.rule.inputs(module, args, kwargs)
    if prepared.owned:
        bias = module.bias if len(call.owned_names) > 1 else None
        return OwnedOpaque.apply(prepared.key, call, inputs[0], module.weight, bias, len(given), *given, *probes)
    out = original(*args, **kwargs)
    if call.expands:
        n = probes[0].shape[0]
        one = call.batch_of_one
        inputs = tuple((x if one else x.unsqueeze(0)).expand(n, *x.shape[1 if one else 0 :]) for x in inputs)
    return TappedOpaque.apply(prepared.key, call, out, len(inputs), len(given), *inputs, *given, *probes)


@dataclass(frozen=True)
class SeenCall:
    """One call of a module as the plain forward showed it."""

    site: Site
    #: Shape, dtype and device of the tensors that the rule needs.
    inputs: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    dtype: torch.dtype
    autocast: bool

    def stand_ins(self) -> tuple[Tensor, ...]:
        """Return tensors of these shapes that take no memory."""
        return tuple(torch.empty((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in self.inputs)


class CallRecorder:
    """Notes the calls of one forward that is run plainly."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.with_grad = False
        self.calls: list[SeenCall] = []

    def close(self) -> None:
        """The forward has ended."""

    def call(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module and note shapes."""
        if not site.rule.compiles:
            return original(*args, **kwargs)
        inputs = site.rule.inputs(site.module, args, kwargs)
        seen = tuple((x.shape, x.dtype, x.device) for x in inputs)
        out = original(*args, **kwargs)
        self.calls.append(SeenCall(site, seen, out.dtype, torch.is_autocast_enabled(inputs[0].device.type)))
        return out


#: Runs the model plainly, without gradient or trace, under a recorder.
Rehearse = Callable[[Any, CallRecorder], Any]


class Layouts(Protocol):
    """What the row check knows of a call."""

    def layout(self, site: Site, shape: torch.Size, n: int) -> Layout:
        """Return the layout of a call."""
        ...


def signature_of(arguments: Any, n: int, training: bool) -> tuple[Any, ...]:
    """Return what the calls of a forward depend on: shapes, dtypes and plain values of its arguments, modes, autocast."""
    found: list[Any] = [n, training, torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")]
    for x in flatten(arguments)[0]:
        if isinstance(x, Tensor):
            found.append((x.shape, x.dtype))
        else:
            found.append(x if isinstance(x, (bool, int, float, str, type(None))) else type(x))
    return tuple(found)


@dataclass
class Plan:
    """The desks of a model's modules, and the calls that every signature of its forward makes."""

    sites: list[Site]
    form: str
    layouts: Layouts
    board: Board = field(default_factory=Board)
    desks: dict[Site, Desk] = field(init=False)
    _modules: list[nn.Module] = field(default_factory=list)
    _known: dict[tuple[Any, ...], list[SeenCall]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put up one desk per observed module."""
        self.desks = {site: Desk(self.board) for site in self.sites}

    def wanted(self, model: nn.Module, thoroughly: bool) -> bool:
        """Whether some part of the model is compiled, so that calls must be prepared; ``thoroughly`` looks for new modules."""
        if thoroughly or not self._modules:
            self._modules = list(model.modules())
        return any(is_compiled(m) for m in self._modules)

    def prepare(self, micro: Microbatch, arguments: Any, training: bool, rehearse: Rehearse) -> None:
        """Lay out the calls of the forward that is about to run, with new probes."""
        signature = signature_of(arguments, micro.n, training)
        if signature not in self._known:
            recorder = CallRecorder()
            rehearse(arguments, recorder)
            self._known[signature] = recorder.calls
        by_site: dict[Site, list[PreparedCall | None]] = {}
        apart: set[Site] = set()
        for seen in self._known[signature]:
            before = by_site.setdefault(seen.site, [])
            made = self._prepare_call(micro, seen)
            if before and not _same(before[0], made):
                apart.add(seen.site)
            before.append(made)
        for site, desk in self.desks.items():
            calls = by_site.get(site, [])
            desk.counts = site in apart or any(x is not None and _has_own_probes(x) for x in calls)
            desk.calls = tuple(calls) if desk.counts else tuple(calls[:1])
            desk.done = 0
        self.board.on, self.board.unprepared = True, False

    def _prepare_call(self, micro: Microbatch, seen: SeenCall) -> PreparedCall | None:
        site = seen.site
        rule, module, inputs = site.rule, site.module, seen.stand_ins()
        constants = rule.constants(module)
        layout = self.layouts.layout(site, inputs[0].shape, micro.n)
        if layout == "apart":
            raise StepError(
                f"{site.name} runs once for the whole batch and its output is worked on before it meets the samples (tables of "
                "relative positions), which is scored in models that are not compiled; leave torch.compile out"
            )
        free = layout in SHARED
        owned = (
            not free
            and self.form != "project"
            and not seen.autocast
            and rule.owns(module, inputs, micro.n, forced=self.form == "shared")
        )
        one = layout == "free" and inputs[0].shape[0] == 1
        if free:
            inputs = tuple((x if one else x.unsqueeze(0)).expand(micro.n, *x.shape[1 if one else 0 :]) for x in inputs)
        asks, asked, _ = micro.ask(site, constants, inputs, inputs[0].dtype if owned else seen.dtype)
        if not asks:
            return None
        site.note_form("shared" if owned else "project")
        names = ("weight", "bias") if getattr(module, "bias", None) is not None else ("weight",)
        turn = layout if layout in TURNED else ""
        call = Call(rule, constants, 0, asks, free, one, turn=turn, owned_names=names if owned else ())
        count = sum(ask.given for ask in asks)
        _let_sizes_change(asks, asked[count:])
        return PreparedCall(rule, key_of(call), call, owned, tuple(asked[:count]), tuple(asked[count:]))

    def check(self) -> None:
        """Raise if compiled code called modules in another way than was prepared; get ready for recomputed segments."""
        astray = self.board.unprepared or any(desk.counts and desk.done > len(desk.calls) for desk in self.desks.values())
        if astray:
            self._known.clear()
            raise StepError(
                "compiled code ran observed modules in a way that a plain run of the same forward had not shown, so that samples "
                "would not be scored. Give the Accountant the model whose call you make (what torch.compile returned, if you call "
                "that), compile parts of it before the step begins, and let its calls depend on shapes only."
            )
        for desk in self.desks.values():
            desk.done = 0

    def clear(self) -> None:
        """Take everything off the desks."""
        self.board.on = self.board.observing = False
        for desk in self.desks.values():
            desk.calls = ()


def _let_sizes_change(asks: tuple[Ask, ...], probes: list[Tensor]) -> None:
    """Samples, and positions where a probe has them, may be more or fewer in the next batch without compiling again."""
    place = 0
    for ask in asks:
        for x in probes[place : place + ask.probes]:
            positions = ask.has_own_probes and x.dim() > 1
            may_change_size(x, (0, 1) if positions else (0,))
        place += ask.probes


def _same(a: PreparedCall | None, b: PreparedCall | None) -> bool:
    """Whether two calls may share one entry: the same tensors throughout."""
    if a is None or b is None:
        return a is b
    return a.key == b.key and all(x is y for x, y in zip((*a.given, *a.probes), (*b.given, *b.probes), strict=True))


def _has_own_probes(prepared: PreparedCall) -> bool:
    """Whether a second call may not use the same probes: parts that must not be added up."""
    return any(ask.has_own_probes for ask in prepared.call.asks)

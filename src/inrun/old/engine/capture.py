"""Routes the calls of observed modules: plainly, to the seam while a microbatch is scored, or to a recorder.

The user's modules run only where the user runs them, with two exceptions, both outside the user's own forward: the look at
the rows before it (and, where it took a new way, after it), and modules without a rule after the backward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import CoverageError, RowOwnershipError, StepError
from inrun.old.engine.checks.documents import DocumentCheck
from inrun.old.engine.checks.examine import give_up
from inrun.old.engine.checks.recorder import Recorder
from inrun.old.engine.checks.repeats import explained
from inrun.old.engine.checks.rows import RowCheck
from inrun.old.engine.given import Given
from inrun.old.engine.guards import LookGuard
from inrun.old.engine.merged import MergedMicrobatch
from inrun.old.engine.microbatch import Microbatch
from inrun.old.engine.plan import CallRecorder, Plan
from inrun.old.engine.processes import Processes
from inrun.old.engine.python_state import PythonState
from inrun.old.engine.quiet import Arguments, devices_of, forked_random, modes, plain_checkpoints, run_eagerly
from inrun.old.engine.reads import RecordingReader, ScoringReader, output_apart, samples_of, track
from inrun.old.engine.sites import Called, Site
from inrun.old.layers import Ask, Call, Layout, Output, Owned, Tapped
from inrun.old.layers.layout import SHARED, TURNED
from inrun.old.layers.packed import Packing
from inrun.old.layers.reads import Tracked, UnreadableError
from inrun.old.layers.trees import float_tensors, replace_float_tensors
from inrun.torch_private import (
    apply_as_it_is,
    current_backward,
    detached_parameters,
    own_cache_of_parametrizations,
    without_attention_fast_path,
)


@dataclass(frozen=True)
class Occasion:
    """When the model runs: at which step, and whether that is audited."""

    step: int
    audited: bool
    #: Told the seconds that a look at the rows took.
    spend: Callable[[float], None] = lambda seconds: None


class Capture:
    """Decides what happens in a call of an observed module."""

    def __init__(
        self, model: nn.Module, called: nn.Module, sites: list[Site], form: str, check_rows: bool, processes: Processes
    ) -> None:
        """``called`` is the model, or what torch.compile made of it; ``form`` is auto, shared or project."""
        self.processes = processes
        self.model, self.called, self.sites, self.form = model, called, sites, form
        self.rows = RowCheck(sites, self._run_recorded, check_rows)
        self.documents = DocumentCheck(self._run_recorded, check_rows)
        #: What compiled code finds on its modules.
        self.plan = Plan(sites, form, self.rows)
        self._state, self._replayed_state = PythonState(model), PythonState(model)
        self._guard = LookGuard(model, parameters=not processes.sharded)
        self._micro: Microbatch | None = None
        self._occasion = Occasion(0, audited=False)
        self._recorder: Recorder | CallRecorder | None = None
        self._reader: ScoringReader | None = None
        if not check_rows:
            for site in sites:
                site.let_be_read(False)
                if site.rule.reads:
                    site.fall_back()  # where parameters meet the samples must be seen
        #: What is known of the last call of a layer.
        self._calls: dict[Site, Call] = {}
        self._read_calls: dict[Any, Call] = {}
        #: Modules that were seen to run more than once in a forward.
        self.repeated: set[Site] = set()
        #: Whether a forward of one row, at which no look is taken, was run to see them.
        self._counted = False
        self._paused = False
        #: The module whose own call runs, where what is read outside of it is followed, too.
        self._inside: Site | None = None
        #: How many forwards of the model are running, one inside the other.
        self._depth = 0
        #: What the one that runs was given, and what the one that has ended and is looked at was.
        self._given: Given | None = None
        self._ended: Given | None = None
        #: While not None: the modules that are called, and whether with gradient.
        self._noted: Called | None = None
        #: Whether parts of the model are compiled, so that the calls of a forward are prepared before it.
        self._compiled = False

    # What a step says

    def observe(self, micro: Microbatch, occasion: Occasion) -> None:
        """Score the calls that follow for this microbatch."""
        self._micro, self._occasion, self._depth = micro, occasion, 0
        held = weakref.ref(self)  # tracked tensors live as long as the graph
        in_forward = lambda: (mine := held()) is not None and mine._depth > 0  # noqa: E731
        self._reader = ScoringReader(micro, self.rows, self.form, in_forward, self._read_calls)
        thoroughly = occasion.audited or occasion.step < 4
        self._compiled = self.called is not self.model or self.plan.wanted(self.model, thoroughly)
        self.plan.board.observing = micro.n > 0

    def rest(self) -> None:
        """Let calls run plainly."""
        self._micro = self._reader = None
        self.plan.clear()

    @property
    def has_microbatch(self) -> bool:
        """Whether a microbatch is being observed."""
        return self._micro is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let modules run unobserved for the time of the block."""
        before, self._paused = self._paused, True
        board = self.plan.board
        shown = board.on, board.observing
        board.on = board.observing = False
        try:
            yield
        finally:
            self._paused = before
            board.on, board.observing = shown

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Let modules run again, unobserved, for the time of the block; what that leaves in Python is taken back."""
        held = self._replayed_state.hold(step=self._occasion.step)
        with self.paused(), own_cache_of_parametrizations(), plain_checkpoints(), held:
            yield

    @contextlib.contextmanager
    def noting_calls(self) -> Iterator[Called]:
        """Note which observed modules are called in the block, and how; they run unobserved."""
        before, self._noted = self._noted, Called()
        try:
            with self.paused():
                yield self._noted
        finally:
            self._noted = before

    # What the model says

    @property
    def _observing(self) -> bool:
        micro = self._micro
        # A batch without rows trains nobody: it runs plainly, and its gradient must be 0 (``Step.gradient_arrived``).
        return micro is not None and micro.n > 0 and self._recorder is None and not self._paused and torch.is_grad_enabled()

    def begin_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], compiled: bool) -> bool:
        """Look at the rows of a call of the model that is about to run, compiled or not; return whether it is observed."""
        if not self._observing:
            return False
        micro = self._micro
        assert micro is not None
        if self._depth == 0:
            began = time.perf_counter()
            # Held around all of it, too: a look may run modules without a rule on their own.
            held = self._replayed_state.hold(step=self._occasion.step)
            with self._in_step((args, kwargs)), self._explained((args, kwargs)), held:
                self._look_before((args, kwargs), micro)
            self._given = Given((args, kwargs))
            self._occasion.spend(time.perf_counter() - began)
            if compiled or self._compiled:
                if micro.documents is not None:
                    raise StepError(
                        "ids per position (packed documents) are scored in models that are not compiled; leave torch.compile out, "
                        "or give one id per row"
                    )
                if micro.extras is not None:
                    raise StepError("extra= is told of models that are not compiled; leave torch.compile out, or extra=")
                if isinstance(micro, MergedMicrobatch):
                    raise StepError(
                        "merged steps score models that are not compiled; leave torch.compile out, or give the Accountant "
                        "validation= and open steps without merged="
                    )
                with self._in_step((args, kwargs)):
                    self.plan.prepare(micro, (args, kwargs), self.model.training, self._run_recorded)
        self._depth += 1
        return True

    def end_model(self, args: tuple[Any, ...], kwargs: dict[str, Any], failed: bool) -> bool:
        """Look at what an observed call has shown; tell whether the outermost one has ended."""
        self._depth -= 1
        if self._depth:
            return False
        given, self._given = self._given, None
        if failed:
            return False
        self.check_compiled()
        if self._micro is not None and given is not None:
            self._ended = given
            try:
                with self._in_step(given.arguments), self._explained(given.arguments):
                    self.rows.after_forward(given.arguments, self._micro.rows)
                    if self._micro.documents is not None:
                        self.documents.after_forward(given.arguments, self._micro.documents)
            finally:
                self._ended = None
        return True

    @contextlib.contextmanager
    def _explained(self, arguments: Arguments) -> Iterator[None]:
        """Where rows cannot be told apart, see whether that is the forward's own doing."""
        try:
            yield
        except RowOwnershipError as problem:
            found = explained(problem, arguments, self._run_recorded)
            if found is problem:
                raise
            raise found from problem

    @contextlib.contextmanager
    def _in_step(self, arguments: Arguments) -> Iterator[None]:
        """Where parameters are split over processes, a pass takes all of them: run as many as the one that looks most."""
        try:
            yield
        finally:
            if self.processes.sharded:
                while self.processes.agree("a look at the rows", self._occasion.step, False):
                    self._run_once(arguments, CallRecorder())

    def _look_before(self, arguments: Arguments, micro: Microbatch) -> None:
        occasion, documents = self._occasion, micro.documents
        if documents is not None:
            documents.check_batch(arguments)
            reading = [site for site in self.sites if site.rule.reads]
            if reading:  # copies of what is read would be one per row, and a row may have several documents
                why = "ids are given per position"
                give_up(reading, why, CoverageError(why))
        if documents is None or micro.rows > 1:
            self.rows.before_forward(arguments, micro.rows, occasion.step, occasion.audited)
        if documents is not None:
            self.documents.before_forward(arguments, documents, occasion.step, occasion.audited)
        if micro.extras is not None and micro.rows == 1 and self.rows.enabled and not self._counted:
            # One row needs no look; but which modules run more than once must be known, to pair their gradients.
            self._counted = True
            with contextlib.suppress(UnreadableError):
                self._run_recorded(arguments, Recorder())

    def check_compiled(self) -> None:
        """Raise if compiled code called modules in a way that nobody has prepared."""
        if self.plan.board.on or self.plan.board.unprepared:
            self.plan.check()

    def _run_recorded(self, arguments: Arguments, recorder: Recorder | CallRecorder) -> Any:
        """Run the model without gradient or trace, when all processes that must do."""
        if self._ended is not None:
            self._ended.check()
        if self.processes.sharded:
            self.processes.agree("a look at the rows", self._occasion.step, True)
        return self._run_once(arguments, recorder)

    def _run_once(self, arguments: Arguments, recorder: Recorder | CallRecorder) -> Any:
        """Run the model without gradient or trace, from the random state as it stands, and without compiled code."""
        args, kwargs = arguments
        before, self._recorder = self._recorder, recorder
        try:
            with (
                torch.set_grad_enabled(recorder.with_grad),
                forked_random(None, devices_of(self.model)),
                modes(self.model, None, batch_norm_eval=True),
                self._guard.hold(),
                self._state.hold(arguments),
                without_attention_fast_path(),
                own_cache_of_parametrizations(),
                plain_checkpoints(),
            ):
                out = run_eagerly(self.model, *args, **kwargs)
                if isinstance(recorder, Recorder):
                    recorder.note_written()
                return out
        finally:
            recorder.close()
            if isinstance(recorder, Recorder):
                self.repeated |= recorder.repeated()
            self._recorder = before

    # One call

    def route(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of an observed module."""
        if self._noted is not None:
            self._noted.note(site)
        if site.rule.reads:
            return original(*args, **kwargs)
        if not site.read_outside:
            return self._route(site, original, args, kwargs)
        before, self._inside = self._inside, site
        try:
            return self._route(site, original, args, kwargs)
        finally:
            self._inside = before

    def _route(self, site: Site, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._recorder is not None and not self._paused:
            out = self._recorder.call(site, original, args, kwargs)
            if isinstance(self._recorder, Recorder) and self._recorder.is_apart(site, args, kwargs):
                return output_apart(site, out, None, RecordingReader(self._recorder, self._recorder.samples))
            return out
        if not self._observing:
            return original(*args, **kwargs)
        micro = self._micro
        assert micro is not None
        if (
            self.rows.enabled and self._depth == 0 and micro.n > 1 and current_backward() == -1
        ):  # segments that a backward recomputes were verified
            raise RowOwnershipError(
                f"{site.name} was called outside the forward of the model given to the Accountant, so its rows cannot be "
                "verified. Call the model itself (model(x), not model.forward(x)), give the Accountant the module whose forward "
                "you call, or pass check_rows=False to vouch that the leading dimension of every module's input is the sample."
            )
        if self.plan.board.on and site.rule.compiles:
            return self.plan.desks[site].run(site.module, original, args, kwargs)
        if site.rule.replays:
            return self._score_by_replay(site, micro, original, args, kwargs)
        if site.rule.whole:
            return self._score_whole(site, micro, original, args, kwargs)
        return self._score(site, micro, original, args, kwargs)

    def read(self, site: Site, name: str, value: nn.Parameter) -> Tensor:
        """Hand out a parameter that a forward reads: tracked while that forward is recorded or scored."""
        micro = self._micro
        if micro is None or self._paused or not (site.rule.reads or site.read_outside) or self._inside is site:
            return value
        if not site.scored[name].is_parameter(value) or hasattr(value, "placements"):
            return value  # the latter is read by fully_shard itself, before it is whole: forwards do not see it
        if isinstance(micro, MergedMicrobatch) and site.rule.reads:
            raise CoverageError(
                f"{site.title} reads {name} itself instead of handing it to a layer, which merged steps do not score: validation "
                "gradient would leak into the update. Give the Accountant validation= and open steps without merged=, or freeze it."
            )
        if isinstance(self._recorder, CallRecorder):
            return value
        if self._recorder is not None:
            self._recorder.handed[site, name] = value
            return track(site, name, value, RecordingReader(self._recorder, samples_of(micro)))
        if not self._observing or (self._depth == 0 and current_backward() == -1):
            return value
        assert self._reader is not None
        found = track(site, name, value, self._reader)
        return self._reader.whole(found.track) if samples_of(micro) == 1 else found

    def _score(
        self,
        site: Site,
        micro: Microbatch,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: Layout | None = None,
    ) -> Any:
        rule, module, n = site.rule, site.module, micro.rows
        if not site.holds_its_parameters():
            return original(*args, **kwargs)  # torch.func.functional_call with other weights trains none of ours
        if args and isinstance(args[0], Tracked):
            return self._score_on_apart(site, micro, original, args[0])
        inputs = rule.inputs(module, args, kwargs)
        lead = inputs[0]
        telling = rule.lead(module, args, kwargs)
        layout = known or self.rows.layout(site, lead.shape if telling is None else telling.shape, n)
        turn = layout if layout in TURNED else ""
        constants = rule.constants(module)
        if isinstance(micro, MergedMicrobatch):
            return micro.score(site, constants, inputs, layout, original, args, kwargs)
        packing = None
        if micro.documents is not None:
            packing = micro.documents.packing
            self.documents.note(site, lead.shape, packing)
            if layout not in SHARED:
                micro.documents.check_call(site, lead.shape)
        owned = (
            layout not in SHARED
            and self.form != "project"
            and not torch.is_autocast_enabled(lead.device.type)
            and rule.owns(module, inputs, micro.groups, forced=self.form == "shared")
        )
        if owned:
            buffers: dict[str, Tensor] = {}
            joined = micro.ask_joined(site.active().items(), rule)
            if joined is not None:
                asks, asked = joined
            else:
                asks, asked, buffers = micro.ask(site, constants, inputs, lead.dtype)
            if asks:
                site.note_form("shared")
                call = self._call(site, constants, n, asks, packing, turn, joined is not None)
                return Owned.apply(call, buffers, micro.past, lead, module.weight, getattr(module, "bias", None), *asked)
            return original(*args, **kwargs)
        out = original(*args, **kwargs)
        if layout == "apart" and micro.documents is not None:
            raise StepError(
                f"{site.name} runs once for the whole batch and its output is worked on before it meets the samples, which is not "
                "scored for ids per position (packed documents); give one id per row"
            )
        expands, one = layout in SHARED, layout == "free" and lead.shape[0] == 1
        if expands:
            inputs = tuple((x if one else x.unsqueeze(0)).expand(n, *x.shape[1 if one else 0 :]) for x in inputs)
        if micro.documents is not None:
            micro.documents.check_call(site, inputs[0].shape)
            if not expands:
                micro.documents.check_call(site, out.shape)
        asks, asked, buffers = micro.ask(site, constants, inputs, out.dtype)
        if not asks:
            return out
        site.note_form("project")
        call = Call(rule, constants, n, asks, expands, one, packing, turn)
        # Where the framework's own run goes on beside them, copies are for what is asked alone.
        aside = layout == "apart" and self._reader is not None and self._reader.aside
        passed = out.detach() if aside else out
        tapped = apply_as_it_is(Tapped, passed, call, buffers, micro.past, passed, len(inputs), *inputs, *asked)
        return output_apart(site, out, tapped, self._reader) if layout == "apart" else tapped

    def _call(
        self, site: Site, constants: Any, n: int, asks: tuple[Ask, ...], packing: Packing | None, turn: str, joined: bool
    ) -> Call:
        """Return what the backward of an owned layer knows beside tensors; it is the same at most steps."""
        call = self._calls.get(site)
        same = call is not None and call.asks == asks and call.n == n and call.turn == turn and call.constants == constants
        if call is None or not same or call.rule is not site.rule or call.packing is not packing or call.joined is not joined:
            call = self._calls[site] = Call(site.rule, constants, n, asks, packing=packing, turn=turn, joined=joined)
        return call

    def _score_on_apart(self, site: Site, micro: Microbatch, original: Callable[..., Any], x: Tracked) -> Any:
        """Run a layer on what another one made without any sample: on one copy per sample, which is followed in turn."""
        assert self._reader is not None
        copies = self._reader.spread(x.track, 0, micro.n, x.dim() + 1)
        if not self._reader.aside:
            out = self._score(site, micro, original, (copies,), {}, "rows")
            return output_apart(site, out[0], out, self._reader)

        def aside(copies: Tensor) -> Any:
            with detached_parameters(site.module, tuple(site.active())):
                return original(copies)

        return output_apart(site, original(x.track.plain), self._score(site, micro, aside, (copies,), {}, "rows"), self._reader)

    def _score_whole(
        self, site: Site, micro: Microbatch, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        rule, module, n = site.rule, site.module, micro.n
        inputs = rule.inputs(module, args, kwargs)
        lead = rule.lead(module, args, kwargs)
        assert lead is not None
        if not site.holds_its_parameters():
            return original(*args, **kwargs)
        if micro.documents is not None:
            micro.documents.check_call(site, lead.shape)
        if self.rows.layout(site, lead.shape, n) not in (("rows", "flat") if rule.flat else ("rows",)):
            raise RowOwnershipError(
                f"{site.title} is called with {lead.shape[0]} sequences for {n} samples; give it one per sample"
            )
        rounded = torch.is_autocast_enabled(lead.device.type)
        owned = self.form != "project" and not rounded and lead.dtype.itemsize >= 4
        constants = rule.constants(module)
        dtype = torch.get_autocast_dtype(lead.device.type) if rounded else lead.dtype
        asks, asked, buffers = micro.ask(site, constants, inputs, dtype)
        if not asks:
            return original(*args, **kwargs)
        site.note_form("shared" if owned else "project")
        made = None if owned else original(*args, **kwargs)
        return rule.run_scored(Call(rule, constants, n, asks), buffers, asked, module, args, kwargs, made)

    def _score_by_replay(
        self, site: Site, micro: Microbatch, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scored = {k: s for k, s in site.active().items() if s.parameter.requires_grad and not micro.directions.is_zero(s)}
        if not scored or not site.holds_its_parameters():
            return original(*args, **kwargs)
        if any(s.shards is not None for s in scored.values()):
            raise CoverageError(
                f"{site.title} has no rule and would have to run again after its backward, when its parameters are split over "
                "processes again; build it from layers that have a rule, freeze its parameters, or take DistributedDataParallel"
            )
        call = site.rule.record(site.module, args, kwargs)
        out = original(*args, **kwargs)
        call.note_written()
        outputs = float_tensors(out)
        if not outputs:
            raise CoverageError(f"{site.title} has parameters but returns no floating-point tensor to score them by")
        call.note_outputs(outputs)
        probes = micro.ask_outputs(site, tuple(scored), call, outputs)
        tapped: list[Tensor] = [Output.apply(x, probe) for x, probe in zip(outputs, probes, strict=True)]
        return replace_float_tensors(out, iter(tapped))

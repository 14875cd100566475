"""Modules without a rule: raw parameters, unknown classes, parametrised layers.

With f(θ) the module's output on this call and b the gradient there, ⟨g_n, v⟩ = Σ b_n ∘ (∂f/∂θ · v)_n. Two forms:

``jvp``   one forward-mode product of the whole call; needs no knowledge of the arguments
``vmap``  per-sample gradients by ``torch.func``, for operations without a forward-mode derivative; one sample after the other
          where an operation cannot be batched. Where samples cannot be run by themselves (dropout draws for the batch), or not
          under ``torch.func`` (autograd functions of others): one backward of the batch per sample, b_n alone

All call the module again, hooks and all, under the random state of the original call, after the backward: never inside the
user's own forward.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from inrun.errors import CoverageError, StepError
from inrun.old.layers.layout import Layout, dot_each
from inrun.old.layers.registry import LayerRule
from inrun.old.layers.shapes import GradientShape
from inrun.old.layers.trees import flatten, float_tensors, unflatten
from inrun.torch_private import no_grad_in_forward_mode, version_of

log = logging.getLogger("inrun")


class FallbackRule(LayerRule):
    """Contract any module by running it again. One instance per module, since the form is found by trying."""

    label = "fallback"
    exact = False
    replays = True

    def __init__(self) -> None:
        """Begin with the form that needs no knowledge of the arguments."""
        self.form = "jvp"
        #: Whether all samples can be run at once by ``torch.func.vmap``, as far as has been tried.
        self.batches = True
        #: Whether samples can be run by themselves, as far as has been tried.
        self.separates = True
        #: Arguments (by place) that have one row per sample, where that was seen; the others are the same for all samples.
        self.split: dict[int, bool] = {}
        #: Outputs (by place) in which samples were seen, and whether these are in the second dimension.
        self.turned: dict[int, bool] = {}
        #: Buffers that a forward in eval or train mode writes to, once seen: a replay must start from what they were.
        self.written: dict[bool, set[str]] = {}

    def record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        """Note arguments, random state, modes and buffers."""
        return RecordedCall(module, args, kwargs, self)

    def note_rows(self, argument: int) -> None:
        """Remember that an argument (by place) was seen to have one row per sample."""
        self.split[argument] = True

    def note_output(self, index: int, layout: Layout) -> bool:
        """Remember whether an output has its samples in the second dimension."""
        return self.turned.setdefault(index, layout == "second") == (layout == "second")

    def note_unbatched(self) -> None:
        """Remember that an operation of the module cannot be batched."""
        self.batches = False

    def note_inseparable(self) -> None:
        """Remember that samples cannot be run by themselves."""
        self.separates = False

    def note_written(self, training: bool, names: set[str]) -> None:
        """Remember buffers that a forward in this mode writes to."""
        self.written[training] = names | self.written.get(training, set())


class RecordedCall:
    """One call of a module: its arguments ``(args, kwargs)``, the random state before it, and how the module stood."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], rule: FallbackRule) -> None:
        """Note all of it, before the call."""
        buffers = dict(module.named_buffers())
        self.module, self.rule, self.training = module, rule, module.training
        self.turned = {place for place, turned in rule.turned.items() if turned}
        written = rule.written.get(self.training, set(buffers))
        self.buffers = {k: b.clone() for k, b in buffers.items() if k in written}
        self.buffer_versions = {k: version_of(b) for k, b in buffers.items()}
        leaves, self.structure = flatten((args, kwargs))
        self.leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
        self.random_state = (torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices})
        self.flags = [(m, m.training) for m in module.modules()]
        self.device_type = next(module.parameters()).device.type
        self.autocast = (torch.is_autocast_enabled(self.device_type), torch.get_autocast_dtype(self.device_type))
        self.watched = [*(x for x in self.leaves if isinstance(x, Tensor)), *module.parameters()]
        self.versions = [version_of(x) for x in self.watched]
        #: Which of them the call itself wrote to.
        self.overwritten: list[str] = []
        #: Buffers that it wrote to and that no call had written to before, so that what was there is gone.
        self.lost: list[str] = []
        #: What its outputs were, row by row.
        self.outputs: list[tuple[Tensor, Tensor]] = []

    def note_written(self) -> None:
        """After the call: keep copies of those buffers only that it wrote to; note what else it wrote to."""
        written = {k for k, b in self.module.named_buffers() if self.buffer_versions.get(k) != version_of(b)}
        self.rule.note_written(self.training, written)
        self.lost = sorted(written - self.buffers.keys())
        self.buffers = {k: b for k, b in self.buffers.items() if k in written}
        if self.versions != [version_of(x) for x in self.watched]:
            names = [*("its input" for x in self.leaves if isinstance(x, Tensor)), *(k for k, _ in self.module.named_parameters())]
            moved = [version_of(x) != before for x, before in zip(self.watched, self.versions, strict=True)]
            self.overwritten = sorted({name for name, m in zip(names, moved, strict=True) if m})

    def note_outputs(self, outputs: list[Tensor]) -> None:
        """Keep what a run must give again, as two numbers per row."""
        self.outputs = [_printed(x) for x in self.with_samples_first(outputs)]

    def with_samples_first(self, outputs: list[Any]) -> list[Any]:
        """Turn outputs, or gradients at them, that have their samples in the second dimension; None stays."""
        return [x if x is None or place not in self.turned else x.transpose(0, 1) for place, x in enumerate(outputs)]

    def check_outputs(self, outputs: dict[int, Tensor]) -> None:
        """Raise if a run with the same weights and arguments gave other outputs (by place): that was another function."""
        rounded = self.autocast[0]
        for place, x in outputs.items():
            if place >= len(self.outputs):
                continue
            (was, size), (now, _) = self.outputs[place], _printed(x)
            tolerance = 3e-2 if rounded or x.dtype.itemsize < 4 else 1e-3 if x.dtype == torch.float32 else 1e-5
            if was.shape != now.shape or bool(((now - was).abs() > tolerance * size).any()):
                raise StepError(
                    f"{type(self.module).__name__} has no rule and must run again, and its output of shape {tuple(x.shape)} is "
                    "another one then: its forward, or the loop since, has changed something that it depends on (a counter or a "
                    "tensor that is an attribute, a buffer written through .data or outside the forward). Keep such state in "
                    "registered buffers and write to them in the forward, in place: these are put back. Or freeze its parameters."
                )

    def check(self) -> None:
        """Raise if an argument or a weight was overwritten in the call or since: a replay would be another function."""
        if self.overwritten:
            raise StepError(
                f"{type(self.module).__name__} has no rule and must run again, but its forward writes to "
                f"{', '.join(self.overwritten)} itself, so that it would be another function: write to a copy of an input, and "
                "change weights (clamp_, renormalisation, max_norm) behind optimizer.step() instead of in the forward"
            )
        if self.lost:
            raise StepError(
                f"{type(self.module).__name__} has no rule and must run again, but its forward has written to "
                f"{', '.join(self.lost)} for the first time, so that what was there is gone; nothing was scored. It is kept from "
                "now on: run this step again."
            )
        if self.versions != [version_of(x) for x in self.watched]:
            raise StepError(
                f"{type(self.module).__name__} has no rule and must run again, but its input or its weights were changed in place "
                "since its forward; do not write into its input, and give all its parameters to one optimizer"
            )

    def run(self, parameters: dict[str, Tensor], leaves: list[Any] | None = None) -> list[Tensor]:
        """Run the module with other parameters (and arguments); return its floating-point outputs in order, samples first."""
        self.check()
        args, kwargs = unflatten(self.leaves if leaves is None else leaves, self.structure)
        cpu, cuda = self.random_state
        enabled, dtype = self.autocast
        with (
            torch.random.fork_rng(devices=list(cuda)),
            torch.autocast(self.device_type, enabled=enabled, dtype=dtype),
            _modes(self.flags),
        ):
            torch.set_rng_state(cpu)
            for device, state in cuda.items():
                torch.cuda.set_rng_state(state, device)
            # A tied parameter is scored where it is used: do not replace it in children that share it.
            # Buffers are copied: a second forward must not count twice in running statistics.
            copies = {name: self.buffers.get(name, b).clone() for name, b in self.module.named_buffers()}
            out = torch.func.functional_call(self.module, copies | parameters, args, kwargs, tie_weights=False)
        return self.with_samples_first(float_tensors(out))


class Replay(GradientShape):
    """The per-sample gradients of one parameter of a module that is run again.

    Args (of the constructor):
        call: The recorded call.
        name: The parameter, relative to the module.
        b: Gradients at the module's floating-point outputs, in order, samples first; None where none arrived.
        n: Samples.
        quietly: Makes a context in which the module's parts run unobserved.
    """

    def __init__(
        self,
        call: RecordedCall,
        name: str,
        b: list[Tensor | None],
        n: int,
        quietly: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Hold the call and its output gradients."""
        self.call, self.name, self.b, self.n, self.quietly = call, name, b, n, quietly

    def contract(self, v: Tensor) -> Tensor:
        """Contract by the form that works for this module."""
        rule = self.call.rule
        with self.quietly():
            if rule.form == "jvp":
                try:
                    return self._contract_jvp(v)
                except (NotImplementedError, RuntimeError) as error:
                    log.info("inrun: no forward-mode derivative in %s (%s); using vmap", type(self.call.module).__name__, error)
                    rule.form = "vmap"
            return dot_each(self._form(), v)

    def form(self) -> Tensor:
        """Form per-sample gradients by vmap over samples."""
        with self.quietly():
            return self._form()

    def total(self) -> Tensor:
        """Differentiate the call as a whole."""
        parameter = self.call.module.get_parameter(self.name).detach()
        with self.quietly(), torch.enable_grad():
            value = parameter.clone().requires_grad_()
            outs = self.call.run({self.name: value})
            self.call.check_outputs(dict(enumerate(outs)))
            pairs = [(out, b) for out, b in zip(outs, self.b, strict=True) if b is not None and out.requires_grad]
            if not pairs:
                return torch.zeros_like(parameter)
            (g,) = torch.autograd.grad([out for out, _ in pairs], value, [b for _, b in pairs], allow_unused=True)
        return torch.zeros_like(parameter) if g is None else g

    def parts(self) -> tuple[Tensor, ...]:
        """Return the output gradients; arguments are alive anyway until the backward is through."""
        return tuple(b for b in self.b if b is not None)

    def _contract_jvp(self, v: Tensor) -> Tensor:
        """Return Σ b_n ∘ (J v)_n by one forward-mode product per direction, ``[n, k]``."""
        parameter = self.call.module.get_parameter(self.name).detach()

        def run(value: Tensor) -> tuple[Tensor, ...]:
            return tuple(self.call.run({self.name: value}))

        scores: list[Tensor] = []
        for direction in v:
            with no_grad_in_forward_mode():
                outs, tangents = torch.func.jvp(run, (parameter,), (direction.to(parameter.dtype),))[:2]
            if not scores:
                self.call.check_outputs(dict(enumerate(outs)))
            scores.append(self._contract_outputs(tangents))
        return torch.stack(scores, dim=1)

    def _contract_outputs(self, tangents: tuple[Tensor, ...]) -> Tensor:
        """Return Σ b_n ∘ tangent_n over all outputs, ``[n]``."""
        parts = [
            (tangent.reshape(self.n, -1) * b.reshape(self.n, -1)).sum(1)
            for tangent, b in zip(tangents, self.b, strict=True)
            if b is not None
        ]
        return torch.stack(parts).sum(0)

    def _form(self) -> Tensor:
        """Form per-sample gradients ``[n, *shape]``, sample by sample or, where that cannot be, from the call as it was."""
        rule = self.call.rule
        if not rule.separates:
            return self._form_together()
        try:
            return self._form_each()
        except (CoverageError, RuntimeError) as error:  # torch has no kind of its own for what cannot be batched or split
            log.info("inrun: samples of %s do not run alone (%s)", type(self.call.module).__name__, error)
            try:
                found = self._form_together()
            except RuntimeError as again:
                raise error from again  # the first one names the cause
        rule.note_inseparable()
        return found

    def _form_together(self) -> Tensor:
        """Differentiate the call as a whole once per sample, with the gradients at that sample's outputs alone."""
        parameter = self.call.module.get_parameter(self.name).detach()
        found = []
        with torch.enable_grad():
            value = parameter.clone().requires_grad_()
            outs = self.call.run({self.name: value})
            self.call.check_outputs(dict(enumerate(outs)))
            used = [i for i, (out, b) in enumerate(zip(outs, self.b, strict=True)) if b is not None and out.requires_grad]
            for j in range(self.n if used else 0):
                mine = self._gradients_of(j)
                (g,) = torch.autograd.grad(
                    [outs[i] for i in used], value, [mine[i] for i in used], retain_graph=j + 1 < self.n, allow_unused=True
                )
                found.append(torch.zeros_like(parameter) if g is None else g)
        return torch.stack(found) if found else parameter.new_zeros(self.n, *parameter.shape)

    def _gradients_of(self, sample: int) -> dict[int, Tensor]:
        """Return the output gradients, by place, without those of other samples."""
        found = {}
        for place, b in enumerate(self.b):
            if b is not None:
                rows = b.detach().reshape(self.n, -1)
                mine = torch.zeros_like(rows)
                mine[sample] = rows[sample]
                found[place] = mine.view(b.shape)
        return found

    def _form_each(self) -> Tensor:
        """Form them by vmap: arguments with rows of samples are split, the others shared."""
        parameter = self.call.module.get_parameter(self.name).detach()
        split = self._splitting()
        grads = [b.reshape(self.n, -1) for b in self.b if b is not None]

        def one_sample(rows: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, ...]:
            def run(value: Tensor) -> tuple[Tensor, ...]:
                outs = self._run_one(split, rows, value)
                return tuple(out for out, b in zip(outs, self.b, strict=True) if b is not None)

            outs, pull = torch.func.vjp(run, parameter)[:2]
            found: tuple[Tensor, ...] = pull(tuple(grad.reshape(out.shape) for out, grad in zip(outs, grads, strict=True)))
            return found

        return self._each_sample(one_sample, self._rows(split), grads)[0]

    def _each_sample(self, function: Callable[..., tuple[Tensor, ...]], *rows: list[Tensor]) -> tuple[Tensor, ...]:
        """Return what a function gives for the rows of each sample, stacked: at once, or one after the other.

        Samples that run alone would draw other random numbers than in the batch. ``_splitting``, which goes the same way and
        compares outputs with the batch's, would see that.
        """
        if self.call.rule.batches:
            try:
                with warnings.catch_warnings():
                    # The user was told that this module is slow; which kernel lacks a batching rule does not help them.
                    warnings.filterwarnings("ignore", message="There is a performance drop")
                    at_once: tuple[Tensor, ...] = torch.func.vmap(function, randomness="error")(*rows)
                return at_once
            except (NotImplementedError, RuntimeError) as error:
                log.info("inrun: no batching in %s (%s); one sample after the other", type(self.call.module).__name__, error)
        found = [function(*([x[j] for x in some] for some in rows)) for j in range(self.n)]
        self.call.rule.note_unbatched()  # only if the samples can be run at all
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))

    def _rows(self, split: tuple[int, ...]) -> list[Tensor]:
        """Return the arguments at places ``split`` with one row per sample, ``[n, block, ...]``."""
        return [self.call.leaves[i].reshape(self.n, -1, *self.call.leaves[i].shape[1:]) for i in split]

    def _run_one(self, split: tuple[int, ...], rows: list[Tensor], value: Tensor) -> list[Tensor]:
        leaves = list(self.call.leaves)
        for i, row in zip(split, rows, strict=True):
            leaves[i] = row
        return self.call.run({self.name: value}, leaves)

    @torch.no_grad()
    def _splitting(self) -> tuple[int, ...]:
        """Find the arguments to split: those that the row check saw moving, and of the others what gives the same output.

        A mask of shape [t, t] with t = n looks like one row per sample and is not; a padding mask that is equal for all
        samples looks like no sample's and is. Only running the module tells.
        """
        call, n = self.call, self.n
        candidates = [
            i for i, x in enumerate(call.leaves) if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] and x.shape[0] % n == 0
        ]
        sure = [i for i in candidates if call.rule.split.get(i, False)]
        doubtful = [i for i in candidates if i not in sure]
        leading = [i for i in doubtful if call.leaves[i].shape[0] == n]
        choices = [[*sure, *leading], sure, [*sure, *doubtful], [*sure, *(i for i in doubtful if i not in leading)]]
        parameter = call.module.get_parameter(self.name).detach()
        whole = call.run({self.name: parameter})
        call.check_outputs(dict(enumerate(whole)))
        problem: Exception | None = None
        for choice in choices:
            split = tuple(sorted(set(choice)))
            if not split:
                continue
            try:
                outs = self._each_sample(lambda rows, split=split: tuple(self._run_one(split, rows, parameter)), self._rows(split))
            except Exception as error:  # noqa: BLE001 - what fails is not the way the module was called
                problem = error
                continue
            wanted = [(o, w) for o, w, b in zip(outs, whole, self.b, strict=True) if b is not None]
            if all(o.numel() == w.numel() and torch.allclose(o.reshape(w.shape), w, rtol=1e-3, atol=1e-5) for o, w in wanted):
                return split
        shapes = [tuple(x.shape) for x in call.leaves if isinstance(x, Tensor)]
        raise CoverageError(
            f"{type(call.module).__name__} has no rule and no forward-mode derivative, and its {n} samples cannot be run one by "
            f"one: no way to split its arguments of shapes {shapes} gives the output of the batch"
            + (f" ({type(problem).__name__}: {str(problem).splitlines()[0]})" if problem is not None and str(problem) else "")
            + ". Usual causes: a mask that does not have one row per sample, offsets into a flat input, rows routed to experts. "
            "Freeze its parameters, or replace it by layers that have a rule."
        )


@torch.no_grad()
def _printed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ w x of every leading row, with weights that tell entries apart, and Σ w |x|."""
    rows = x.detach().reshape(1, -1) if x.dim() == 0 else x.detach().flatten(1) if x.dim() > 1 else x.detach().unsqueeze(1)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    weights = torch.linspace(0.5, 1.5, rows.shape[1], dtype=rows.dtype, device=rows.device)
    return rows @ weights, rows.abs() @ weights


@contextlib.contextmanager
def _modes(flags: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Put modules into the train/eval modes they had at the call."""
    now = [(m, m.training) for m, _ in flags]
    try:
        for m, flag in flags:
            m.training = flag
        yield
    finally:
        for m, flag in now:
            m.training = flag


@torch.no_grad()
def unused_parameters(call: RecordedCall, names: list[str]) -> list[str]:
    """Return which of ``names`` the module's call does not use itself: NaN in them does not reach its output."""
    found = []
    for name in names:
        spoiled = {name: torch.full_like(call.module.get_parameter(name), float("nan"))}
        if not any(bool(torch.isnan(out).any()) for out in call.run(spoiled)):
            found.append(name)
    return found

"""Validation losses and their gradients, taken beside the training step."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor, nn

from inrun.engine.folds import Folds
from inrun.errors import ConfigurationError, ValidationError
from inrun.ledger.labels import Label, is_name
from inrun.old.engine.guards import BufferGuard
from inrun.old.engine.processes import Meeting, Processes
from inrun.old.engine.python_state import PythonState
from inrun.old.engine.quiet import devices_of, forked_random, modes, plain_checkpoints, run_eagerly, seed_of
from inrun.old.engine.sharded import backward_beside, in_own_precision, reshard
from inrun.torch_private import own_cache_of_parametrizations

Loss = Callable[..., Tensor]


@dataclass
class Gradients:
    """Validation losses and gradients at one point in weight space."""

    columns: list[Label]
    losses: Tensor  # [k]
    #: Per parameter ``[k, *shape]``; None where no validation loss depends on it.
    raw: list[Tensor | None]

    def scaled(self, factor: float) -> Gradients:
        """Multiply losses and gradients, in place, by a factor."""
        self.losses = self.losses * factor
        for g in self.raw:
            if g is not None:
                g.mul_(factor)
        return self


Differentiate = Callable[[Tensor, bool], list[Tensor | None]]
Check = Callable[[list[Tensor | None]], None]


def _check_same(meeting: Meeting) -> None:
    """Raise unless all ranks have as many losses."""
    if not meeting.same(0):
        raise ValidationError(
            f"the validation callables return {', '.join(f'{x[0]} losses on rank {r}' for r, x in enumerate(meeting.all))}; every "
            "rank must return as many points or folds, whose means over ranks are taken one by one"
        )


def _gradient(point: Tensor, parameters: list[nn.Parameter], last: bool) -> list[Tensor | None]:
    trained = [p for p in parameters if p.requires_grad]
    try:
        found = dict(zip(trained, torch.autograd.grad(point, trained, retain_graph=not last, allow_unused=True), strict=True))
        return [found.get(p) for p in parameters]
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValidationError(
            "the validation pass uses reentrant activation checkpointing, whose backward cannot be asked for gradients without "
            "writing them to .grad; take use_reentrant=False, or no checkpointing in eval mode"
        ) from error


def _bent_gradient(
    point: Tensor, parameters: list[nn.Parameter], move: dict[nn.Parameter, Tensor], last: bool
) -> list[Tensor | None]:
    """Return ∇ℓ + ½H·d."""
    every, parameters = parameters, [p for p in parameters if p.requires_grad]
    first = torch.autograd.grad(point, parameters, create_graph=True, allow_unused=True)
    slopes = [(g * move[p]).sum() for g, p in zip(first, parameters, strict=True) if g is not None and p in move]
    slope = torch.stack(slopes).sum() if slopes else point.new_zeros(())
    if not slope.requires_grad:  # a loss that is linear in the weights has no curvature
        flat = {p: None if g is None else g.detach() for p, g in zip(parameters, first, strict=True)}
        return [flat.get(p) for p in every]
    try:
        bend = torch.autograd.grad(slope, parameters, retain_graph=not last, allow_unused=True)
    except RuntimeError as error:
        raise ValidationError(
            f'the validation loss cannot be differentiated twice ({error}); take hessian="differences" (two more gradients '
            'instead of a double backward), or method="midpoint", which needs no Hessian'
        ) from error
    bent = {
        p: None if g is None else (g.detach() if h is None else torch.add(g.detach(), h, alpha=0.5))
        for p, g, h in zip(parameters, first, bend, strict=True)
    }
    return [bent.get(p) for p in every]


def _separate(raw: list[Tensor | None]) -> None:
    """Give every gradient memory of its own: autograd hands the same tensor to both terms of a sum."""
    seen: set[int] = set()
    for i, g in enumerate(raw):
        if g is not None:
            address = g.untyped_storage().data_ptr()
            if address in seen:
                raw[i] = g.clone()
            seen.add(address)


def _wants_step(fn: Loss | Folds) -> bool:
    fn = fn.fn if isinstance(fn, Folds) else fn
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return False
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(required) >= 2


class Validation:
    """The named validation callables of a run."""

    #: A validation pass is filling ``.grad``, for want of another way: what arrives there is no sample's.
    fills_gradients = False

    def __init__(
        self, model: nn.Module, called: nn.Module, callables: Loss | Mapping[str, Loss], mode: str, processes: Processes
    ) -> None:
        """Check and hold the callables, which get ``called`` (the model, or what was compiled of it); ``mode`` is eval or train.

        Of several processes each has callables of its own: losses and gradients are the means over them.
        """
        named = dict(callables) if isinstance(callables, Mapping) else {"validation": callables}
        if not named:
            raise ConfigurationError("validation= is empty; give at least one callable that returns a loss")
        for name, fn in named.items():
            if not is_name(name):
                raise ConfigurationError(
                    f"validation name {name!r}: it must be a text, and #, [ and ] tell folds and points in the ledger; leave them"
                    " out"
                )
            if not isinstance(fn, Folds) and not callable(fn):
                raise ConfigurationError(f"validation[{name!r}] is {type(fn).__name__}, not a callable(model) -> loss")
        if mode not in ("eval", "train"):
            raise ConfigurationError(f'validation_mode is {mode!r}; accepted are "eval" and "train"')
        self.model, self.called, self.mode, self.processes = model, called, mode, processes
        self.callables = {name: (fn, _wants_step(fn)) for name, fn in named.items()}
        self.guard = BufferGuard(model, always=mode == "train")
        self.state = PythonState(model)
        self._stacks: dict[int, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of the validation sets."""
        return list(self.callables)

    def scalar(self, name: str, step: int) -> Callable[[nn.Module], Tensor]:
        """Return one set's loss as a function of any model: the mean over its points or folds."""
        fn, wants_step = self.callables[name]
        call = fn.fn if isinstance(fn, Folds) else fn

        def loss(model: nn.Module) -> Tensor:
            return (call(model, step) if wants_step else call(model)).mean()

        return loss

    def _loss(self, name: str, step: int) -> Tensor:
        fn, wants_step = self.callables[name]
        call = fn.fn if isinstance(fn, Folds) else fn
        loss = call(self.called, step) if wants_step else call(self.called)
        if not isinstance(loss, Tensor):
            raise ValidationError(
                f"validation {name!r} returned {type(loss).__name__}; it must return a tensor: "
                "a scalar loss, or a vector with one loss per validation point"
            )
        if loss.dim() > 1 or loss.numel() == 0 or not loss.is_floating_point():
            raise ValidationError(
                f"validation {name!r} returned a {loss.dtype} tensor of shape {tuple(loss.shape)}; "
                "it must be a floating-point scalar, or a vector with one loss per validation point"
            )
        return fn.split(loss) if isinstance(fn, Folds) else loss

    def _quiet(self, name: str, step: int) -> Any:
        salt = 1 + self.names.index(name)
        return (
            self._afresh(),
            forked_random(seed_of(step, salt), devices_of(self.model)),
            modes(self.model, None if self.mode == "train" else False),
            self._hold(step),
        )

    @contextlib.contextmanager
    def _hold(self, step: int) -> Iterator[None]:
        """Take back what a pass leaves in the model's tensors, and in Python; in train mode forwards leave more."""
        with self.guard.hold(), self.state.hold(step=None if self.mode == "train" else step):
            yield

    @contextlib.contextmanager
    def _afresh(self) -> Iterator[None]:
        """Use parameters as they are now: gather those that are split over processes, and keep nothing that was made of them."""
        if self.processes.sharded:
            reshard(self.model)
        try:
            with own_cache_of_parametrizations():
                yield
        finally:
            if self.processes.sharded:
                reshard(self.model)

    def in_own_precision(self) -> contextlib.AbstractContextManager[bool]:
        """Let passes in the block use parameters as they are, and tell whether a policy of ``fully_shard`` rounds them else."""
        return in_own_precision(self.model) if self.processes.sharded else contextlib.nullcontext(False)

    def losses(self, step: int) -> Tensor:
        """Return the losses alone, ``[k]``."""
        parts = []
        with self.processes.together("the validation losses", step) as meeting:
            for name in self.names:
                afresh, random_state, flags, buffers = self._quiet(name, step)
                with afresh, random_state, flags, buffers, torch.no_grad(), plain_checkpoints():
                    parts.append(self._loss(name, step).detach().reshape(-1).double())
            found = torch.cat(parts)
            meeting.own = [len(found)]
        _check_same(meeting)
        self.processes.mean_("losses", [found])
        return found

    def columns(self, step: int) -> list[Label]:
        """Return the labels of all losses: sets, points and folds."""
        found: list[Label] = []
        with self.processes.together("the validation losses", step) as meeting:
            for name in self.names:
                afresh, random_state, flags, buffers = self._quiet(name, step)
                with afresh, random_state, flags, buffers, torch.no_grad(), plain_checkpoints():
                    loss = self._loss(name, step)
                found += self._labels(name, loss)
            meeting.own = [len(found)]
        _check_same(meeting)
        return found

    def _labels(self, name: str, loss: Tensor) -> list[Label]:
        in_folds = isinstance(self.callables[name][0], Folds)
        return [Label(name, None if loss.dim() == 0 else j, in_folds) for j in range(loss.numel())]

    def gradients(self, parameters: list[nn.Parameter], step: int, check: Check | None = None) -> Gradients:
        """Return losses and gradients; ``.grad`` is not touched. ``check`` may raise for what this process found."""
        if self.processes.sharded:
            self.fills_gradients = True
            try:
                return self._each_point(
                    parameters, step, lambda point, last: backward_beside(self.model, point, parameters, last), check
                )
            finally:
                self.fills_gradients = False
        return self._each_point(parameters, step, lambda point, last: _gradient(point, parameters, last), check)

    def bent_gradients(self, parameters: list[nn.Parameter], step: int, move: dict[nn.Parameter, Tensor]) -> Gradients:
        """Return losses and ∇ℓ + ½H·d for a move d, by differentiating ⟨∇ℓ, d⟩ once more.

        Attention runs on the MATH backend in this pass alone: the fused kernels cannot be differentiated twice.
        """
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            # Compiled code cannot be differentiated twice.
            return run_eagerly(
                self._each_point, parameters, step, lambda point, last: _bent_gradient(point, parameters, move, last)
            )  # type: ignore[no-any-return]

    def _each_point(
        self, parameters: list[nn.Parameter], step: int, differentiate: Differentiate, check: Check | None = None
    ) -> Gradients:
        with self.processes.together("the validation gradient", step) as meeting:
            found = self._own_points(parameters, step, differentiate)
            if check is not None:
                check(found.raw)
            meeting.own = [len(found.columns)]
        _check_same(meeting)
        if self.processes.sharded:
            self.processes.mean_("losses", [found.losses])
        elif self.processes.several:
            self._average(found, parameters)
        return found

    def _average(self, found: Gradients, parameters: list[nn.Parameter]) -> None:
        """Take the mean over processes; a parameter that some process's losses do not depend on counts as 0 there."""
        has = torch.tensor([g is not None for g in found.raw], dtype=torch.int32)
        somewhere = self.processes.summed("small", has) > 0
        for i in torch.nonzero(somewhere & (has == 0)).flatten().tolist():
            p = parameters[i]
            dtype = torch.promote_types(p.dtype, torch.float32)
            found.raw[i] = torch.zeros((len(found.columns), *p.shape), dtype=dtype, device=p.device)
        self.processes.mean_("losses", [found.losses])
        self.processes.mean_("validation gradient", [g for g in found.raw if g is not None])

    def _own_points(self, parameters: list[nn.Parameter], step: int, differentiate: Differentiate) -> Gradients:
        columns: list[Label] = []
        losses: list[Tensor] = []
        found: list[list[Tensor | None]] = []
        for name in self.names:
            afresh, random_state, flags, buffers = self._quiet(name, step)
            with afresh, random_state, flags, buffers, torch.enable_grad(), plain_checkpoints():
                loss = self._loss(name, step)
                if not loss.requires_grad:
                    raise ValidationError(
                        f"validation {name!r} returned a loss without gradient; "
                        "do not call it under no_grad, and do not detach the model's output"
                    )
                points = loss.reshape(-1)
                mine = []
                for j in range(len(points)):
                    if self.processes.sharded and j:  # a graph of split parameters serves one backward
                        points = self._loss(name, step).reshape(-1)
                    mine.append(differentiate(points[j], j + 1 == len(points)))
                if all(g is None for gradients in mine for g in gradients):
                    raise ValidationError(
                        f"validation {name!r} returned a loss that depends on no parameter that is scored, so that every sample "
                        "would score 0; run the model that the callable is given (not a copy of it), and do not detach its output"
                    )
                found += mine
                columns += self._labels(name, loss)
                losses.append(points.detach().double())
        raw = [self._stack(i, [g[i] for g in found]) for i in range(len(parameters))]
        _separate(raw)
        return Gradients(columns, torch.cat(losses), raw)

    def _stack(self, index: int, grads: list[Tensor | None]) -> Tensor | None:
        """Join the gradients of one parameter, ``[k, *shape]``, in float32 at least; k > 1 reuses its buffer."""
        present = [g for g in grads if g is not None]
        if not present:
            return None
        one = present[0]
        if len(grads) == 1 and one.dtype in (torch.float32, torch.float64) and one.is_contiguous():
            return one.unsqueeze(0)
        dtype = torch.promote_types(one.dtype, torch.float32)
        if len(grads) == 1:
            return one.to(dtype).contiguous().unsqueeze(0)
        shape = (len(grads), *one.shape)
        stack = self._stacks.get(index)
        if stack is None or stack.shape != shape or stack.dtype != dtype:
            stack = self._stacks[index] = torch.empty(shape, dtype=dtype, device=one.device)
        for row, g in zip(stack, grads, strict=True):
            if g is None:
                row.zero_()
            else:
                row.copy_(g)
        return stack

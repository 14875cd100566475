"""Validation passes: losses and their gradients, leaving modes, buffers and random numbers as they were."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.processes import Processes
from inrun.engine.sharded import ShardedPasses
from inrun.errors import ConfigurationError, ValidationError
from inrun.layers.checkpoints import kept_results, no_reentry
from inrun.ledger.labels import Label, is_name
from inrun.torch_private import version_of

Loss = Callable[..., Tensor]


@dataclass
class Gradients:
    """Losses ``[k]`` in float64 on the device; and per loss the gradients by parameter, None where there is none."""

    labels: list[Label]
    losses: Tensor
    rows: list[Sequence[Tensor | None]]

    def of(self, place: int, dtype: torch.dtype) -> Tensor | None:
        """Return the gradients of one parameter, ``[k, *shape]``."""
        grads = [row[place] for row in self.rows]
        grads = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        present = [g for g in grads if g is not None]
        if not present:
            return None
        if len(grads) == 1:
            return present[0].to(dtype).contiguous().unsqueeze(0)
        return torch.stack([torch.zeros_like(present[0]) if g is None else g for g in grads]).to(dtype)


class Validation:
    """The named validation callables of a run."""

    def __init__(
        self,
        model: nn.Module,
        callables: Loss | Mapping[str, Loss],
        mode: str = "eval",
        processes: Processes | None = None,
    ) -> None:
        named = dict(callables) if isinstance(callables, Mapping) else {"validation": callables}
        if not named:
            raise ConfigurationError("validation= is empty. Give at least one callable that returns a loss.")
        for name, fn in named.items():
            if not is_name(name):
                raise ConfigurationError(
                    f"validation name {name!r}: it must be a text without #, [ and ], which tell folds and points."
                )
            if not callable(fn) and not hasattr(fn, "split"):
                raise ConfigurationError(f"validation[{name!r}] is {type(fn).__name__}, not a callable(model) -> loss.")
        self.model, self.callables, self.mode = model, named, mode
        self._wants_step = {name: _required_arguments(fn) >= 2 for name, fn in named.items()}
        self._written: set[int] | None = None
        #: The processes whose mean losses are taken, and how passes go through a model that is split over them.
        self.processes = processes or Processes()
        self.passes = ShardedPasses(model) if self.processes.sharded else None

    @property
    def names(self) -> list[str]:
        """Return the names of the validation sets."""
        return list(self.callables)

    def function(self, name: str | None, step: int) -> tuple[str, Callable[[nn.Module], Tensor]]:
        """Return the name of a set (default: the first) and its mean loss at a step as a function of any model."""
        name = self.names[0] if name is None else name
        if name not in self.callables:
            raise ConfigurationError(f"validation is {name!r}. This accountant has {', '.join(self.names)}.")
        fn = self.callables[name]
        call = getattr(fn, "fn", fn) if hasattr(fn, "split") else fn
        wants_step = self._wants_step[name]
        return name, lambda model: (call(model, step) if wants_step else call(model)).mean()

    @torch.no_grad()
    def losses(self, step: int) -> Tensor:
        """Return the losses alone, ``[k]``, the mean over processes."""
        parts = []
        with self.processes.barrier("the validation losses", step):
            for name in self.names:
                with self._quiet(name, step):
                    parts.append(self._loss(name, step).detach().reshape(-1).double())
        found = torch.cat(parts)
        self.processes.all_reduce_("validation losses", [found], mean=True)
        return found

    def gradients(self, parameters: Sequence[Tensor], step: int, move: Sequence[Tensor | None] | None = None) -> Gradients:
        """Return losses and gradients, the mean over processes; ``.grad`` is not touched.

        With ``move`` d they are ∇ℓ + ½ H d, by differentiating ⟨∇ℓ, d⟩ once more.
        """
        with self.processes.barrier("the validation gradient", step) as meeting:
            found = self._gradients(parameters, step, move)
            meeting.number = len(found.labels)
        if self.processes.several:
            self._average(found, parameters, meeting.numbers)
        return found

    def _average(self, found: Gradients, parameters: Sequence[Tensor], counts: list[int]) -> None:
        """Average over processes; passes through a model that is split have averaged its gradients."""
        if len(set(counts)) > 1:
            raise ValidationError(
                "validation losses differ between ranks: " + ", ".join(f"rank {r} has {k}" for r, k in enumerate(counts)) + ". "
                "On every rank, every set returns as many points."
            )
        if self.passes is None:
            found.rows = [
                [torch.zeros_like(p) if g is None else g for g, p in zip(row, parameters, strict=True)] for row in found.rows
            ]
        rows = [] if self.passes is not None else [g for row in found.rows for g in row if g is not None]
        self.processes.all_reduce_("validation gradient", [*rows, found.losses], mean=True)

    def _gradients(self, parameters: Sequence[Tensor], step: int, move: Sequence[Tensor | None] | None) -> Gradients:
        labels: list[Label] = []
        losses: list[Tensor] = []
        found: list[Sequence[Tensor | None]] = []
        for name in self.names:
            twice = contextlib.nullcontext() if move is None else twice_differentiable()
            with self._quiet(name, step), thawed(parameters), torch.enable_grad(), twice:
                loss = self._loss(name, step)
                if not loss.requires_grad:
                    raise ValidationError(
                        f"validation {name!r} returned a loss without gradient. Do not call it under no_grad, and do not detach "
                        "the model's output."
                    )
                points = loss.reshape(-1)
                for j, point in enumerate(points):
                    last = j + 1 == len(points)
                    if self.passes is not None:
                        found.append(self.passes.gradients(point, parameters, last))
                    elif move is None:
                        found.append(torch.autograd.grad(point, list(parameters), retain_graph=not last, allow_unused=True))
                    else:
                        found.append(_with_curvature(point, parameters, move, last, name))
                if all(g is None for gradients in found[-len(points) :] for g in gradients):
                    raise ValidationError(
                        f"validation {name!r} returned a loss that depends on no scored parameter, so that every sample would "
                        "score 0. Run the model that the callable is given, not a copy of it."
                    )
                folds = hasattr(self.callables[name], "split")
                labels += [Label(name, None if loss.dim() == 0 else j, folds) for j in range(len(points))]
                losses.append(points.detach().double())
        return Gradients(labels, torch.cat(losses), found)

    def _loss(self, name: str, step: int) -> Tensor:
        fn = self.callables[name]
        call = getattr(fn, "fn", fn) if hasattr(fn, "split") else fn
        loss = call(self.model, step) if self._wants_step[name] else call(self.model)
        if not isinstance(loss, Tensor):
            raise ValidationError(
                f"validation {name!r} returned {type(loss).__name__}. "
                "Return a tensor: a scalar loss, or a vector with one loss per point."
            )
        if loss.dim() > 1 or loss.numel() == 0 or not loss.is_floating_point():
            raise ValidationError(
                f"validation {name!r} returned a {loss.dtype} tensor of shape {tuple(loss.shape)}. Return a floating-point scalar, "
                "or a vector with one loss per point."
            )
        return fn.split(loss) if hasattr(fn, "split") else loss  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def _quiet(self, name: str, step: int) -> Iterator[None]:
        salt = 1 + self.names.index(name)
        with (
            forked_random((step * 1_000_003 + salt) % (2**63 - 1), self.model),
            evaluating(self.model) if self.mode == "eval" else contextlib.nullcontext(),
            self._kept_buffers(),
            no_reentry(),
            contextlib.nullcontext() if self.passes is None else self.passes.fresh(),
            kept_results(),
        ):
            yield

    @contextlib.contextmanager
    def _kept_buffers(self) -> Iterator[None]:
        """Put back buffers that a pass writes to: all are copied around the first pass, and later those that were written."""
        buffers = dict(enumerate(self.model.buffers()))
        watched = buffers if self._written is None else {i: buffers[i] for i in self._written if i in buffers}
        copies = {i: b.detach().clone() for i, b in watched.items()}
        versions = {i: version_of(b) for i, b in buffers.items()}
        yield
        changed = {i for i, b in buffers.items() if version_of(b) != versions[i]}
        if self._written is None:
            changed |= {i for i, b in copies.items() if not torch.equal(b, buffers[i])}
        with torch.no_grad():
            # Kernels of batch norm write without counting: what was written once is put back after every pass.
            for i in copies if self._written is not None else changed & copies.keys():
                buffers[i].copy_(copies[i])
        self._written = changed | (self._written or set())
        if changed - copies.keys():
            names = [name for i, (name, _) in enumerate(self.model.named_buffers()) if i in changed - copies.keys()]
            raise ValidationError(
                f"a validation pass wrote to {', '.join(names)}, which no earlier pass had written to, so that its content is "
                "lost. Let the forward write to buffers in train mode only."
            )


def _required_arguments(fn: Any) -> int:
    fn = getattr(fn, "fn", fn) if hasattr(fn, "split") else fn
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


def _with_curvature(
    point: Tensor, parameters: Sequence[Tensor], move: Sequence[Tensor | None], last: bool, name: str
) -> list[Tensor | None]:
    """Return ∇ℓ + ½ H d."""
    first = torch.autograd.grad(point, list(parameters), create_graph=True, allow_unused=True)
    slopes = [(g * d).sum() for g, d in zip(first, move, strict=True) if g is not None and d is not None]
    slope = torch.stack(slopes).sum() if slopes else point.new_zeros(())
    plain: list[Tensor | None] = [None if g is None else g.detach() for g in first]
    if not slope.requires_grad:  # a loss that is linear in the weights has no curvature
        return plain
    try:
        bend = torch.autograd.grad(slope, list(parameters), retain_graph=not last, allow_unused=True)
    except RuntimeError as error:
        raise ValidationError(
            f'validation {name!r} cannot be differentiated twice ({error}). Take method="first" or "whole", which need no Hessian.'
        ) from error
    return [None if g is None else g if h is None else torch.add(g, h, alpha=0.5) for g, h in zip(plain, bend, strict=True)]


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Let the block's forward be differentiable twice: compiled code and most kernels of attention are not."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def forked_random(seed: int, model: nn.Module) -> Iterator[None]:
    """Seed torch, numpy and Python for the block, and put their states back."""
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    state, states = torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
    torch.default_generator.manual_seed(seed)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        for device, of_device in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(of_device, device)
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def thawed(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Let all scored parameters require gradient for the block: one that is frozen for a while may still be moved by momentum."""
    frozen = [p for p in parameters if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into eval mode for the block."""
    before = [m for m in model.modules() if m.training]
    for m in before:  # as nn.Module sets it in the end, without its search for parameters
        object.__setattr__(m, "training", False)
    try:
        yield
    finally:
        for m in before:
            object.__setattr__(m, "training", True)

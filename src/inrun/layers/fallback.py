"""Modules without a rule: raw parameters, unknown classes, parametrised layers.

With f(θ) the module's output on this call and b the gradient there, ⟨g_n, v⟩ = Σ b_n ∘ (∂f/∂θ · v)_n. Two forms:

``jvp``   one forward-mode product of the whole call; needs no knowledge of the arguments
``vmap``  per-sample gradients by ``torch.func``, for operations without a forward-mode derivative

Both run the module's forward again, under the random state of the original call.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from inrun.errors import StepError
from inrun.layers.registry import Kept, KeptFactors, Rule, Saved, Take, dot_each

log = logging.getLogger("inrun")


class FallbackRule(Rule):
    """Contract any module by running it again. One instance per module, since the form is found by trying."""

    label = "fallback"
    exact = False

    def __init__(self, names: tuple[str, ...]) -> None:
        """``names`` are the parameters this module answers for, relative to it."""
        self.own_names = names
        self.form = "jvp"
        #: Buffers that a forward in eval or train mode writes to, once seen: a replay must start from what they were.
        self.written: dict[bool, set[str]] = {}

    def observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Saved:
        """Keep the arguments and the random state from which the call started."""
        detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
        devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
        random_state = (torch.get_rng_state(), {d: torch.cuda.get_rng_state(d) for d in devices})
        return (Recorded(module, detached, random_state, self),)

    def contract(self, module: nn.Module, name: str, saved: Saved, b: Any, n: int, v: Tensor) -> Tensor:
        """Contract by the form that works for this module."""
        if self.form == "jvp":
            try:
                return contract_jvp(module, name, saved[0], b, n, v)
            except (NotImplementedError, RuntimeError) as error:
                log.info("inrun: no forward-mode derivative in %s (%s); using vmap", type(module).__name__, error)
                self.form = "vmap"
        return dot_each(self.sample_gradient(module, name, saved, b, n), v)

    def sample_gradient(self, module: nn.Module, name: str, saved: Saved, b: Any, n: int) -> Tensor:
        """Form per-sample gradients by vmap over samples."""
        return sample_gradients_vmap(module, name, saved[0], b, n)

    def keep(self, module: nn.Module, name: str, saved: Saved, b: Any, n: int, take: Take) -> Kept:
        """Keep the arguments and output gradients."""
        return KeptFactors(self, module, name, saved, b, n)

    def kept_bytes(self, module: nn.Module, name: str, lead: Tensor, n: int) -> int:
        """Guess: an output of the size of the input. Both are alive anyway until the backward is through."""
        return 2 * lead.nbytes


class Recorded:
    """One call: its arguments ``(args, kwargs)``, the random state before it, and how the module stood."""

    def __init__(self, module: nn.Module, arguments: Any, random_state: Any, rule: FallbackRule) -> None:
        """Hold all of it."""
        buffers = dict(module.named_buffers())
        self.rule, self.training = rule, module.training
        written = rule.written.get(self.training, set(buffers))
        self.buffers = {k: b.clone() for k, b in buffers.items() if k in written}
        self.buffer_versions = {k: b._version for k, b in buffers.items()}
        self.arguments, self.random_state = arguments, random_state
        self.flags = [(m, m.training) for m in module.modules()]
        self.device_type = next(module.parameters()).device.type
        self.autocast = (torch.is_autocast_enabled(self.device_type), torch.get_autocast_dtype(self.device_type))
        self.watched = [*(x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)), *module.parameters()]
        self.versions = [x._version for x in self.watched]

    def note_written(self, module: nn.Module) -> None:
        """After the call: keep copies of those buffers only that it wrote to."""
        written = {k for k, b in module.named_buffers() if self.buffer_versions.get(k) != b._version}
        self.rule.written[self.training] = written | self.rule.written.get(self.training, set())
        self.buffers = {k: b for k, b in self.buffers.items() if k in written}

    def check(self, module: nn.Module) -> None:
        """Raise if an argument or a weight was overwritten since the call: a replay would be another function."""
        if self.versions != [x._version for x in self.watched]:
            raise StepError(
                f"{type(module).__name__} has no rule and must run again, but its input or its weights were changed in place "
                "since its forward; do not write into its input, and give all its parameters to one optimizer"
            )

    def replay(self, module: nn.Module, parameters: dict[str, Tensor], arguments: Any) -> list[Tensor]:
        """Run the module with other parameters; return its floating-point output tensors in order."""
        self.check(module)
        args, kwargs = arguments
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
            copies = {name: self.buffers.get(name, b).clone() for name, b in module.named_buffers()}
            out = torch.func.functional_call(module, copies | parameters, args, kwargs, tie_weights=False)
        return float_tensors(out)


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


def float_tensors(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output, in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor) and x.is_floating_point()]


def contract_jvp(module: nn.Module, name: str, recorded: Recorded, b: list[Tensor | None], n: int, v: Tensor) -> Tensor:
    """Return Σ b_n ∘ (J v)_n by one forward-mode product per direction, ``[n, k]``."""
    parameter = module.get_parameter(name).detach()

    def run(value: Tensor) -> tuple[Tensor, ...]:
        return tuple(recorded.replay(module, {name: value}, recorded.arguments))

    scores = []
    for direction in v:
        tangents = torch.func.jvp(run, (parameter,), (direction.to(parameter.dtype),))[1]
        parts = [
            (tangent.reshape(n, -1) * grad.reshape(n, -1)).sum(1)
            for tangent, grad in zip(tangents, b, strict=True)
            if grad is not None
        ]
        scores.append(torch.stack(parts).sum(0))
    return torch.stack(scores, dim=1)


def sample_gradients_vmap(module: nn.Module, name: str, recorded: Recorded, b: list[Tensor | None], n: int) -> Tensor:
    """Form per-sample gradients ``[n, *shape]``: each argument with a leading dimension n is split, the others shared."""
    parameter = module.get_parameter(name).detach()
    leaves, structure = pytree.tree_flatten(recorded.arguments)
    split = [isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == n for x in leaves]

    def one_sample(rows: list[Tensor], grads: list[Tensor]) -> Tensor:
        given = iter(rows)
        whole = [next(given).unsqueeze(0) if is_split else x for x, is_split in zip(leaves, split, strict=True)]

        def run(value: Tensor) -> tuple[Tensor, ...]:
            outs = recorded.replay(module, {name: value}, pytree.tree_unflatten(whole, structure))
            return tuple(out for out, grad in zip(outs, b, strict=True) if grad is not None)

        outs, pull = torch.func.vjp(run, parameter)[:2]
        (g,) = pull(tuple(grad.reshape(out.shape) for out, grad in zip(outs, grads, strict=True)))
        return g

    rows = [x for x, is_split in zip(leaves, split, strict=True) if is_split]
    grads = [grad.reshape(n, -1) for grad in b if grad is not None]
    with warnings.catch_warnings():
        # The user was told that this module is slow; which kernel lacks a batching rule does not help them.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return torch.func.vmap(one_sample, randomness="error")(rows, grads)


def unused_parameters(module: nn.Module, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return which of ``names`` the module's forward does not use itself: NaN in them does not reach its output."""
    recorded = FallbackRule(()).observe(module, args, kwargs)[0]
    found = []
    with torch.no_grad():
        for name in names:
            spoiled = {name: torch.full_like(module.get_parameter(name), float("nan"))}
            outs = recorded.replay(module, spoiled, recorded.arguments)
            if not any(bool(torch.isnan(out).any()) for out in outs):
                found.append(name)
    return found

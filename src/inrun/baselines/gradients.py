"""Gradients and losses of single samples, for every baseline that asks for them.

    with looking(model, sample_loss, sample_ids) as look:
        g_val = look.validation(validation)             # [sets, P]
        for rows, g in look.blocks():                   # g: [m, P], of the samples sample_ids[rows]
            scores[:, rows] = g_val @ g.T

By ``torch.func``: ``vmap`` over the number k of the sample, at any weights, without writing to the model. Where a model or a
loss cannot be mapped over (it wants a plain ``int``, branches on values, draws numbers, looks k up in a dict) samples are taken one
at a time by plain autograd; this is logged once, and the numbers are the same. What mapping gives is held against plain calls: the
gradient of the first sample, and the losses of a few samples of every block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from inrun.baselines.registry import Ids
from inrun.errors import ConfigurationError, ValidationError

if TYPE_CHECKING:
    from torch import Tensor, nn

    #: ``(model, k) -> scalar loss`` of the k-th sample alone; k is an int or a 0-d integer tensor, to index data tensors with.
    SampleLoss = Callable[[nn.Module, Any], Tensor]
    ValidationLosses = Mapping[str, Callable[[nn.Module], Tensor]]
    #: A state dict; None: the weights that the model has.
    Weights = Mapping[str, Tensor] | None

log = logging.getLogger(__name__)
#: What mapping over samples ends in where it is not possible. The loop after it raises again what was no fault of the mapping.
UNMAPPABLE = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
#: Numbers of gradient in memory at a time; more do not make it faster.
BLOCK_NUMBERS = 2**25
MOST_SAMPLES = 128
#: Samples whose graph is kept for a second derivative.
HESSIAN_SAMPLES = 64
#: Samples of a block whose loss is taken by a plain call, too: the first, the last and others drawn at random.
HELD_AGAINST = 6


class Look:
    """Losses and gradients of single samples, and of validation sets, at given weights. Made by :func:`looking`."""

    def __init__(self, model: nn.Module, sample_loss: SampleLoss, ids: Ids, own: Mapping[str, Tensor], trained: list[str]) -> None:
        self.model, self.sample_loss, self.ids = model, sample_loss, ids
        self._own, self._trained = own, trained
        #: Whether samples are mapped over (None: not asked yet), and whether something that was mapped is in use.
        self._mapped: bool | None = None
        self._used = False
        self._draw = np.random.default_rng(0)
        self.shapes = {name: own[name].shape for name in trained}
        #: Of the coarsest numbers that are computed with.
        self._eps = max(_eps(own[name]) for name in trained)

    @property
    def size(self) -> int:
        """Trainable numbers, P."""
        return sum(shape.numel() for shape in self.shapes.values())

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Give the parts of ``[..., P]`` their names and shapes, ``[..., *shape]``."""
        parts = flat.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: part.reshape(*flat.shape[:-1], *shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def flat(self, named: Mapping[str, Tensor], what: str) -> Tensor:
        """Return tensors by parameter name as one, ``[P]``, in the order of gradients."""
        import torch

        self._check(named, self._trained, what)
        return torch.cat([_wide(named[name].detach().to(self._own[name])).flatten() for name in self._trained])

    def blocks(self, weights: Weights = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the gradients of all samples in order: which, and ``[m, P]``, in float32 where parameters have fewer bits."""
        for rows, g, _ in self.blocks_with_losses(weights):
            yield rows, g

    def blocks_with_losses(self, weights: Weights = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield which samples, their gradients ``[m, P]`` and their losses ``[m]``."""
        from torch.func import grad_and_value

        trained, fixed = self._at(weights)

        def mapped(k: Any) -> tuple[Tensor, Tensor]:
            # k comes by closure: as an argument of grad it would be wrapped once more, and could not index a tensor.
            return _flat(grad_and_value(lambda w: self._call(self.sample_loss, {**w, **fixed}, k))(trained))

        first = self._one(trained, fixed, 0)[0]  # names what is wrong with the loss, and is what mapping is held against

        def other(ks: Ids, found: tuple[Tensor, Tensor]) -> str | None:
            if not ks[0] and not _close(found[0][0], first, self._eps):
                return "it gives another gradient than autograd for the first sample"
            return self._other_losses(ks, found[1], {**trained, **fixed})

        for rows in self._rows():
            g, losses = self._over(rows, mapped, lambda k: self._one(trained, fixed, k), other)
            yield rows, _wide(g), _wide(losses)

    def losses(self, weights: Weights = None) -> Tensor:
        """Return the loss of every sample, ``[n]``."""
        import torch

        trained, fixed = self._at(weights)

        with torch.no_grad():
            return torch.cat([self._losses(rows, {**trained, **fixed}) for rows in self._rows()])

    def validation(self, validation: ValidationLosses, weights: Weights = None) -> Tensor:
        """Return the plain gradient of every validation loss, ``[sets, P]``, in the order of the mapping."""
        import torch

        wrong = [name for name, loss in validation.items() if not callable(loss)]
        if wrong:
            shown = f"a {type(validation[wrong[0]]).__name__}"
            raise ValidationError(f"validation {wrong[0]!r} is {shown}; it must be a function of the model that returns its loss")
        trained, fixed = self._at(weights)
        found = []
        for name, loss in validation.items():
            leaves = {n: w.clone().requires_grad_() for n, w in trained.items()}
            value = self._call(partial(_without_sample, loss), {**leaves, **fixed}, None)
            found.append(_wide(_gradient(f"validation {name!r}", value, list(leaves.values()))))
        return torch.stack(found)

    def hessian_product(self, vector: Tensor, ks: Ids) -> Tensor:
        """Multiply the Hessian of the mean loss of samples ks, at the model's weights, with a vector, ``[P]`` to ``[P]``."""
        import torch

        trained, fixed = self._at(None)
        total = torch.zeros_like(vector)
        for start in range(0, len(ks), HESSIAN_SAMPLES):
            leaves = {n: w.clone().requires_grad_() for n, w in trained.items()}
            loss = self._losses(ks[start : start + HESSIAN_SAMPLES], {**leaves, **fixed}).sum() / len(ks)
            first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, allow_unused=True, materialize_grads=True)
            slope = torch.cat([g.flatten() for g in first]).to(vector) @ vector
            if slope.requires_grad:  # not so for losses that are linear in the weights
                second = torch.autograd.grad(slope, list(leaves.values()), allow_unused=True, materialize_grads=True)
                total += torch.cat([g.flatten() for g in second])
        return total

    def like(self, rows: int) -> Tensor:
        """Return zeros ``[rows, P]`` in the dtype and at the place of gradients."""
        import torch

        own = [self._own[name] for name in self._trained]
        widest = reduce(torch.promote_types, (w.dtype for w in own), torch.float32)
        return own[0].detach().new_zeros(rows, self.size, dtype=widest)

    def _at(self, weights: Weights) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what is differentiated and what is not, of a state dict or the model's own.

        Copies, in the dtype of the model: a forward may write to its buffers (counters) and even to its parameters
        (``max_norm`` of embeddings). What a state dict leaves out is the model's own, but for what training changes.
        """
        if weights is not None:
            self._check(weights, [*self._trained, *(n for n in _statistics(self.model) if n in self._own)], "checkpoints")
        given = self._own if weights is None else {**self._own, **{n: weights[n] for n in self._own if n in weights}}
        at = {name: given[name].detach().to(own, copy=True) for name, own in self._own.items()}
        return {n: at[n] for n in self._trained}, {n: w for n, w in at.items() if n not in self.shapes}

    def _check(self, named: Mapping[str, Tensor], needed: Iterable[str], what: str) -> None:
        """Raise ConfigurationError unless there is a tensor for all that is needed, and all tensors have the model's shapes."""
        import torch

        if not isinstance(named, Mapping):
            raise ConfigurationError(f"{what}: got a {type(named).__name__} where tensors by name are wanted, as in a state dict")
        wrong = [
            name
            for name in dict.fromkeys([*needed, *(n for n in self._own if n in named)])
            if not isinstance(named.get(name), torch.Tensor) or named[name].shape != self._own[name].shape
        ]
        if wrong:
            raise ConfigurationError(
                f"{what}: no tensor of the model's shape for {', '.join(wrong[:3])}; it has {len(named)} names, and needs those of "
                "the model's own: state_dict() has them"
            )

    def _rows(self) -> Iterator[slice]:
        size = max(1, min(MOST_SAMPLES, BLOCK_NUMBERS // self.size))
        for start in range(0, len(self.ids), size):
            yield slice(start, min(start + size, len(self.ids)))

    def _over(
        self,
        ks: slice | Ids,
        mapped: Callable[[Tensor], Any],
        one: Callable[[int], Any],
        other: Callable[[Ids, Any], str | None],
    ) -> Any:
        """Call for every k of a block: mapped, or one after the other once that did not work or gave ``other`` than plain calls."""
        import torch
        from torch.func import vmap

        numbers = np.arange(ks.start, ks.stop) if isinstance(ks, slice) else ks
        if self._mapped is None:
            self._mapped = True
            self._see_precision()
            self._try_a_number_that_is_no_key()
        if self._mapped:
            try:
                found = vmap(mapped)(torch.as_tensor(numbers, device=self._own[self._trained[0]].device))
            except UNMAPPABLE as error:
                self._give_up_mapping(_short(error))
            else:
                why = other(numbers, found)
                if why is None:
                    self._used = True
                    return found
                if self._used:  # by blocks whose wrong samples were not drawn
                    raise ValidationError(
                        f"torch.func.vmap maps wrongly over samples, and some of that was used already: {why}; in "
                        "sample_loss(model, k) use k only to index tensors, or int(k) to have samples taken one at a time"
                    )
                self._give_up_mapping(why)
        found = [one(int(k)) for k in numbers]
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found)
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True))

    def _give_up_mapping(self, why: str) -> None:
        self._mapped = False
        log.warning("samples are taken one at a time, because torch.func.vmap cannot map over them: %s", why)

    def _see_precision(self) -> None:
        """Note the fewest bits that the first sample's forward computes with: under autocast, fewer than its parameters have."""
        import torch

        def note(kept: Tensor) -> Tensor:
            if kept.is_floating_point():
                self._eps = max(self._eps, _eps(kept))
            return kept

        trained, fixed = self._at(None)
        leaves = {n: w.requires_grad_() for n, w in trained.items()}
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
            self._call(self.sample_loss, {**leaves, **fixed}, 0)

    def _try_a_number_that_is_no_key(self) -> None:
        """Give up mapping if the loss looks k up in a dict or set: a tensor is never found there, and nothing would be raised."""
        import torch

        k = torch.tensor(0, device=self._own[self._trained[0]].device).as_subclass(_number_that_is_no_key())
        try:
            with torch.no_grad():
                trained, fixed = self._at(None)
                self._call(self.sample_loss, {**trained, **fixed}, k)
        except _UsedAsKeyError:
            self._give_up_mapping("sample_loss looks k up in a dict or a set, or makes text of it")
        except UNMAPPABLE:
            pass  # mapping will say it

    def _other_losses(self, ks: Ids, losses: Tensor, weights: Mapping[str, Tensor]) -> str | None:
        """Say where mapped losses ``[m]`` are not those of plain calls: the first, the last and some that are drawn."""
        import torch

        losses = losses.detach()
        if losses.dim() > 1:  # mapping minds no shape
            _check_scalar(self._named(int(ks[0])), losses[0])
        inner = self._draw.permutation(np.arange(1, len(ks) - 1))[: HELD_AGAINST - 2]
        # Kernels of a batch round otherwise than those of one sample; losses near 0 are differences of larger numbers.
        eps = max(self._eps, _eps(losses))
        # In half precision so many would be as much as the losses themselves.
        near, far = (64, 64) if eps < 1e-4 else (4, 16)
        scale = max(1.0, float(losses.abs().max().nan_to_num(1.0, 1.0)))
        for i in sorted({0, *inner.tolist(), len(ks) - 1}):
            with torch.no_grad():
                plain = self._call(self.sample_loss, weights, int(ks[i])).detach()
            _check_scalar(self._named(int(ks[i])), plain)
            if not torch.isclose(losses[i], plain, rtol=max(1e-3, far * eps), atol=near * eps * scale, equal_nan=True):
                return f"it gives {float(losses[i]):.6g} as {self._named(int(ks[i]))}, a plain call {float(plain):.6g}"
        return None

    def _one(self, trained: Mapping[str, Tensor], fixed: Mapping[str, Tensor], k: int) -> tuple[Tensor, Tensor]:
        """Return the gradient ``[P]`` and the loss of one sample by plain autograd."""
        leaves = {n: w.clone().requires_grad_() for n, w in trained.items()}
        loss = self._call(self.sample_loss, {**leaves, **fixed}, k)
        return _gradient(self._named(k), loss, list(leaves.values())), loss.detach()

    def _losses(self, ks: slice | Ids, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the losses of some samples, ``[m]``."""

        def alone(k: Any) -> Tensor:
            return self._call(self.sample_loss, weights, k)

        def checked(k: int) -> Tensor:
            loss = alone(k)
            _check_scalar(self._named(k), loss)
            return loss

        losses: Tensor = self._over(ks, alone, checked, lambda numbers, found: self._other_losses(numbers, found, weights))
        return losses

    def _named(self, k: int) -> str:
        return f"sample_loss of sample {self.ids[k]}"

    def _call(self, loss: Callable[[nn.Module, Any], Tensor], weights: Mapping[str, Tensor], k: Any) -> Tensor:
        """Call a loss of the model with other tensors in the place of its parameters and buffers."""
        from torch.func import functional_call

        return functional_call(_wrapped(self.model, loss), {f"model.{name}": w for name, w in weights.items()}, (k,))


@contextmanager
def looking(model: nn.Module, sample_loss: SampleLoss, sample_ids: Ids) -> Iterator[Look]:
    """Look at single samples: the model is in evaluation mode meanwhile (one sample is no batch to take statistics of).

    Every module goes back to its own mode; parameters, buffers, ``.grad`` and torch's random state are left as they were.

    Args:
        model: Its trainable parameters are what gradients are taken of.
        sample_loss: ``(model, k) -> scalar loss`` of the k-th of ``sample_ids``, alone.
        sample_ids: The samples, ``[n]``.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError("no parameter of the model requires a gradient")
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        # The fused attention kernels of CPUs have no rule for vmap, and no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(_cuda_devices(model)):
            yield Look(model, sample_loss, sample_ids, own, trained)
    finally:
        for module, training in before:
            module.training = training


def _cuda_devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})


def _wrapped(model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> nn.Module:
    """Return a module whose forward is the loss: functional_call replaces parameters for the time of a forward only."""
    from torch import nn

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, k: Any) -> Tensor:
            return loss(self.model, k)

    return Loss()


def _without_sample(loss: Callable[[nn.Module], Tensor], model: nn.Module, _: object) -> Tensor:
    return loss(model)


class _UsedAsKeyError(Exception):
    """A sample's number was hashed or printed."""


@cache
def _number_that_is_no_key() -> type[Tensor]:
    """Return a kind of tensor that indexes tensors as any other, and raises where it is hashed or made text of."""
    import torch

    class Number(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *given: Any) -> Any:
            found = super().__torch_function__(*given)
            return found.as_subclass(torch.Tensor) if isinstance(found, cls) else found  # what is indexed by k is no number

        def _refuse(self, *_: Any, **__: Any) -> Any:
            raise _UsedAsKeyError

        __hash__ = __repr__ = __str__ = __format__ = _refuse  # type: ignore[assignment]

    return Number


def _flat(found: tuple[Mapping[str, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    import torch

    return torch.cat([g.flatten() for g in found[0].values()]), found[1]


def _close(a: Tensor, b: Tensor, eps: float) -> bool:
    # Kernels of a batch round otherwise than those of one sample; a thousandth is far above that and far below a real fault. In
    # half precision, whose eps is as much, gradients of the two ways were up to 1.3 eps apart (120 small nets).
    a, b = _wide(a), _wide(b)
    return bool((a - b).norm() <= max(1e-3, 16 * eps) * b.norm() + 1e-12)


def _eps(numbers: Tensor) -> float:
    import torch

    return float(torch.finfo(numbers.dtype).eps)


def _wide(numbers: Tensor) -> Tensor:
    """Return numbers in float32 at least: sums of thousands in half precision lose the small ones."""
    import torch

    return numbers.to(torch.promote_types(numbers.dtype, torch.float32))


def _statistics(model: nn.Module) -> list[str]:
    """Return the names of the running means and variances of norms: buffers that training changes."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in ("running_mean", "running_var")
        if name in dict(module.named_buffers(recurse=False)) and name in module.state_dict()
    ]


def _check_scalar(what: str, loss: Any) -> None:
    import torch

    if not isinstance(loss, torch.Tensor) or loss.dim():
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise ValidationError(f"{what} returned {shown}; it must return a scalar loss that depends on the model's parameters")


def _gradient(what: str, loss: Tensor, leaves: list[Tensor]) -> Tensor:
    """Return the gradient of a loss, ``[P]``; zeros for what it does not depend on."""
    import torch

    _check_scalar(what, loss)
    if not loss.requires_grad:
        raise ValidationError(f"{what} returned a loss without gradient; it must depend on the model's parameters")
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)])


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"

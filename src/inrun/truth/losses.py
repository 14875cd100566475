"""The validation loss at many weights: under vmap where that is right, one at a time where it is not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from inrun.errors import ValidationError
from inrun.torch_private import TorchDispatchMode
from inrun.truth.untouched import seed_everything, untouched

Weights = dict[nn.Parameter, Tensor]
_SEED = 20250711


class Losses:
    """ℓ as a function of the weights, with the model's buffers and unmoved weights as they stood when this was made."""

    def __init__(self, model: nn.Module, validation: Callable[[nn.Module], Any]) -> None:
        """Save the model's weights and buffers; the user may train on, ℓ stays the same function."""
        self._model, self._validation = model, validation
        self.weights: Weights = {p: p.detach().clone() for p in model.parameters()}
        self._saved_buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
        self._task = _Task(model, validation)

    def looped(self, stack: Weights) -> Tensor:
        """Return ℓ at each row of the stack ``[B, *shape]``, by writing the weights into the real parameters; float64 ``[B]``."""
        losses = []
        with self._borrowed(), torch.no_grad():
            for row in range(_rows(stack)):
                self._reset()
                for p, values in stack.items():
                    p.data.copy_(values[row])
                losses.append(_scalar(self._validation(self._model)).detach().double().cpu())
        return torch.stack(losses)

    def vmapped(self, stack: Weights) -> Tensor:
        """Return the same numbers by one pass over all rows; not for every validation callable, see :meth:`can_vmap`."""
        names = {p: f"model.{name}" for name, p in self._model.named_parameters()}
        fixed = {names[p]: value for p, value in self.weights.items() if p not in stack}
        buffers = {f"model.{name}": value.clone() for name, value in self._saved_buffers.items()}

        def loss(moving: dict[str, Tensor]) -> Tensor:
            return functional_call(self._task, fixed | buffers | moving, ())  # a tied weight moves under all its names

        with self._borrowed(weights=False), torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # vmap loops over an op: slow, and right
            seed_everything(_SEED)
            # One draw for all rows, so that every subset meets the same function.
            return vmap(loss, randomness="same")({names[p]: values for p, values in stack.items()}).double().cpu()

    def can_vmap(self, moving: list[nn.Parameter]) -> bool:
        """Whether vmap gives the truth for this model and callable, tried at the weights and at two random ones near them.

        It does not if the callable holds on to a parameter (or a view of one) by itself, which then does not move, if an operation
        has no batching rule, or if the callable leaves torch (``.item()``). Every tensor is shifted, zeros too, by enough to see.
        """
        generator = torch.Generator().manual_seed(_SEED)
        stack = {}
        for p in moving:
            w = self.weights[p]
            noise = torch.randn(3, *w.shape, generator=generator, dtype=torch.float64).to(w)
            noise[0] = 0
            stack[p] = w + noise * (0.05 * w.square().mean().sqrt() + 0.01)
        try:
            got = self.vmapped(stack)
        except Exception:  # noqa: BLE001 - whatever fails under vmap is served by the loop, which is always right
            return False
        expected = self.looped(stack)
        tolerance = max(torch.finfo(p.dtype).eps for p in moving) ** 0.7  # 1e-11 in float64, 1e-5 in float32
        return bool(torch.allclose(got, expected, rtol=tolerance, atol=0))

    def largest_tensor(self) -> int:
        """Bytes of the largest tensor that one evaluation of ℓ makes."""
        with self._borrowed(), torch.no_grad(), _Largest() as largest:
            self._reset()
            self._validation(self._model)
        return largest.size

    @contextmanager
    def graph(self) -> Iterator[Tensor]:
        """ℓ at the saved weights with its graph on the model's own parameters, fit for double backward."""
        with self._borrowed(), torch.enable_grad():
            self._reset()
            loss = _scalar(self._validation(self._model))
            if not loss.requires_grad:
                raise ValidationError(
                    "the validation loss does not depend on the weights through autograd (no_grad or .item() inside?)"
                )
            yield loss

    @contextmanager
    def _borrowed(self, *, weights: bool = True) -> Iterator[None]:
        # The MATH kernel of attention is the one that knows vmap and double backward.
        with untouched(self._model, weights=weights), sdpa_kernel(SDPBackend.MATH):
            self._model.eval()
            yield

    def _reset(self) -> None:
        """Write the saved weights and buffers into the model and start the random draws anew."""
        buffers = dict(self._model.named_buffers())
        for tensor, value in (*self.weights.items(), *((buffers[name], value) for name, value in self._saved_buffers.items())):
            tensor.data.copy_(value)
        seed_everything(_SEED)


class _Task(nn.Module):
    """The callable as a module around the model, so that ``functional_call`` moves the model the callable sees."""

    def __init__(self, model: nn.Module, validation: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self._validation = validation

    def forward(self) -> Tensor:
        return _scalar(self._validation(self.model))


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.size = max(self.size, value.numel() * value.element_size())
        return result


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor | float | int):
        raise ValidationError(f"validation must return a scalar loss, got {type(loss).__name__}")
    loss = torch.as_tensor(loss)
    if loss.numel() != 1:
        raise ValidationError(f"validation must return a scalar loss, got a tensor of shape {tuple(loss.shape)}")
    return loss.reshape(())


def _rows(stack: Weights) -> int:
    return len(next(iter(stack.values())))

"""Where the real optimizer takes the weights, from its saved state, for many gradients at once."""

from __future__ import annotations

import copy
import importlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from inrun.errors import ConfigurationError, OptimizerError

# Each entry of the weights moves by its own gradient and state alone, so B subsets stacked in a leading dimension are B real steps.
# Exact classes only: a subclass may do anything.
ELEMENTWISE = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    )
)
# State that is one number per parameter; a shape cannot tell, for a parameter without dimensions has moments without dimensions.
_SCALARS = frozenset(("step", "mu_product", "eta", "mu"))
# Other kernels of the same update; the plain one takes any stacked shape and agrees to rounding.
_KERNELS = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}


class Mover:
    """u of the game: w + u(z) for stacks of gradients z."""

    def __init__(self, optimizers: Sequence[Optimizer], proxy: bool) -> None:
        """Save the optimizers as they stand.

        Args:
            optimizers: The optimizers of the training loop; they are copied, never stepped.
            proxy: Take u(z) = −lr·z, whatever the optimizer.
        """
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer):
                raise ConfigurationError(f"optimizer must be a torch optimizer or a list of them, got {type(optimizer).__name__}")
            if isinstance(optimizer, torch.optim.LBFGS) and not proxy:
                raise OptimizerError(
                    "LBFGS evaluates the loss inside its step, so its update is no function of one gradient; use proxy=True"
                )
        self._proxy = proxy
        self._saved = [_twin(optimizer, {p: p for p in _parameters_of(optimizer)}) for optimizer in optimizers]
        owned = [p for optimizer in self._saved for p in _parameters_of(optimizer)]
        if len(set(owned)) < len(owned):
            raise ConfigurationError("a parameter belongs to two optimizers; its update is then not one function of its gradient")
        self.parameters = set(owned)

    def moved(self, weights: dict[nn.Parameter, Tensor], gradients: dict[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the weights after the step, for each gradient of a stack.

        Args:
            weights: The weights before the step, each of the parameter's shape.
            gradients: z, ``[B, *shape]``, which an optimizer may overwrite; a parameter without an entry has gradient None, and
                the optimizer skips it.

        Returns:
            w + u(z), ``[B, *shape]``, for the parameters that have a gradient.
        """
        result: dict[nn.Parameter, Tensor] = {}
        for saved in self._saved:
            mine = {p: gradients[p] for p in _parameters_of(saved) if p in gradients}
            if not mine:
                continue
            if self._proxy:
                result |= {
                    p: weights[p] - group["lr"] * mine[p] for group in saved.param_groups for p in group["params"] if p in mine
                }
            elif type(saved) in ELEMENTWISE:
                result |= _step_stacked(saved, weights, mine)
            else:
                size = len(next(iter(mine.values())))
                rows = [_step_one(saved, weights, {p: z[row] for p, z in mine.items()}) for row in range(size)]
                result |= {p: torch.stack([row[p] for row in rows]) for p in mine}
        return result


def _step_stacked(
    saved: Optimizer, weights: dict[nn.Parameter, Tensor], gradients: dict[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Run one elementwise optimizer on all rows of the stack in one step."""

    def stack(value: Tensor, size: int) -> Tensor:
        return value.detach().expand(size, *value.shape).clone()

    size = len(next(iter(gradients.values())))
    stand_ins = {
        p: nn.Parameter(stack(weights[p], size)) if p in gradients else nn.Parameter(weights[p].clone())
        for p in _parameters_of(saved)
    }
    twin = _twin(saved, stand_ins)
    for group in twin.param_groups:
        group.update({key: value for key, value in _KERNELS.items() if key in group})
    for p, z in gradients.items():
        state = twin.state.get(stand_ins[p], {})
        for key, value in state.items():
            if isinstance(value, Tensor) and key not in _SCALARS:
                state[key] = stack(value, size)
        stand_ins[p].grad = z
    _step(twin)
    return {p: stand_ins[p].detach() for p in gradients}


def _step_one(
    saved: Optimizer, weights: dict[nn.Parameter, Tensor], gradients: dict[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """Run any optimizer on one gradient."""
    stand_ins = {p: nn.Parameter(weights[p].clone()) for p in _parameters_of(saved)}
    for p, z in gradients.items():
        stand_ins[p].grad = z
    _step(_twin(saved, stand_ins))
    return {p: stand_ins[p].detach() for p in gradients}


def _twin(optimizer: Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]) -> Optimizer:
    """Copy an optimizer, its options and its state, with other parameters in the place of its own.

    Not by its constructor, whose arguments are unknown for a class we have not seen, and not by ``copy``, which keeps only
    what torch's ``__getstate__`` names: every attribute is copied, with the parameters and the optimizer itself replaced
    wherever they occur.
    """
    twin = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(p): q for p, q in stand_ins.items()} | {id(optimizer): twin}
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            setattr(twin, name, OrderedDict())  # no hook of the user may fire
        elif name in ("param_groups", "state"):
            setattr(twin, name, copy.deepcopy(value, memo))
        else:
            setattr(twin, name, _copied(value, memo))
    return twin


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an attribute of an unknown class; what cannot be copied (a lock, a process group) is shared."""
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # noqa: BLE001 - deepcopy raises whatever the attribute's own class does
        return value


def _step(optimizer: Optimizer) -> None:
    """Step a twin, without the hooks that are registered for all optimizers of the process."""
    # The class's step: a learning-rate scheduler hides it on the instance behind one that is bound to the user's optimizer.
    with torch.enable_grad(), _no_global_hooks():
        type(optimizer).step(optimizer)


@contextmanager
def _no_global_hooks() -> Iterator[None]:
    module = importlib.import_module(Optimizer.__module__)  # torch.optim hides it behind the class
    tables: list[Any] = [getattr(module, name, {}) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")]
    saved = [OrderedDict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, saved, strict=True):
            table.update(hooks)


def _parameters_of(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]

"""Every name of torch that is not public, in one place; ``tests/test_torch_private.py`` says what breaks without each.

Public ways are used wherever they exist. What is left here has none in the releases we support.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = [
    "CACHED_MODE",
    "TorchDispatchMode",
    "allow_graphs",
    "default_store",
    "fsdp_groups",
    "fsdp_parameters",
    "functions_seen",
    "functions_unseen",
    "is_compiled",
    "keep_version_counter",
    "metadata_of",
    "pack_padded_sequence",
    "storage_of",
    "tree_leaves",
    "uncompiled",
    "unsafe_view",
    "version_of",
]

#: Contexts in which modes and tensor classes do not see torch functions, and see them again.
functions_unseen: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
functions_seen: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction
#: Lets writes to a tensor go uncounted in a block, so that graphs stay valid.
keep_version_counter: Callable[[Tensor], AbstractContextManager[Any]] = torch.autograd.grad_mode._unsafe_preserve_version_counter
#: Returns a tensor object for the same memory, which autograd does not take for a view: it may be written to.
unsafe_view: Callable[[Tensor, list[int]], Tensor] = torch.ops.aten._unsafe_view
#: The function that ``nn.utils.rnn.pack_padded_sequence`` calls, as the tape sees it.
pack_padded_sequence: Callable[..., Any] = torch._VF._pack_padded_sequence  # type: ignore[attr-defined]
#: What puts kept results in place when a selective checkpoint runs again; None in releases that have no such mode.
CACHED_MODE: Any = getattr(checkpoint, "_CachedTorchDispatchMode", None)


def metadata_of(edge: torch.autograd.graph.GradientEdge) -> Any:
    """Return shape, dtype and device of the gradient that arrives at a place of a graph."""
    return edge.node._input_metadata[edge.output_nr]  # type: ignore[attr-defined]


def storage_of(x: Tensor) -> int:
    """Return what views of the same memory have in common."""
    return x.untyped_storage()._cdata


def version_of(x: Tensor) -> int:
    """Return how often a tensor, or a view of it, was written to in place."""
    return x._version


def default_store() -> Any:
    """Return the store by which the processes of a job found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def fsdp_groups(model: nn.Module, recurse: bool = True) -> list[Any]:
    """Return what ``fully_shard`` keeps of parameters that are gathered and reduced together."""
    modules: list[Any] = [m for m in (model.modules() if recurse else (model,)) if hasattr(m, "_get_fsdp_state")]
    return [g for m in modules for g in _groups_of(m._get_fsdp_state())]


def _groups_of(state: Any) -> list[Any]:
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # up to torch 2.10
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(found)


def fsdp_parameters(model: nn.Module, recurse: bool = True) -> dict[nn.Parameter, Callable[[], Any]]:
    """Return the parameters that ``fully_shard`` split, each with what tells the one that stands for it while it is whole."""

    def unsharded(held: Any) -> Callable[[], Any]:
        return lambda: getattr(held, "_unsharded_param", None)

    return {held.sharded_param: unsharded(held) for g in fsdp_groups(model, recurse) for held in g.fsdp_params}


def is_compiled(module: nn.Module) -> bool:
    """Whether a module was compiled, by ``torch.compile(module)`` or by ``module.compile()``."""
    if module.__dict__.get("_compiled_call_impl") is not None:
        return True
    return type(module).__name__ == "OptimizedModule" and hasattr(module, "_orig_mod")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile(module)`` returned; other modules as they are."""
    return module._orig_mod if type(module).__name__ == "OptimizedModule" else module  # type: ignore[return-value]


def allow_graphs(count: int) -> None:
    """Let one forward be compiled in as many variants, before compiling is given up: models of one class share the count."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)

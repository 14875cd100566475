"""Every name of torch that is not public, in one place; ``tests/test_torch_private.py`` says what breaks without each.

Public ways are used wherever they exist. What is left here has none in the releases we support.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "TorchDispatchMode",
    "apply_as_it_is",
    "at_end_of_backward",
    "attention_body",
    "buffers_written_silently",
    "checkpoints_keep_nothing",
    "compiler_here",
    "current_backward",
    "default_store",
    "flatten_tree",
    "foreign_gradient_hooks",
    "forward_hooks",
    "fsdp_groups",
    "fsdp_in_own_precision",
    "fsdp_parameters",
    "held_parameters",
    "is_compiled",
    "keep_version_counters",
    "leaves_behind",
    "may_change_size",
    "move_last",
    "no_grad_in_forward_mode",
    "norms_of",
    "own_buffers",
    "own_cache_of_parametrizations",
    "own_children",
    "rounds_gradients",
    "unflatten_tree",
    "uncompiled",
    "unseen_by_modes",
    "unsafe_view",
    "version_of",
    "without_attention_fast_path",
]

#: Returns what compiles the functions that are called from here, None or False if nothing does. Itself a builtin: a function of
#: ours around it would be compiled in its turn.
compiler_here: Callable[[], Any] = getattr(eval_frame, "get_eval_frame_callback", lambda: None)


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """Flatten containers, those that others registered included, into leaves; see :func:`unflatten_tree`."""
    return pytree.tree_flatten(tree)


def unflatten_tree(leaves: list[Any], structure: Any) -> Any:
    """Undo :func:`flatten_tree`."""
    return pytree.tree_unflatten(leaves, structure)


def version_of(x: Tensor) -> int:
    """Return how often a tensor, or a view of it, was written to in place."""
    return x._version


def apply_as_it_is(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Any:
    """Apply a function that returns ``x``, one of its arguments, as it is and marked as written to.

    Where a mode runs, that is not counted: a selective checkpoint would take a result that it keeps for another one.
    """
    if not torch._C._len_torch_dispatch_stack():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    with keep_version_counters([x]):
        return function.apply(*args)  # type: ignore[no-untyped-call]


class _Recomputing(TorchDispatchMode):
    """Takes the place of the modes of selective checkpoints."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whatever is to be kept."""
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def checkpoints_keep_nothing() -> Iterator[None]:
    """Let selective checkpoints that are made in the block recompute all."""
    names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    before = {name: getattr(checkpoint, name) for name in names if hasattr(checkpoint, name)}
    try:
        for name in before:
            setattr(checkpoint, name, _Recomputing)
        yield
    finally:
        for name, cls in before.items():
            setattr(checkpoint, name, cls)


def unseen_by_modes() -> contextlib.AbstractContextManager[Any]:
    """Keep operations of our own from modes of others that count or keep results: a recomputed segment may need fewer of them."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


def leaves_behind(tensors: Sequence[Tensor]) -> set[Tensor]:
    """Return the leaves whose gradient a backward from some tensors would reach."""
    nodes: list[Any] = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen, found = set(nodes), set()
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.add(node.variable)
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        nodes += new
    return found


@contextlib.contextmanager
def keep_version_counters(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Let writes in the block go uncounted: for content that comes back bit for bit, so that graphs stay valid."""
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(tensors)):
        yield


class _ForwardModeFollows(TorchFunctionMode):
    """Turns forward-mode derivatives on and off with gradients."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; follow it if it is the switch."""
        out = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            torch._C._set_fwd_grad_enabled(args[0])
        return out


@contextlib.contextmanager
def no_grad_in_forward_mode() -> Iterator[None]:
    """Let ``torch.no_grad()`` inside the block cut forward-mode derivatives, too, as it cuts those of a backward.

    Gradient is on in the block, so that leaving an inner ``no_grad`` brings both back.
    """
    before = torch._C._is_fwd_grad_enabled()
    with torch.enable_grad(), _ForwardModeFollows():
        try:
            yield
        finally:
            torch._C._set_fwd_grad_enabled(before)


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call something when the running backward has ended, after what was queued so far and what that queues (DDP's reduction).

    It is not called where the backward fails.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
    engine.queue_callback(lambda: engine.queue_callback(call))


def default_store() -> Any:
    """Return the store by which the processes of a job found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def rounds_gradients(model: Any) -> Callable[[], bool]:
    """Return what tells whether DistributedDataParallel has a hook that reduces gradients in another way (half precision)."""
    wrapper = weakref.ref(model)

    def tell() -> bool:
        found = wrapper()
        return found is not None and bool(found._comm_hooks)

    return tell


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


@contextlib.contextmanager
def fsdp_in_own_precision(model: nn.Module) -> Iterator[bool]:
    """Let passes run in the precision of the parameters themselves; tell whether ``fully_shard`` gathers or reduces in less else.

    What such passes gather has buffers of its own for the time of the block: the policy's, and the parameters that stand in them,
    with gradients that wait there, come back as the same objects. All parameters are split before and after the block.
    """
    groups = list(dict.fromkeys(fsdp_groups(model)))
    rounded = [held for g in groups for held in g.fsdp_params if _is_rounded(held)]
    reduced = [g for g in groups if _is_coarser(getattr(g, "_reduce_dtype", None), getattr(g, "_orig_dtype", None))]
    if not rounded and not reduced:
        yield False
        return
    with contextlib.ExitStack() as undo:
        for g in groups:
            _split(g)
        for held in rounded:
            fields: dict[str, Any] = {"param_dtype": None, "all_gather_outputs": [], "unsharded_accumulated_grad": None}
            undo.callback(_exchange(held, fields, without=("_unsharded_param",)))
        for g in reduced:
            undo.callback(_exchange(g, {"_reduce_dtype": None}))
        for state, policy in _policies_without_rounding(model).items():
            undo.callback(_exchange(state, {"_mp_policy": policy}))
        # What was pushed last is undone first: buffers of the block are freed while they are the ones in place.
        for g in groups:
            undo.callback(_split, g)
        yield True


def _split(group: Any) -> None:
    """Let go of whole parameters, also after a pass that failed, where ``reshard`` may keep them; wait for those on their way."""
    group.wait_for_unshard()
    group._to_sharded()


def _exchange(owner: Any, fields: dict[str, Any], without: tuple[str, ...] = ()) -> Callable[[], None]:
    """Set some attributes and take others away; return what puts the old ones back."""
    named = (*fields, *without)
    before = {name: vars(owner)[name] for name in named if name in vars(owner)}

    def put_back() -> None:
        for name in named:
            vars(owner).pop(name, None)
        vars(owner).update(before)

    for name in without:
        vars(owner).pop(name, None)
    vars(owner).update(fields)
    return put_back


def _is_coarser(dtype: torch.dtype | None, than: torch.dtype | None) -> bool:
    """Whether numbers of the first kind are rounded more than those of the second; None stands for no rounding."""
    if dtype is None or than is None or not (dtype.is_floating_point and than.is_floating_point):
        return False
    return torch.finfo(dtype).eps > torch.finfo(than).eps


def _is_rounded(held: Any) -> bool:
    """Whether a policy rounds a parameter when it is gathered; one with a way of its own to be gathered is left to it.

    FSDP looks at its policy in the first pass that a parameter takes part in: of those that never did, nothing is rounded.
    """
    dtype = getattr(held, "param_dtype", None)
    return _is_coarser(dtype, held.sharded_param.dtype) and not hasattr(held._sharded_local_tensor, "fsdp_pre_all_gather")


def _policies_without_rounding(model: nn.Module) -> dict[Any, Any]:
    """Return, by what has a policy, one that casts inputs and outputs to the parameters' precision where it cast them to less.

    Inputs also where it casts none: whoever gives them in the policy's precision would have them meet wider weights.
    """
    modules: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    found = {}
    for state in dict.fromkeys(m._get_fsdp_state() for m in modules):
        # A module whose children have all its parameters casts, too.
        own = {held.sharded_param.dtype for g in _groups_of(state) or fsdp_groups(model) for held in g.fsdp_params}
        wide = min((x for x in own if x.is_floating_point), key=lambda x: torch.finfo(x).eps, default=None)
        policy, changes = state._mp_policy, {}
        if _is_coarser(policy.param_dtype, wide):
            changes = {"param_dtype": wide, "cast_forward_inputs": True}
        if _is_coarser(policy.output_dtype, wide):
            changes["output_dtype"] = wide
        found[state] = dataclasses.replace(policy, **changes)
    return found


def current_backward() -> int:
    """Return a number for the backward that is running in this thread, −1 outside of any."""
    return torch._C._current_graph_task_id()


def norms_of(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the norms of many small tensors in one go, each in its own precision."""
    return tuple(torch._foreach_norm(tensors))


def foreign_gradient_hooks(parameters: Iterable[nn.Parameter], ours: int) -> bool:
    """Whether gradients of these parameters may be changed by hooks of others; ``ours`` hooks after accumulation are ours."""
    return any(p._backward_hooks or len(p._post_accumulate_grad_hooks or ()) > ours for p in parameters)  # type: ignore[attr-defined]


def forward_hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield what runs before and after a module's forward."""
    yield from module._forward_pre_hooks.values()
    yield from module._forward_hooks.values()


def move_last(optimizer: torch.optim.Optimizer, handle: Any) -> None:
    """Put a step pre-hook behind those that were registered after it."""
    hooks = optimizer._optimizer_step_pre_hooks
    hooks[handle.id] = hooks.pop(handle.id)


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers, as it holds them: public ways walk the whole tree and make names, at every step."""
    return module._buffers


def held_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters, as it holds them: attributes are looked for in several places first, at every call."""
    return module._parameters


def own_children(module: nn.Module) -> Iterable[nn.Module | None]:
    """Return a module's children, as it holds them."""
    return module._modules.values()


def buffers_written_silently(module: nn.Module) -> bool:
    """Whether the module is a batch norm, whose kernel writes its statistics without counting the write."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


@functools.cache
def attention_body() -> Callable[..., Any]:
    """Return ``F.multi_head_attention_forward`` as it is, but for handing tensor subclasses to its parts instead of over."""
    whole = F.multi_head_attention_forward
    names = {**whole.__globals__, "has_torch_function": lambda _: False}
    body = types.FunctionType(whole.__code__, names, whole.__name__, whole.__defaults__, whole.__closure__)
    body.__kwdefaults__ = whole.__kwdefaults__
    return body


@contextlib.contextmanager
def without_attention_fast_path() -> Iterator[None]:
    """Let attention and encoder layers in eval mode call their parts, also without gradient."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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


def may_change_size(x: Tensor, dimensions: Iterable[int]) -> None:
    """Let compiled code take the sizes of these dimensions as numbers that may change, unless it must not."""
    for dimension in dimensions:
        torch._dynamo.maybe_mark_dynamic(x, dimension)


def unsafe_view(x: Tensor) -> Tensor:
    """Return another tensor object for the same memory, which autograd does not take for a view: it may be written to."""
    return torch.ops.aten._unsafe_view(x, x.shape)  # type: ignore[no-any-return]


@contextlib.contextmanager
def detached_parameters(module: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """Let a module run with parameters that get no gradient of it."""
    held = []
    for name in names:
        path, _, local = name.rpartition(".")
        owner: Any = module.get_submodule(path)
        held.append((owner, local, owner._parameters[local]))
    try:
        for owner, local, parameter in held:
            owner._parameters[local] = parameter.detach()
        yield
    finally:
        for owner, local, parameter in held:
            owner._parameters[local] = parameter


@contextlib.contextmanager
def own_cache_of_parametrizations() -> Iterator[None]:
    """Let passes in the block make parametrised weights anew, and leave none to the ``parametrize.cached()`` block around them.

    Weights that were made of other parameters, without gradient or for a look would train in their place.
    """
    before = parametrize._cache
    parametrize._cache = {}
    try:
        yield
    finally:
        parametrize._cache = before

"""Every private name of torch that we use, and what would break if it went away or changed its meaning."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

import inrun
from inrun import torch_private

SOURCE = Path(torch_private.__file__).parent


def test_versions_count_writes_through_any_view() -> None:
    """Breaks: a kept input that was overwritten before the optimizer stepped would be contracted as if it were the old one."""
    x = torch.zeros(4)
    view = x.detach()[:2]
    before = torch_private.version_of(view)
    x.add_(1)
    assert torch_private.version_of(view) == before + 1


def test_writes_that_come_back_are_not_counted() -> None:
    """Breaks: a checkpoint's buffers, put back after the rows are read, would make autograd refuse the user's graph."""
    w = nn.Parameter(torch.ones(2))
    loss = (w * w).sum()
    with torch_private.keep_version_counter(w), torch.no_grad():
        w.add_(1).sub_(1)
    loss.backward()
    assert w.grad is not None
    loss = (w * w).sum()
    with torch.no_grad():  # the control
        w.add_(1).sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Seen(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_functions_go_unseen_and_are_seen_again() -> None:
    """Breaks: what taps compute would be tapped in its turn, and what checkpoints run again for them would not."""
    x = torch.ones(2)
    with Seen() as seen:
        with torch_private.functions_unseen():
            torch.add(x, x)
            assert not seen.functions
            with torch_private.functions_seen():
                torch.mul(x, x)
        torch.sub(x, x)
    assert seen.functions == [torch.mul, torch.sub]


def test_places_of_a_graph_tell_what_gradient_they_take() -> None:
    """Breaks: rows could not be read: seeds would have another precision than the graph."""
    x = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    parts = (x * 2).unbind(1)
    found = torch_private.metadata_of(get_gradient_edge(parts[1]))
    assert (found.dtype, found.device, tuple(found.shape)) == (x.dtype, x.device, (2,))


def test_views_of_the_same_memory_are_known() -> None:
    """Breaks: a view of the model's input would not count as its input, and the row check would believe the outputs alone."""
    x = torch.ones(4, 2)
    assert torch_private.storage_of(x.view(2, 4)[1:]) == torch_private.storage_of(x)
    assert torch_private.storage_of(x.clone()) != torch_private.storage_of(x)


def test_packing_is_seen_by_its_function() -> None:
    """Breaks: rows of packed sequences would be taken to lie alike in all steps."""
    with Seen() as seen:
        nn.utils.rnn.pack_padded_sequence(torch.ones(2, 3, 1), torch.tensor([3, 2]), batch_first=True)
    assert torch_private.pack_padded_sequence in seen.functions


def test_selective_checkpoints_run_again_under_a_mode_with_a_storage() -> None:
    """Breaks: reading rows would use up what a selective checkpoint keeps, and the user's backward would fail."""
    keep = torch.utils.checkpoint.create_selective_checkpoint_contexts
    _, again = keep(lambda *args, **kwargs: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE)
    assert type(again) is torch_private.CACHED_MODE and isinstance(again.storage, dict)


def test_trees_that_others_registered_are_opened() -> None:
    """Breaks: outputs of a split module inside a registered class would not tell when its backward begins."""
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2)
    leaves = torch_private.tree_leaves({"a": [x], "b": BaseModelOutput(last_hidden_state=x)})
    assert sum(leaf is x for leaf in leaves) == 2


def test_more_variants_may_be_compiled() -> None:
    """Breaks: later conditions of a benchmark would run eagerly, and be timed as if they were compiled."""
    before = torch._dynamo.config.recompile_limit
    try:
        torch_private.allow_graphs(before + 5)
        assert torch._dynamo.config.recompile_limit == before + 5
        torch_private.allow_graphs(1)
        assert torch._dynamo.config.recompile_limit == before + 5
    finally:
        torch._dynamo.config.recompile_limit = before


def test_compiled_modules_are_known() -> None:
    """Breaks: nobody would be told that a compiled model runs eagerly inside scored steps."""
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))
    module.compile()
    assert torch_private.is_compiled(module)


def test_the_module_inside_a_compiled_one_is_found() -> None:
    """Breaks: parameters of a compiled model would have other names."""
    module = nn.Linear(2, 2)
    assert torch_private.uncompiled(torch.compile(module)) is module
    assert torch_private.uncompiled(module) is module


def test_the_same_memory_may_be_written_to_as_if_it_were_no_view() -> None:
    """Breaks: an in-place activation behind a tapped function would fail."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch_private.unsafe_view(x, list(x.shape))

        @staticmethod
        def backward(ctx, b):
            return b

    x = torch.ones(2, requires_grad=True)
    Same.apply(x * 2).relu_().sum().backward()
    assert x.grad is not None


def test_split_parameters_are_known_with_what_stands_for_them(tmp_path: Path) -> None:
    """Breaks: a model that fully_shard was applied to could not be scored, and a rank that died would have no name."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 3), reshard_after_forward=False)
        found = torch_private.fsdp_parameters(model)
        assert list(found) == list(model.parameters())
        model(torch.ones(1, 2))
        assert found[next(iter(found))]() is model.weight
        assert [g.reduce_grads for g in torch_private.fsdp_groups(model)] == [True]
        torch_private.default_store().set("key", "value")
        assert torch_private.default_store().check(["key"])
    finally:
        torch.distributed.destroy_process_group()
    assert torch_private.fsdp_parameters(nn.Linear(2, 3)) == {}


def test_operations_can_be_watched() -> None:
    """Breaks: the truth would not know whether a model draws random numbers, and would take the slow way for all of them."""
    seen = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.rand(2)
    assert any("rand" in name for name in seen)


def test_nobody_else_uses_private_names_of_torch() -> None:
    """Attributes with an underscore on torch's own modules and tensors stand in one file."""
    ours = {"_register", "_run_one"}
    hooks = {"_backward_hooks", "_post_accumulate_grad_hooks"}
    of_tensors = hooks | {"_version", "_parameters", "_buffers", "_input_metadata", "_cdata"}
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.name == "torch_private.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                names = [*node.module.split("."), *(alias.name for alias in node.names)]
                found += [f"{path.name}: {name}" for name in names if name.startswith("_")]
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = node.value
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                documented = node.attr in ours or node.attr.startswith("_foreach_")  # torch's manual lists foreach operations
                if isinstance(owner, ast.Name) and owner.id == "torch" and not documented:
                    found.append(f"{path.name}: {ast.unparse(node)}")
                if node.attr in of_tensors:
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert not found
    assert inrun.__version__

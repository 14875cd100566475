"""Every private name of torch that we use, and what would break if it went away or changed its meaning."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import inrun
from inrun import torch_private

SOURCE = Path(torch_private.__file__).parent


def test_trees_that_others_registered_are_opened() -> None:
    """Breaks: batches inside outputs of transformers would be leaves, and rows could not be verified."""
    from transformers.modeling_outputs import BaseModelOutput

    x = torch.ones(2)
    leaves, structure = torch_private.flatten_tree({"a": [x], "b": BaseModelOutput(last_hidden_state=x)})
    assert sum(leaf is x for leaf in leaves) == 2
    assert torch_private.unflatten_tree(leaves, structure)["b"].last_hidden_state is x


def test_versions_count_writes_through_any_view() -> None:
    """Breaks: a kept input that was overwritten before the optimizer stepped would be contracted as if it were the old one."""
    x = torch.zeros(4)
    view = x.detach()[:2]
    before = torch_private.version_of(view)
    x.add_(1)
    assert torch_private.version_of(view) == before + 1


def test_writes_that_come_back_are_not_counted() -> None:
    """Breaks: weights shifted to the middle of a move would make autograd refuse the user's graph."""
    w = nn.Parameter(torch.ones(2))
    loss = (w * w).sum()
    with torch_private.keep_version_counters([w]), torch.no_grad():
        w.add_(1).sub_(1)
    loss.backward()
    with torch.no_grad():  # the control
        loss = (w * w).sum()
    assert w.grad is not None


def test_passes_have_parametrised_weights_of_their_own() -> None:
    """Breaks: inside ``parametrize.cached()`` training would go on with a weight that a look or a validation pass has made."""
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with torch.nn.utils.parametrize.cached():
        with torch_private.own_cache_of_parametrizations(), torch.no_grad():
            other = layer.weight
            assert layer.weight is other
        mine = layer.weight
        assert mine is not other
        assert mine.requires_grad
        with torch_private.own_cache_of_parametrizations():
            assert layer.weight is not mine
        assert layer.weight is mine


def test_backwards_can_be_told_apart() -> None:
    """Breaks: a weight scored in one backward and missed in the next would pass the coverage check."""
    seen = []
    w = nn.Parameter(torch.ones(2))
    w.register_hook(lambda g: seen.append(torch_private.current_backward()))
    for _ in range(2):
        (w * 2).sum().backward()
    assert len(set(seen)) == 2
    assert -1 not in seen
    assert torch_private.current_backward() == -1


def test_hooks_of_others_are_seen() -> None:
    """Breaks: a hook that clips a gradient on its way would go unnoticed on steps that are not audited."""
    w = nn.Parameter(torch.ones(2))
    assert not torch_private.foreign_gradient_hooks([w], ours=0)
    handle = w.register_post_accumulate_grad_hook(lambda p: None)
    assert torch_private.foreign_gradient_hooks([w], ours=0)
    assert not torch_private.foreign_gradient_hooks([w], ours=1)
    handle.remove()
    w.register_hook(lambda g: g)
    assert torch_private.foreign_gradient_hooks([w], ours=1)


def test_hooks_around_a_forward_are_found() -> None:
    """Breaks: what hooks collect in an extra forward would stay collected, and losses made of it would change."""
    module = nn.Linear(2, 2)
    assert not list(torch_private.forward_hooks(module))
    hooks = [lambda *_: None, lambda *_: None]
    module.register_forward_hook(hooks[1])
    module.register_forward_pre_hook(hooks[0])
    assert list(torch_private.forward_hooks(module)) == hooks


def test_a_step_hook_can_go_last() -> None:
    """Breaks: clipping by a hook that was registered after ours would not be in the scores."""
    order: list[str] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    ours = optimizer.register_step_pre_hook(lambda *_: order.append("ours"))
    optimizer.register_step_pre_hook(lambda *_: order.append("other"))
    torch_private.move_last(optimizer, ours)
    optimizer.step()
    assert order == ["other", "ours"]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(2), nn.SyncBatchNorm(2)])
def test_batch_norms_are_known(norm: nn.Module) -> None:
    """Breaks: rows that batch norm couples would be refused, and nobody would be warned of what the scores mean."""
    assert torch_private.buffers_written_silently(norm)
    assert not torch_private.buffers_written_silently(nn.LayerNorm(2))


def test_compiled_modules_are_known() -> None:
    """Breaks: a compiled model would be attached to, and its scores would be missing."""
    module = nn.Linear(2, 2)
    assert not torch_private.is_compiled(module)
    assert torch_private.is_compiled(torch.compile(module))
    module.compile()
    assert torch_private.is_compiled(module)


def test_the_module_inside_a_compiled_one_is_found() -> None:
    """Breaks: modules of a compiled model would be observed under other names, and its class could not be changed."""
    module = nn.Linear(2, 2)
    assert torch_private.uncompiled(torch.compile(module)) is module
    assert torch_private.uncompiled(module) is module


def test_code_that_runs_for_a_compiler_knows_it() -> None:
    """Breaks: a model that is compiled after the accountant was made would run without probes, and the step would fail."""
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(callable(torch_private.compiler_here()))
        return x

    outside = torch.compiler.disable(note, recursive=False)
    torch.compile(lambda x: outside(x + 1), backend="eager")(torch.ones(2))
    outside(torch.ones(2))
    assert seen == [True, False]


def test_sizes_that_may_change_do_not_compile_again() -> None:
    """Breaks: every new number of samples would compile the model again."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    double = torch.compile(lambda x: x * 2, backend=count)
    for n in (3, 4, 5):
        x = torch.ones(n, 2)
        torch_private.may_change_size(x, (0,))
        double(x)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_the_same_memory_may_be_written_to_as_if_it_were_no_view() -> None:
    """Breaks: an in-place activation behind an observed layer would fail in compiled code."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch_private.unsafe_view(x)

        @staticmethod
        def backward(ctx, b):
            return b

    x = torch.ones(2, requires_grad=True)
    Same.apply(x * 2).relu_().sum().backward()
    assert x.grad is not None


def test_the_end_of_a_backward_comes_after_what_others_queued() -> None:
    """Breaks: gradients would be measured before DDP has averaged them, and every clip factor would be wrong."""
    said = []
    engine = torch.autograd.Variable._execution_engine
    w = nn.Parameter(torch.ones(2))

    def hook(_: torch.Tensor) -> None:
        torch_private.at_end_of_backward(lambda: said.append("ours"))
        engine.queue_callback(lambda: said.append("theirs"))

    w.register_hook(hook)
    (w * 2).sum().backward()
    assert said == ["theirs", "ours"]


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
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 3))
        rounds = torch_private.rounds_gradients(wrapped)
        assert not rounds()
        wrapped.register_comm_hook(None, lambda state, bucket: None)
        assert rounds()
        torch_private.default_store().set("key", "value")
        assert torch_private.default_store().check(["key"])
    finally:
        torch.distributed.destroy_process_group()
    assert torch_private.fsdp_parameters(nn.Linear(2, 3)) == {}


@pytest.fixture
def alone(tmp_path: Path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Watched(nn.Linear):
    """Notes in which precision it is called and gives gradients, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[torch.dtype] = []
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.seen += [x.dtype, self.weight.dtype, out.dtype]
        if self.fails:
            raise ZeroDivisionError
        return out


def rounding(again: bool = False, outer: bool = True, **options) -> nn.Sequential:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(Watched(), nn.Sequential(Watched()))
    policy = MixedPrecisionPolicy(**({"param_dtype": torch.bfloat16} | options))
    fully_shard(model[1], mp_policy=policy, reshard_after_forward=again)
    return fully_shard(model, mp_policy=policy, reshard_after_forward=again) if outer else model


def what_fsdp_keeps(model: nn.Module) -> list[object]:
    """By identity: policies, dtypes, buffers, parameters that stand for split ones."""
    groups = torch_private.fsdp_groups(model)
    kept: list[object] = [m._get_fsdp_state()._mp_policy for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    for g in groups:
        kept += [g._reduce_dtype, g._sharded_state]
        for held in g.fsdp_params:
            kept += [held.param_dtype, held._unsharded_param, held._unsharded_param.grad, held.unsharded_accumulated_grad]
            kept += [*held.all_gather_outputs, held.all_gather_outputs[0].untyped_storage().size()]
    return kept + list(model.parameters())


def weights_after_a_step(model: nn.Module) -> list[torch.Tensor]:
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        return [p.sub_(p.grad, alpha=0.1).full_tensor() for p in model.parameters()]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("inputs", [True, False])
def test_passes_run_in_the_precision_of_the_parameters_and_leave_no_trace(again: bool, inputs: bool) -> None:
    """Breaks: second under a bfloat16 policy would take differences of rounding."""
    half, single = torch.bfloat16, torch.float32
    model, twin = (rounding(again, reduce_dtype=single, output_dtype=half, cast_forward_inputs=inputs) for _ in range(2))
    x = torch.ones(2, 3, dtype=half)
    model(x).sum().backward()
    twin(x).sum().backward()
    model[0].seen.clear(), model[1][0].seen.clear()

    model.reshard(), model[1].reshard()
    before = what_fsdp_keeps(model)
    with torch_private.fsdp_in_own_precision(model) as rounds_else:
        assert rounds_else
        out = model(x)
        assert out.dtype == single
        out.sum().backward()
    assert set(model[0].seen + model[1][0].seen) == {single}
    after = what_fsdp_keeps(model)
    assert all(a is b or a == b for a, b in zip(after, before, strict=True) if not isinstance(a, torch.Tensor))
    assert all(a is b for a, b in zip(after, before, strict=True) if isinstance(a, torch.Tensor))
    # The control: outside of the block the policy holds, and what is trained is what the twin trains.
    assert model(x).dtype == half and model[0].weight.dtype == (single if again else half)
    if inputs:
        model.reshard(), model[1].reshard()
        model.zero_grad(), twin.zero_grad()
        assert all(map(torch.equal, weights_after_a_step(model), weights_after_a_step(twin)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("again", [True, False])
def test_passes_that_fail_in_the_precision_of_the_parameters_leave_no_trace(again: bool) -> None:
    model = rounding(again)
    model(torch.ones(2, 3)).sum().backward()
    model.reshard(), model[1].reshard()
    before = what_fsdp_keeps(model)
    model[1][0].fails = True
    with pytest.raises(ZeroDivisionError), torch_private.fsdp_in_own_precision(model):
        model(torch.ones(2, 3))
    after = what_fsdp_keeps(model)
    assert all(a is b if isinstance(a, torch.Tensor) else a == b for a, b in zip(after, before, strict=True))


@pytest.mark.usefixtures("alone")
def test_gradients_that_wait_to_be_reduced_wait_on() -> None:
    """Of microbatches without synchronisation: they are no part of what passes beside them find."""
    for reduce_dtype in (None, torch.float32):
        model = rounding(reduce_dtype=reduce_dtype)
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 3)).sum().backward()
        held = [x for g in torch_private.fsdp_groups(model) for x in g.fsdp_params]

        def waiting(held=held) -> list[torch.Tensor]:
            return [x._unsharded_param.grad if x.unsharded_accumulated_grad is None else x.unsharded_accumulated_grad for x in held]

        before = waiting()
        copies = [x.clone() for x in before]
        model.set_requires_gradient_sync(True)
        with torch_private.fsdp_in_own_precision(model):
            model(torch.zeros(1, 3)).sum().backward()
        assert all(a is b for a, b in zip(waiting(), before, strict=True)) and all(map(torch.equal, before, copies))


@pytest.mark.usefixtures("alone")
def test_only_rounding_is_taken_away() -> None:
    """A policy that gathers as the parameters are has nothing to change; one that only reduces in less has, and an idle one."""
    plain, wider = rounding(param_dtype=None), rounding(param_dtype=torch.float64)
    for model in (plain, wider):
        model(torch.ones(1, 3))
        with torch_private.fsdp_in_own_precision(model) as rounds_else:
            assert not rounds_else
    model = rounding(param_dtype=None, reduce_dtype=torch.bfloat16)
    third, gradients = torch.full((1, 3), 1 / 3), []
    for around in (torch_private.fsdp_in_own_precision, lambda _: contextlib.nullcontext()):
        model(third).sum().backward()
        model.zero_grad()
        with around(model):
            model(third).sum().backward()
        gradients.append(model[0].weight.grad.full_tensor().clone())
    assert not torch.equal(gradients[0].bfloat16().float(), gradients[0])
    assert torch.equal(gradients[1].bfloat16().float(), gradients[1])
    never_called = rounding(outer=False)
    with torch_private.fsdp_in_own_precision(never_called) as rounds_else:
        assert not rounds_else


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


def test_forward_mode_stops_where_gradients_do() -> None:
    """Breaks: in a module without a rule, what is computed without gradient would count in the scores of its parameters."""

    def divided(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            size = w.norm()
        return w / size

    w = torch.tensor([3.0, 4.0])
    with torch.no_grad(), torch_private.no_grad_in_forward_mode():
        assert torch.equal(torch.func.jvp(divided, (w,), (w,))[1], w / 5)
    assert torch.equal(torch.func.jvp(divided, (w,), (w,))[1], torch.zeros(2))  # the control


def test_modules_run_with_detached_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weight, x = model[0].weight, torch.ones(1, 2, requires_grad=True)
    with pytest.raises(ZeroDivisionError), torch_private.detached_parameters(model, ("0.weight", "1.bias")):
        assert not model[0].weight.requires_grad and model[0].weight.data_ptr() == weight.data_ptr()
        model(x).sum().backward()
        _ = 1 / 0
    assert model[0].weight is weight and dict(model.named_parameters())["0.weight"] is weight
    assert weight.grad is None and model[1].bias.grad is None and model[1].weight.grad is not None and x.grad is not None


def test_nobody_else_uses_private_names_of_torch() -> None:
    """Attributes with an underscore on torch's own modules and tensors stand in one file."""
    ours = {"_register", "_run_one"}
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
                if node.attr in ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_parameters", "_buffers"):
                    found.append(f"{path.name}: {ast.unparse(node)}")
    assert not found
    assert inrun.__version__


def test_attention_hands_its_weights_to_its_parts() -> None:
    """Breaks: attention's projections could not be seen as products, and attention would go through the fallback."""
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            plain = [x.as_subclass(torch.Tensor) if isinstance(x, Watched) else x for x in args]
            return func(*plain, **(kwargs or {}))

    layer = nn.MultiheadAttention(4, 2)
    x = torch.randn(3, 2, 4)
    weights = [layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0, layer.out_proj.weight, layer.out_proj.bias]
    expected = torch.nn.functional.multi_head_attention_forward(x, x, x, 4, 2, *weights)[0]
    watched = [w.detach().as_subclass(Watched) if isinstance(w, torch.Tensor) else w for w in weights]
    out = torch_private.attention_body()(x, x, x, 4, 2, *watched)[0]
    assert seen.count(torch.nn.functional.linear) == 2
    assert torch.equal(out, expected)


def test_encoders_call_their_parts_without_the_fast_path() -> None:
    """Breaks: rows of a model that trains in eval mode could not be looked at without gradient."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True).eval()
    seen = []
    layer.linear1.register_forward_pre_hook(lambda *_: seen.append("hook"))
    called = []
    layer.linear1.forward = lambda x, inner=layer.linear1.forward: (called.append(1), inner(x))[1]
    before = torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad(), torch_private.without_attention_fast_path():
        layer(torch.randn(2, 3, 4))
    assert called
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_a_backward_tells_that_it_has_ended() -> None:
    """Breaks: gradients would be measured one by one in hooks, or after clipping, whose factor would then go unseen."""
    told: list[str] = []
    w, u = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    w.register_post_accumulate_grad_hook(lambda _: torch_private.at_end_of_backward(lambda: told.append("end")))
    for p in (w, u):
        p.register_post_accumulate_grad_hook(lambda _: told.append("arrived"))
    (w * u).sum().backward()
    assert told == ["arrived", "arrived", "end"]


def test_many_small_tensors_in_one_go() -> None:
    """Breaks: norms of small gradients would cost more calls than arithmetic."""
    tensors = [torch.randn(3, 2, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), torch.full((4,), 2.0).double()]
    norms = torch_private.norms_of(tensors)
    torch.testing.assert_close(torch.stack(norms), torch.stack([torch.linalg.vector_norm(x) for x in tensors]))


def test_what_a_module_holds() -> None:
    """Breaks: every validation pass would walk the tree of modules by name, several times."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
    assert list(torch_private.own_children(module)) == list(module.children())
    assert dict(torch_private.own_buffers(module[0])) == dict(module[0].named_buffers())
    assert dict(torch_private.held_parameters(module[0])) == dict(module[0].named_parameters())


def test_modes_do_not_see_what_is_ours() -> None:
    """Breaks: selective checkpoints would keep our probes, and find others when they recompute."""
    seen = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with torch_private.unseen_by_modes():
            torch.zeros(2)
        assert not seen
        torch.zeros(2)  # the control
        assert seen


def test_what_passes_as_it_is_counts_no_write_where_a_mode_runs() -> None:
    """Breaks: selective checkpoints would take a kept result for one that was written to."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True) * 2
    with Mode():
        assert torch_private.apply_as_it_is(Same, x, x) is x
    assert torch_private.version_of(x) == 0
    torch_private.apply_as_it_is(Same, x, x)  # the control
    assert torch_private.version_of(x) == 1


def test_leaves_behind_tensors_are_found() -> None:
    """Breaks: a parameter that is used where no operation tells of it would be refused with a cause that is not the true one."""
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    assert torch_private.leaves_behind([(a * 2).sum(), (a + b.exp()), c.detach()]) == {a, b}


def test_selective_checkpoints_can_be_made_to_keep_nothing() -> None:
    """Breaks: validation passes could not be differentiated for several points, nor twice, where a model keeps products."""
    w, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    keep = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def run() -> torch.Tensor:
        every = lambda *args, **kwargs: torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE  # noqa: E731
        out = torch.utils.checkpoint.checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False, context_fn=lambda: keep(every))
        return out.sum()

    with torch_private.checkpoints_keep_nothing():
        loss = run()
    for _ in range(2):
        torch.autograd.grad(loss, w, retain_graph=True)
    loss = run()  # the control
    torch.autograd.grad(loss, w, retain_graph=True)
    with pytest.raises(RuntimeError, match="an extra time"):
        torch.autograd.grad(loss, w, retain_graph=True)

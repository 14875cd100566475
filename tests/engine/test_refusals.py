"""What cannot be scored is named, with what to do instead; and bad input changes nothing."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import inrun
from inrun.engine import Accountant
from inrun.engine.options import Options
from inrun.errors import (
    ConfigurationError,
    ConservationError,
    CoverageError,
    CreditError,
    IdsError,
    InrunError,
    LedgerError,
    OptimizerError,
    StepError,
    ValidationError,
)
from loops import METHODS, adamw, attach, distance, held_out, losses, perceptron, points, run_step, sgd, train

EVERY = pytest.mark.parametrize("method", METHODS)


def loss(model: nn.Module, seed: int = 0) -> Tensor:
    return losses(model, points(4, seed)).mean()


# Arguments


def plain_name(value: Any) -> str:
    """Return a test's name without addresses, which differ between workers."""
    return value.__name__ if isinstance(value, type) else re.sub(r"<(\w+)[^>]*>", r"\1", str(value))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "third"}, ConfigurationError, "third.*whole.*second"),
        ({"method": "midpoint"}, ConfigurationError, "midpoint"),
        ({"sketch": 0}, ConfigurationError, "sketch is 0"),
        ({"sketch": "small"}, ConfigurationError, '"exact"'),
        ({"audit_every": -1}, ConfigurationError, "audit_every"),
        ({"audit_every": True}, ConfigurationError, "audit_every"),
        ({"check_rows": 1}, ConfigurationError, "check_rows is 1"),
        ({"bitwise": None}, ConfigurationError, "bitwise is None"),
        ({"validation": {}}, ConfigurationError, "empty"),
        ({"validation": {"a": 3}}, ConfigurationError, "'a'.*callable"),
        ({"validation": {"a#1": held_out}}, ConfigurationError, "folds and points"),
        ({"ledger": 3}, LedgerError, "folder"),
        ({"ledger": object()}, LedgerError, "write"),
        ({"optimizer": "adam"}, ConfigurationError, "str"),
        ({"optimizer": []}, ConfigurationError, "empty"),
        ({"model": "gpt"}, ConfigurationError, "Module"),
        ({"parameters": ["c.*"]}, CoverageError, "a.weight"),
    ],
    ids=plain_name,
)
def test_arguments(options: dict[str, Any], error: type, words: str) -> None:
    model = perceptron()
    given = {"model": model, "optimizer": sgd(model), "validation": held_out} | options
    with pytest.raises(error, match=words):
        Accountant(**given)
    Accountant(model, sgd(model), held_out).close()  # and nothing was left behind


@pytest.mark.parametrize("options", [{"validation_mode": "test"}, {"about": 3}])
def test_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Options(**options)


def wrapped(name: str, module: str) -> Callable[[nn.Module], Any]:
    kind = type(name, (nn.Module,), {"__module__": module})

    def make(model: nn.Module) -> nn.Module:
        found = kind()
        found.inner = model
        return found

    return make


class SameMemory(nn.Module):
    """Two parameters that are columns of one tensor: the same ones, or others."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        both = torch.randn(3, 8, dtype=torch.float64)
        self.a, self.b = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:] if apart else both[:, :4])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a) + torch.tanh(F.linear(x, self.b))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(4, 3, device="meta"), "weight is on the meta device.*weights are loaded"),
        (lambda: nn.Linear(4, 3, dtype=torch.complex64), "weight is complex.*view_as_complex"),
        (lambda: SameMemory(apart=False), "b and a are two parameters in the same memory"),
    ],
)
def test_parameters_that_cannot_be_scored(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        attach(make())
    attach(SameMemory(apart=True)).close()  # the control


def marked(name: str, value: Any) -> Callable[[nn.Module], nn.Module]:
    def make(model: Any) -> nn.Module:
        setattr(model.a.weight, name, value)
        return model

    return make


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (nn.DataParallel, "DataParallel.*DistributedDataParallel"),
        (wrapped("FullyShardedDataParallel", "torch.distributed.fsdp"), "fully_shard"),
        (wrapped("DeepSpeedEngine", "deepspeed.runtime.engine"), "DeepSpeedEngine"),
        (wrapped("PipelineStage", "torch.distributed.pipelining.stage"), "PipelineStage"),
        (marked("placements", ("Shard(dim=0)",)), r"a.weight is a DTensor \(Shard\(dim=0\)\)"),
        (marked("ds_id", 3), "ZeRO-3"),
    ],
)
def test_models_that_are_split_or_wrapped_otherwise(make: Callable[[nn.Module], Any], words: str) -> None:
    model = make(perceptron())
    with pytest.raises(ConfigurationError, match=words):
        Accountant(model, sgd(model), held_out)


class Mine(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-0.1)


class Twisted(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("make", [lambda p: Mine(p), lambda p: Twisted(p, lr=0.1)], ids=["Mine", "Twisted"])
def test_whole_credit_needs_a_known_memory(make: Callable[[Any], Any]) -> None:
    model = perceptron()
    with pytest.raises(OptimizerError, match='(Mine|Twisted).*method="step"'):
        attach(model, make(model.parameters()))
    for method in ("step", "first", "second"):
        model = perceptron()
        assert train(attach(model, make(model.parameters()), method=method), range(1))[0].abs().min() > 0


def test_wrappers_of_optimizers_are_taken_off() -> None:
    model = perceptron()
    inner = sgd(model)
    outer = type("AcceleratedOptimizer", (torch.optim.SGD,), {"__module__": "accelerate.optimizer"})(model.parameters(), lr=0.1)
    outer.optimizer = inner
    assert attach(model, outer).optimizers == [inner]


def test_an_optimizer_of_another_model_and_a_second_accountant() -> None:
    model = perceptron()
    with pytest.raises(CoverageError, match="no trainable parameter of the model is in the optimizer"):
        attach(model, sgd(perceptron()))
    accountant = attach(model)
    with pytest.raises(ConfigurationError, match="already has an accountant"):
        attach(model)
    accountant.close()
    attach(model).close()


@pytest.mark.parametrize("option", ["scale_grad_by_freq", "sparse"])
def test_embeddings_with_another_gradient(option: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, **{option: True}), nn.Flatten(), nn.Linear(8, 3)).double()
    tokens = torch.randint(0, 5, (3, 2))
    accountant = attach(model, validation=lambda m: m(tokens).square().mean(), method="first")
    with pytest.raises(InrunError, match=rf"0\.weight.*{option}"):
        run_step(accountant, lambda: model(tokens).square().mean(), range(3))


def test_gradient_through_a_custom_autograd_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x * w**3

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            x, w = ctx.saved_tensors
            return g * w**3, (g * x * 3 * w**2).sum(0)

    class Cubed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.w = nn.Linear(4, 3), nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(self.a(x), self.w)

    value = lambda m: losses(m, points(3, 9)).mean()  # noqa: E731
    model = Cubed().double()
    with pytest.raises(CoverageError, match=r"w received gradient.*parameters="):
        run_step(attach(model, validation=value, method="first"), lambda: losses(model, points(3, 0)).mean(), range(3))
    model = Cubed().double()  # the way out
    accountant = attach(model, validation=value, method="first", parameters=["a.*"])
    run_step(accountant, lambda: losses(model, points(3, 0)).mean(), range(3))


# Ids and validation


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", "b"], "integers"),
        ([0.5, 1.5], "float"),
        ([True, False], "bool"),
        ([[[0, 1], [2, 3]]], r"shape \[n\]"),
        ("ab", "str"),
        (3, "int"),
        (torch.zeros(3), "float32"),
        (object(), "object"),
        ([2**70, 1], "64 bits"),
        ([2**63, 1], "64"),
        (torch.tensor([2**63, 1], dtype=torch.uint64), "64"),
    ],
    ids=plain_name,
)
def test_ids(ids: Any, words: str) -> None:
    with pytest.raises(IdsError, match=words):
        attach(perceptron()).step(ids)


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        (lambda m: 3.0, "float"),
        (lambda m: torch.zeros(2, 2), r"\(2, 2\)"),
        (lambda m: torch.zeros(0), r"\(0,\)"),
        (lambda m: torch.tensor(3), "int64"),
        (lambda m: held_out(m).detach(), "without gradient"),
        (lambda m: held_out(perceptron()), "depends on no scored parameter"),
    ],
)
def test_what_a_validation_callable_returns(validation: Any, words: str) -> None:
    model = perceptron()
    accountant = attach(model, validation={"good": held_out, "mine": validation}, method="first")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValidationError, match=f"'mine'.*{words}"), accountant.step([0]):
        pass
    assert accountant.open_step is None and all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("method", "scored"), [("first", {0, 2}), ("whole", {0, 1, 2})])  # momentum of step 1 moves step 2
def test_a_validation_loss_that_is_not_finite_is_told(method: str, scored: set[int]) -> None:
    model = perceptron()
    accountant = attach(
        model, validation=lambda m: held_out(m) * (float("nan") if accountant.steps_done == 1 else 1.0), method=method
    )
    train(accountant, range(2))
    assert "not finite" in accountant.last.skipped
    train(accountant, range(2, 3))
    accountant.close()
    assert {i // 100 for i in accountant.scores()["sample_id"].to_pylist()} == scored


def once(m: Any) -> Tensor:
    """A loss that torch differentiates once only."""
    scores = m(points(4, 9)).unsqueeze(1).log_softmax(-1)
    return F.ctc_loss(scores, torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]))


def test_the_second_order_needs_a_loss_with_a_second_derivative() -> None:
    accountant = attach(perceptron(), validation=once, method="second")
    with pytest.raises(ValidationError, match='differentiated twice.*method="first"'):
        train(accountant, range(1))
    train(attach(perceptron(), validation=once, method="first"), range(1))


def test_whole_credit_needs_as_many_validation_points_at_every_step() -> None:
    def some(model: Any, step: int) -> Tensor:
        return losses(model, points(2 + step, 9))

    with pytest.raises(ValidationError, match="number of points"):
        train(attach(perceptron(), validation=some), range(2))
    accountant = attach(perceptron(), validation=some, method="first")
    assert [x.shape[1] for x in train(accountant, range(3))] == [2, 3, 4]


# The order of things in a step


def step_twice(model: nn.Module, optimizer: Any, step: Any) -> None:
    loss(model).backward()
    optimizer.step()
    optimizer.step()


def no_step(model: nn.Module, optimizer: Any, step: Any) -> None:
    loss(model).backward()


def ids_again(model: nn.Module, optimizer: Any, step: Any) -> None:
    with step.microbatch(range(4)):
        pass


def inside_backward(model: Any, optimizer: Any, step: Any) -> None:
    handle = model.a.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    try:
        loss(model).backward()
    finally:
        handle.remove()


def some_inputs(model: nn.Module, optimizer: Any, step: Any) -> None:
    loss(model).backward(inputs=list(model.parameters()))
    optimizer.step()


def only_grad(model: nn.Module, optimizer: Any, step: Any) -> None:
    for p, g in zip(model.parameters(), torch.autograd.grad(loss(model), list(model.parameters())), strict=True):
        p.grad = g
    optimizer.step()


def gradient_penalty(model: nn.Module, optimizer: Any, step: Any) -> None:
    x = points(4, 0).requires_grad_()
    each = losses(model, x)
    (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
    (each + slope.square().sum(1)).mean().backward()


def late_skip(model: nn.Module, optimizer: Any, step: Any) -> None:
    loss(model).backward()
    optimizer.step()
    step.skip()


STEPS = {
    "twice": (step_twice, StepError, "twice"),
    "no step": (no_step, StepError, r"without optimizer\.step"),
    "ids again": (ids_again, StepError, "given its ids"),
    "inside the backward": (inside_backward, StepError, "inside the backward"),
    "backward(inputs=)": (some_inputs, StepError, "inputs"),
    "autograd.grad alone": (only_grad, CoverageError, "received gradient"),
    "gradient penalty": (gradient_penalty, StepError, "create_graph"),
    "skip after the step": (late_skip, StepError, "has had its effect"),
}


@pytest.mark.parametrize("method", ["whole", "first"])
@pytest.mark.parametrize("name", STEPS)
def test_steps_in_another_order(name: str, method: str) -> None:
    run, error, words = STEPS[name]
    model = perceptron()
    accountant = attach(model, **METHODS[method])
    (optimizer,) = accountant.optimizers
    with pytest.raises(error, match=words), accountant.step(range(4)) as step:
        run(model, optimizer, step)
    assert accountant.open_step is None
    optimizer.zero_grad()
    train(accountant, range(1))  # and the next step is scored


def test_steps_without_microbatches_and_with_failed_ones() -> None:
    model = perceptron()
    accountant = attach(model)
    with pytest.raises(StepError, match="open already"), accountant.step([0]), accountant.step([0]):
        pass
    assert accountant.open_step is None
    with pytest.raises(StepError, match="no microbatch"), accountant.step():
        pass
    with pytest.raises(StepError, match="microbatch of this step failed"), accountant.step() as step:
        with contextlib.suppress(KeyError), step.microbatch([9]):
            loss(model, 1).backward()
            raise KeyError
        with step.microbatch(range(4)):
            loss(model).backward()
        accountant.optimizers[0].step()
    assert accountant.steps_done == 0


@EVERY
def test_gradient_of_an_earlier_step_and_of_a_forward_outside(method: str) -> None:
    model = perceptron()
    accountant = attach(model, **METHODS[method])
    with pytest.raises(KeyError), accountant.step(range(4)):
        late = loss(model, 1)
        raise KeyError
    with pytest.raises(StepError, match=r"linear\(b.weight, b.bias\) of an earlier step"), accountant.step(range(4)):
        (loss(model) + late).backward()
    model.zero_grad()
    outside = loss(model, 2)
    with pytest.raises(CoverageError, match="a.weight, a.bias"), accountant.step(range(4)):
        outside.backward()
        accountant.optimizers[0].step()
    model.zero_grad()
    with pytest.raises(KeyError), accountant.step(range(4)):
        late = loss(model, 1)
        raise KeyError
    late.backward()  # between steps it is the loop's own
    want = torch.autograd.grad(loss(model, 1), list(model.parameters()))
    assert distance([p.grad for p in model.parameters()], want) < 1e-9


@EVERY
def test_several_backwards_saliency_and_a_forward_for_nothing(method: str) -> None:
    """One loss in two parts, by two backwards of one forward or of two; what ``torch.autograd.grad`` takes trains nothing."""
    x, other = points(4, 0, dtype=torch.float32), points(4, 9, dtype=torch.float32)

    def whole(model: Any) -> None:
        losses(model, x).mean().backward()

    def parts(model: Any) -> None:
        for _ in range(2):
            (losses(model, x).mean() / 2).backward()

    def retained(model: Any) -> None:
        model(other)
        part = losses(model, x).mean() / 4
        torch.autograd.grad(part, [model.a.weight], retain_graph=True)
        part.backward(retain_graph=True)
        (3 * part).backward()

    found = []
    for backwards in (whole, parts, retained):
        model = perceptron(torch.float32)
        accountant = attach(model, audit_every=1, **METHODS[method])
        with accountant.step(range(4)):
            backwards(model)
            accountant.optimizers[0].step()
        found.append(accountant.last.contributions["validation"])
    assert distance(found[1:], [found[0]] * 2) < 1e-5
    assert distance(found[1], found[0].roll(1)) > 1e-2  # the control


# Which parameters an optimizer has


@pytest.mark.parametrize("when", ["between", "inside"])
def test_parameters_that_are_unfrozen_or_added_later(when: str) -> None:
    model = perceptron()
    model.a.weight.requires_grad_(False)
    accountant = attach(model)
    model.a.weight.requires_grad_(when == "between")
    with pytest.raises(OptimizerError, match=r"a\.weight got gradient.*make a new one"), accountant.step(range(4)):
        model.a.weight.requires_grad_(True)
        loss(model).backward()
        accountant.optimizers[0].step()


def test_parameters_that_change_their_group() -> None:
    model = perceptron()
    groups = [{"params": [*model.a.parameters()], "lr": 0.1}, {"params": [*model.b.parameters()], "lr": 0.001}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    accountant = attach(model, optimizer, method="first")
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(0))
    with pytest.raises(OptimizerError, match=r"a\.weight is not in the parameter group"):
        train(accountant, range(1))


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    """Its samples push nothing meanwhile: the step is that of an optimizer that does not have it."""
    found = []
    for known in (True, False):
        model = perceptron()
        model.a.weight.requires_grad_(known)
        accountant = attach(model, method="first", audit_every=1)
        model.a.weight.requires_grad_(False)
        found += train(accountant, range(1))
    torch.testing.assert_close(*found)


# Changes of the gradient that are not one factor, seen where a step is audited


def clip_values(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clip_group(model: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.b.parameters(), 1e-3)


def add_noise(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad += 1e-3 * torch.randn_like(p)


def change_entry(model: Any) -> None:
    model.a.bias.grad[0] *= 1.05


def through_data(model: Any) -> None:
    model.a.weight.grad.data.view(-1)[8:].mul_(0.5)


CHANGES = {f.__name__: f for f in (clip_values, clip_group, add_noise, change_entry, through_data)}


@EVERY
@pytest.mark.parametrize("name", CHANGES)
def test_gradients_that_are_changed_by_more_than_a_factor(name: str, method: str) -> None:
    model = perceptron()
    accountant = attach(model, audit_every=1, **METHODS[method])
    with pytest.raises(ConservationError, match="step 0.*(a|b).(weight|bias).*one factor"):
        run_step(accountant, lambda: loss(model), range(4), between=lambda: CHANGES[name](model))
    with pytest.raises(StepError, match="scoring stopped earlier"):
        train(accountant, range(1))


@pytest.mark.parametrize("sets", [True, False], ids=["set", "in place"])
@pytest.mark.parametrize("factor", [1.0, 1e-3, -1.0])
@EVERY
def test_control_one_factor_is_no_change(method: str, factor: float, sets: bool) -> None:
    """Clipping, a loss scale, ascent: the samples' pushes are those of the gradient that was used."""
    found = []
    for by_hand in (False, True):
        model = perceptron()
        accountant = attach(model, torch.optim.SGD(model.parameters(), lr=1e-4), audit_every=1, **METHODS[method])

        def scale(model: nn.Module = model) -> None:
            for p in model.parameters():
                if sets:
                    p.grad = p.grad * factor
                else:
                    p.grad.mul_(factor)

        scaled = lambda m=model, by_hand=by_hand: loss(m) * (1.0 if by_hand else factor)  # noqa: E731
        found.append(run_step(accountant, scaled, range(4), between=scale if by_hand else lambda: None))
    assert distance(*found) < 1e-9


def left_over(model: nn.Module) -> Any:
    loss(model, 7).backward()
    return lambda: loss(model)


def penalised(model: Any) -> Any:
    return lambda: loss(model) + 0.1 * model.a.weight.square().sum()


def hooked(model: Any) -> Any:
    model.a.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return lambda: loss(model)


def hooked_late(model: Any) -> Any:
    def clamp(p: Tensor) -> None:
        p.grad.clamp_(-1e-3, 1e-3)

    model.a.weight.register_post_accumulate_grad_hook(clamp)
    return lambda: loss(model)


@EVERY
@pytest.mark.parametrize("make", [left_over, penalised, hooked, hooked_late])
def test_gradient_that_flows_through_no_row(make: Callable[[nn.Module], Any], method: str) -> None:
    model = perceptron()
    accountant = attach(model, audit_every=1, **METHODS[method])
    with pytest.raises(ConservationError, match=r"gradient of (a|b)\.(weight|bias)" if make is left_over else r"a\.weight"):
        run_step(accountant, make(model), range(4))


def test_gradients_that_are_reset_or_changed_between_microbatches() -> None:
    for change in (lambda p: p.grad.zero_(), lambda p: p.grad.mul_(0.5)):
        model = perceptron()
        accountant = attach(model, audit_every=1)
        with pytest.raises(ConservationError), accountant.step() as step:
            for seed in (0, 1):
                with step.microbatch(range(4)):
                    loss(model, seed).backward()
                if seed == 0:
                    for p in model.parameters():
                        change(p)
            accountant.optimizers[0].step()


@pytest.mark.parametrize("change", ["cleared", "doubled", "loaded"])
@pytest.mark.parametrize("make", [adamw, sgd])
def test_optimizers_whose_memory_is_changed_behind_their_back(make: Any, change: str) -> None:
    model = perceptron()
    optimizer = make(model)
    accountant = attach(model, optimizer, audit_every=1, sketch="exact")
    train(accountant, range(4))
    state = optimizer.state_dict()
    if change == "cleared":
        optimizer.state.clear()
    elif change == "doubled":
        for s in optimizer.state.values():
            s["exp_avg" if "exp_avg" in s else "momentum_buffer"].mul_(2.0)
    else:  # the same state is no change
        optimizer.load_state_dict(state)
    # SGD without a buffer begins anew, and uses that it remembered are settled.
    fine = change == "loaded" or (change == "cleared" and make is sgd)
    with contextlib.nullcontext() if fine else pytest.raises(CreditError, match='reset or changed.*method="step"'):
        train(accountant, range(4, 6))


def test_all_errors_derive_from_one() -> None:
    kinds = [k for k in vars(inrun.errors).values() if isinstance(k, type) and issubclass(k, Exception)]
    assert len(kinds) > 5 and all(issubclass(k, InrunError) for k in kinds)

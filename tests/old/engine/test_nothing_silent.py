"""Attaching changes nothing, and nothing goes wrong without a word: what was found by trying, each with a test that failed."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inrun
from inrun.errors import (
    ConfigurationError,
    CoverageError,
    IdsError,
    RowOwnershipError,
    StepError,
    ValidationError,
)
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

N, D = 6, 4


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, x: Any) -> Tensor:
    return model(x).square().sum()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def truth_of(model: nn.Module, x: Tensor, xv: Tensor, lr: float = 0.05) -> Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    g_n = sample_gradients(lambda j: loss_of(model, x[j : j + 1]), len(x), params)
    gains = [sgd_gain(torch.optim.SGD(params, lr=lr), p, p) for p in params]
    return contributions(g_n, gains, gradients(loss_of(model, xv), params))


def quietly(make: Any) -> Any:
    """Make a module by a way that torch calls old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def hooked_net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(D, 5)
    made = {
        "weight_norm": lambda: nn.utils.weight_norm(first),
        "spectral_norm": lambda: nn.utils.spectral_norm(first),
        "prune": lambda: nn.utils.prune.random_unstructured(first, "weight", 0.3),
    }[kind]
    return nn.Sequential(quietly(made), nn.Tanh(), nn.Linear(5, 3)).double()


# Attaching changes nothing


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "prune"])
@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_hook_based_reparametrisations_train_as_without_us(kind: str, method: str) -> None:
    finals = []
    x, xv = floats(4, N, D), floats(2, D, seed=1)
    for scored in (False, True):
        model = hooked_net(kind)
        optimizer = sgd(model)
        accountant = None
        if scored:
            accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, xv), method=method, bitwise=True, audit_every=1)
        for rows in x:
            if accountant is None:
                loss_of(model, rows).backward()
                optimizer.step()
            else:
                with accountant.step(range(N)):
                    loss_of(model, rows).backward()
                    optimizer.step()
                assert accountant.last.skipped is None
            optimizer.zero_grad()
        finals.append({k: v.clone() for k, v in model.state_dict().items()})
    assert all(torch.equal(finals[0][k], finals[1][k]) for k in finals[0])


def test_hook_based_weight_norm_is_scored() -> None:
    x, xv = floats(N, D), floats(2, D, seed=1)
    model = hooked_net("weight_norm")
    want = truth_of(model, x, xv)
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: loss_of(m, xv), audit_every=1, credit="step") as accountant:
        with accountant.step(range(N)):
            loss_of(model, x).backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


class Cast(nn.Module):
    """A forward that turns autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_a_decorated_forward_leaves_autocast_off() -> None:
    model, x = Cast(), floats(N, D).float()
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: m(x[:1]).float().square().sum(), audit_every=1, credit="step") as accountant:
        for _ in range(2):
            with accountant.step(range(N)):
                model(x).float().square().sum().backward()
                assert not torch.is_autocast_enabled("cpu")
                optimizer.step()
                optimizer.zero_grad()
    assert not torch.is_autocast_enabled("cpu")


def test_modules_run_once_in_a_forward_of_their_own() -> None:
    """What runs again runs before or after the user's forward: no call of a module is ever inside another of the same module."""
    running: list[nn.Module] = []
    worst = [0]

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(D, D), nn.Parameter(floats(D))

        def forward(self, x: Tensor) -> Tensor:
            running.append(self)
            worst[0] = max(worst[0], running.count(self))
            out = self.inner(x) * self.scale
            running.remove(self)
            return out

    model, x = Watched().double(), floats(N, D)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for method in ("first", "lookahead", "second", "midpoint"):
        with inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), method=method, audit_every=1) as accountant:
            for _ in range(2):
                with accountant.step(range(N)):
                    loss_of(model, x).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert worst[0] == 1


def test_copies_and_pickles_of_an_attached_model_are_plain() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.LayerNorm(D)).double(), floats(N, D)
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), credit="step") as accountant, accountant.step(range(N)):
        out = model(x)
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        pickle.dump(model, buffer)  # as users do with whole models
        again = pickle.loads(buffer.getvalue())  # noqa: S301
        for other in (twin, again):
            assert [type(m) for m in other.modules()] == [nn.Sequential, nn.Linear, nn.Tanh, nn.LayerNorm]
            assert torch.equal(other(x), out)
            assert not any("inrun" in key for m in other.modules() for key in m.__dict__)
        loss_of(twin, x).backward()
        assert all(p.grad is None for p in model.parameters())
        out.square().sum().backward()
        optimizer.step()
    assert repr(model) == repr(twin)


def test_a_forgotten_accountant_lets_go_of_its_model() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double(), floats(N, D)
    optimizer = torch.optim.AdamW(model.parameters())
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), method="midpoint")
    with accountant.step(range(N)):
        loss_of(model, x).backward()
        optimizer.step()
    held = weakref.ref(model)
    classes = [type(m) for m in model.modules()]
    del accountant
    gc.collect()
    assert [type(m) for m in model.modules()] != classes  # it has come off by itself
    assert type(model) is nn.Sequential
    del model, optimizer
    gc.collect()
    assert held() is None


# Wrong scores


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.reentrant = nn.Linear(D, D), nn.Linear(D, D), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(checkpoint(self.a, x, use_reentrant=self.reentrant)))


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_reentrant_checkpointing_in_the_validation_pass_is_mended(needs_gradient: bool) -> None:
    """Its backward cannot be asked for gradients, and has none where no input requires any: it is the other kind for this pass."""
    found = []
    for reentrant in (True, False):
        torch.manual_seed(0)
        model, x = Checkpointed(reentrant).double(), floats(N, D).requires_grad_()
        optimizer = sgd(model)
        xv = floats(2, D, seed=1).requires_grad_(needs_gradient)
        accountant = inrun.Accountant(model, optimizer, lambda m, xv=xv: loss_of(m, xv), credit="step")
        with accountant.step(range(N)):
            loss_of(model, x).backward()
            optimizer.step()
        found.append(accountant.last.contributions["validation"])
    assert relative_error(*found) < 1e-12


@pytest.mark.parametrize("method", ["first", "midpoint"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_training_is_scored(method: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x, xv = Checkpointed(reentrant).double(), floats(N, D), floats(2, D, seed=1)
    plain = lambda m, z: m.b(torch.tanh(m.a(z))).square().sum()  # noqa: E731
    x.requires_grad_()
    want = None
    for checkpointing in (False, True):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)
        options = {"check_rows": False, "audit_every": 1, "method": method}
        with inrun.Accountant(twin, optimizer, lambda m: plain(m, xv), credit="step", **options) as accountant:
            for _ in range(2):
                with accountant.step(range(N)):
                    (loss_of(twin, x) if checkpointing else plain(twin, x)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            got = accountant.last.contributions["validation"]
        want = got if want is None else want
        assert relative_error(got, want) < 1e-9


def test_a_validation_that_never_reaches_the_model_is_said() -> None:
    model, other, x = nn.Linear(D, D).double(), nn.Linear(D, D).double(), floats(N, D)
    accountant = inrun.Accountant(
        model, sgd(model), {"mine": lambda m: loss_of(m, x), "lost": lambda m: loss_of(other, x)}, credit="step"
    )
    with pytest.raises(ValidationError, match="'lost'.*no parameter"), accountant.step(range(N)):
        pass


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, padding: Tensor | None = None) -> Tensor:
        return self.attention(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)[0]


@pytest.mark.parametrize("kind", ["none", "causal [t, t] with t = n", "padding", "one per head"])
def test_masks_of_attention(kind: str) -> None:
    """A [t, t] mask with t = n looks like one row per sample and is not."""
    torch.manual_seed(0)
    t = N
    model, x, xv = Attends().double(), floats(N, t, D), floats(2, t, D, seed=1)
    causal = torch.triu(torch.full((t, t), float("-inf"), dtype=torch.float64), 1)
    masks: dict[str, Any] = {
        "none": lambda n: (None, None),
        "causal [t, t] with t = n": lambda n: (causal, None),
        "padding": lambda n: (None, torch.arange(t).expand(n, t) >= t - 1),
        "one per head": lambda n: (causal.expand(2 * n, t, t), None),
    }
    run = lambda m, rows: m(rows, *masks[kind](len(rows))).square().sum()  # noqa: E731
    params = list(model.parameters())
    g_n = sample_gradients(lambda j: run(model, x[j : j + 1]), N, params)
    want = contributions(g_n, [sgd_gain(sgd(model), p, p) for p in params], gradients(run(model, xv), params))
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: run(m, xv), audit_every=1, credit="step") as accountant:
        with accountant.step(range(N)):
            run(model, x).backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(floats(D, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.g)


def test_hooks_that_change_data_run_once_on_a_module_without_a_rule() -> None:
    x, xv = floats(N, D), floats(2, D, seed=1)

    def build() -> nn.Module:
        scaled = Scaled()
        scaled.register_forward_pre_hook(lambda m, args: (args[0] * 2.0,))
        scaled.register_forward_hook(lambda m, args, out: out + 0.1 * out.square())
        torch.manual_seed(0)
        return nn.Sequential(scaled, nn.Linear(D, 3)).double()

    want = truth_of(build(), x, xv)
    model = build()
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: loss_of(m, xv), audit_every=1, credit="step") as accountant:
        with accountant.step(range(N)):
            loss_of(model, x).backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


@dataclass(frozen=True)
class Batch:
    rows: Tensor
    name: str = "batch"


class Opaque:
    """A batch in attributes."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Closed:
    """A batch that cannot be opened."""

    def __init__(self, rows: Tensor) -> None:
        self.take = lambda: rows


class FromObject(nn.Module):
    """Reads its rows out of an object; ``mixes`` puts samples into each other's rows."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.inner, self.mixes = nn.Linear(D, D), mixes

    def forward(self, batch: Any) -> Tensor:
        x = batch.take() if isinstance(batch, Closed) else batch.rows
        return self.inner(x.flip(0) if self.mixes else x)


@pytest.mark.parametrize("kind", [Batch, Opaque])
def test_batches_inside_objects_are_opened(kind: Any) -> None:
    x = floats(N, D)
    for mixes in (False, True):
        model = FromObject(mixes).double()
        optimizer = sgd(model)
        accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, kind(x[:1])), credit="step")
        if mixes:
            with pytest.raises(RowOwnershipError, match="inner"), accountant.step(range(N)):
                loss_of(model, kind(x)).backward()
        else:
            with accountant.step(range(N)):
                loss_of(model, kind(x)).backward()
                optimizer.step()
            assert accountant.last.contributions["validation"].abs().min() > 0


def test_a_batch_that_cannot_be_opened_is_refused() -> None:
    model, x = FromObject(False).double(), floats(N, D)
    optimizer = sgd(model)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, Closed(x[:1])), credit="step")
    with pytest.raises(RowOwnershipError, match="Closed.*check_rows=False"), accountant.step(range(N)):
        loss_of(model, Closed(x)).backward()


@pytest.mark.parametrize("ids", [torch.tensor([2**63, 1], dtype=torch.uint64), [2**63, 1], [2**64 + 3, 1]])
def test_ids_beyond_63_bits_are_refused(ids: Any) -> None:
    model = nn.Linear(D, D).double()
    accountant = inrun.Accountant(model, sgd(model), lambda m: loss_of(m, floats(1, D)), credit="step")
    with pytest.raises(IdsError, match="64"):
        accountant.step(ids)


def test_ids_of_63_bits_are_taken() -> None:
    model, x = nn.Linear(D, D).double(), floats(2, D)
    optimizer = sgd(model)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), credit="step")
    with accountant.step(torch.tensor([2**63 - 1, 0], dtype=torch.uint64)):
        loss_of(model, x).backward()
        optimizer.step()
    assert accountant.last.sample_ids.tolist() == [2**63 - 1, 0]


class Mixup(nn.Module):
    """Mixes rows in three of ten forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < 0.3:
            x = 0.7 * x + 0.3 * x.roll(1, 0)
        return self.inner(x)


@pytest.mark.parametrize("audit_every", [0, 4])
def test_rows_that_mix_now_and_then_are_found(audit_every: int) -> None:
    found = 0
    for seed in range(5):
        model, x = Mixup().double(), floats(N, D)
        optimizer = sgd(model, 1e-3)
        torch.manual_seed(seed)
        accountant = inrun.Accountant(model, optimizer, lambda m, x=x: loss_of(m, x[:1]), audit_every=audit_every, credit="step")
        try:
            for _ in range(70):
                with accountant.step(range(N)):
                    loss_of(model, x).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except RowOwnershipError as error:
            found += 1
            assert "inner" in str(error)
    assert found >= 4


def test_functional_call_with_other_weights_is_not_scored() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double(), floats(N, D)
    optimizer = sgd(model)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), audit_every=1, credit="step")
    with accountant.step(range(N)):
        others = {k: v.detach().clone().requires_grad_() for k, v in model.named_parameters()}
        torch.func.functional_call(model, others, (x,)).sum().backward()
        loss_of(model, x).backward()
        optimizer.step()
    assert accountant.last.audited


# Errors that name the cause


def build_accountant(model: nn.Module, optimizer: Any = None) -> inrun.Accountant:
    return inrun.Accountant(model, optimizer or sgd(model), lambda m: loss_of(m, floats(1, D)), credit="step")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.DataParallel(nn.Linear(D, D)), "DataParallel.*model.module"),
        (lambda: nn.Linear(D, D, device="meta"), "weight is on the meta device.*weights are loaded"),
        (lambda: nn.Linear(D, D, dtype=torch.complex64), "weight is complex.*view_as_real"),
    ],
)
def test_models_that_cannot_be_scored_are_named(make: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        build_accountant(make())


def test_accelerates_wrapper_is_taken_off() -> None:
    wrapper = type("AcceleratedOptimizer", (torch.optim.SGD,), {"__module__": "accelerate.optimizer"})
    model = nn.Linear(D, D)
    optimizer = wrapper(model.parameters(), lr=0.1)
    optimizer.optimizer = sgd(model)
    assert build_accountant(model, optimizer).optimizers == [optimizer.optimizer]


def test_backward_inside_autocast_is_named() -> None:
    model, x = nn.Linear(D, D), floats(N, D).float()
    optimizer = sgd(model)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), credit="step")
    with (
        pytest.raises(StepError, match="inside an autocast block"),
        accountant.step(range(N)),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        loss_of(model, x).backward()


def test_closures_are_named() -> None:
    model, x = nn.Linear(D, D).double(), floats(N, D)
    optimizer = sgd(model)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m, x[:1]), credit="step")
    with pytest.raises(StepError, match="closure"), accountant.step(range(N)):
        optimizer.step(lambda: loss_of(model, x))


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, D)

    def forward(self, tokens: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.bag(tokens, offsets)


def test_offsets_of_an_embedding_bag_are_named() -> None:
    model = Bag().double()
    optimizer = sgd(model)
    tokens, offsets = torch.arange(2 * N) % 9, torch.arange(N) * 2
    accountant = inrun.Accountant(model, optimizer, lambda m: m(tokens[:2].view(1, 2)).square().sum(), credit="step")
    with pytest.raises((RowOwnershipError, CoverageError), match="offsets"), accountant.step(range(N)):
        model(tokens, offsets).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    want = truth_of(copy.deepcopy(model), tokens.view(N, 2), tokens[:2].view(1, 2))
    with accountant.step(range(N)):  # one row per sample is fine
        model(tokens.view(N, 2)).square().sum().backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


def test_a_gated_norm_is_scored_by_running_it_again() -> None:
    from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = MambaRMSNormGated(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, x.flip(-1))

    model, x, xv = Gated(), floats(N, 3, D).float(), floats(2, 3, D, seed=1).float()
    want = truth_of(model, x, xv)
    optimizer = sgd(model)
    with inrun.Accountant(model, optimizer, lambda m: loss_of(m, xv), audit_every=1, credit="step") as accountant:
        with accountant.step(range(N)):
            loss_of(model, x).backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], want) < 1e-5


@pytest.mark.parametrize("equal", [True, False])
def test_equal_samples_prove_nothing_about_what_a_parameter_meets(equal: bool) -> None:
    """Tokens that are the same in all samples cannot be seen to move: the module goes through the fallback, whatever the batch."""
    torch.manual_seed(0)
    model = nn.EmbeddingBag(11, 3, mode="max").double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor([[4], [4]] if equal else [[4], [7]])
    with inrun.Accountant(model, optimizer, lambda m: m(torch.tensor([[4]])).square().sum(), method="first") as accountant:
        with accountant.step([0, 1]):
            (model(tokens) * torch.tensor([[1.0], [2.0]])).sum().backward()
            optimizer.step()
        (row,) = accountant.coverage
    assert row.rule == "fallback"

"""Defects that a second reader of the deferred methods found or feared: each would give a wrong number without an error."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import ConfigurationError, ConservationError, StepError, ValidationError
from inrun.training.gpt import next_token_loss
from reference import gradients, real_move, relative_error
from tiny import batch, tiny, train_step

N, D = 6, 4
METHODS = ("first", "lookahead", "second", "midpoint")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    """Each sample's part of the batch loss."""
    out = model(x)
    return out.square().sum(1) + 0.3 * out.sum(1)


class Game:
    """A model, data, a validation loss, and the contributions that real moves of the real optimizers give."""

    def __init__(self, net: Callable[[], nn.Module] = Net, make=adamw, validation=None) -> None:
        torch.manual_seed(0)
        self.model = net().double()
        self.optimizers = [make(self.model.parameters())] if make else []
        self.x, xv = torch.randn(10, N, D).double(), torch.randn(5, D).double()
        self.validation = validation or (lambda m: m(xv).square().mean() + 0.1 * m(xv).sum())
        self.xv = xv

    def accountant(self, method: str = "midpoint", **options) -> inrun.Accountant:
        options.setdefault("audit_every", 0)
        return inrun.Accountant(self.model, self.optimizers, self.validation, method=method, **options)

    def _slope(self, moves: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
        saved = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p, d in zip(parameters, moves, strict=True):
                p.add_(d)
        found = gradients(self.validation(self.model), parameters)
        with torch.no_grad():
            for p, w in zip(parameters, saved, strict=True):
                p.copy_(w)
        return found

    def truth(self, sample_losses: Tensor, method: str = "midpoint", clip=lambda g: g) -> Tensor:
        """c_n = −⟨δ_n, ∇̄⟩ with δ_n = (u(clip(G)) − u(0)) / G ∘ g_n."""
        owner = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        parameters = list(owner)
        g_n = [gradients_of(loss, parameters) for loss in sample_losses]
        whole = [torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
        zero = [real_move(owner[p], p, torch.zeros_like(p)) for p in parameters]
        full = [real_move(owner[p], p, g) for p, g in zip(parameters, clip(whole), strict=True)]
        part = {"first": None, "lookahead": 0.0, "midpoint": 0.5}[method]
        places = [0 * z if part is None else z + part * (f - z) for z, f in zip(zero, full, strict=True)]
        bar = self._slope(places, parameters)
        gains = [
            torch.where(g.abs() < 1e-13, 0.0, (z - f) / torch.where(g == 0, 1.0, g))
            for g, z, f in zip(whole, zero, full, strict=True)
        ]
        return torch.stack([sum((g * k * b).sum() for g, k, b in zip(gs, gains, bar, strict=True)) for gs in g_n]).detach()

    def step(self, accountant: inrun.Accountant, i: int, between: Callable[[], object] = lambda: None, **zero) -> Tensor:
        with accountant.step(range(N)):
            losses(self.model, self.x[i]).sum().backward()
            between()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(**zero)
        return accountant.last.contributions["validation"]

    def check(self, steps: int = 3, method: str = "midpoint", **options) -> None:
        with self.accountant(method, update="secant", **options) as accountant:
            for i in range(steps):
                want = self.truth(losses(self.model, self.x[i]), method)
                assert relative_error(self.step(accountant, i), want) < 1e-9


def gradients_of(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


# Gradient that is not this step's samples'


@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_gradient_through_a_forward_of_an_earlier_step_is_refused(method: str) -> None:
    game = Game()
    accountant = game.accountant(method)
    with pytest.raises(KeyError), accountant.step(range(N)):
        late = losses(game.model, game.x[1]).sum()
        raise KeyError
    with pytest.raises(StepError, match="earlier step"), accountant.step(range(N)):
        (losses(game.model, game.x[2]).sum() + late).backward()


@pytest.mark.parametrize("method", METHODS)
def test_gradient_left_over_is_refused(method: str) -> None:
    game = Game()
    accountant = game.accountant(method)
    losses(game.model, game.x[1]).sum().backward()
    with pytest.raises(ConservationError, match="zero_grad"):
        game.step(accountant, 0)
    before = [p.detach().clone() for p in game.model.parameters()]
    with accountant.step(range(N)):  # zero_grad inside the step is fine, of either kind
        game.optimizers[0].zero_grad(set_to_none=False)
        losses(game.model, game.x[2]).sum().backward()
        game.optimizers[0].step()
    with accountant.step(range(N)):
        game.optimizers[0].zero_grad()
        losses(game.model, game.x[2]).sum().backward()
        game.optimizers[0].step()
    assert not torch.equal(before[0], next(game.model.parameters()))


def test_old_gradient_of_a_part_that_is_not_used_is_refused() -> None:
    game = Game(TwoHeads)
    accountant = game.accountant()
    game.model.head = 1
    losses(game.model, game.x[0]).sum().backward()
    game.model.head = 0
    with pytest.raises(ConservationError, match=r"b\.weight had gradient left"):
        game.step(accountant, 1)


@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_gradient_penalty_is_seen_on_steps_without_audit(method: str) -> None:
    """Part of a second backward flows past the rules."""
    game = Game()
    accountant = game.accountant(method)
    x = game.x[0].clone().requires_grad_()
    with pytest.raises(ConservationError, match="weight"), accountant.step(range(N)):
        loss = losses(game.model, x).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        game.optimizers[0].step()


@pytest.mark.parametrize("kind", ["hook", "post-accumulate hook"])
def test_hooks_that_change_gradients_are_seen_on_steps_without_audit(kind: str) -> None:
    game = Game()
    weight = game.model.a.weight
    if kind == "hook":
        handle = weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    else:
        handle = weight.register_post_accumulate_grad_hook(lambda p: [p.grad.clamp_(-0.01, 0.01)].clear())
    accountant = game.accountant()
    with pytest.raises(ConservationError, match=r"a\.weight"):
        game.step(accountant, 0)
    handle.remove()
    game.model.zero_grad()
    weight.register_hook(lambda g: None)  # one that only looks is no harm
    want = game.truth(losses(game.model, game.x[1]))
    assert relative_error(game.step(accountant, 1), want) < 1e-9


# What is done to the gradient, and when


@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_clipping_by_a_later_step_hook_is_seen(method: str) -> None:
    """Another library's pre-hook, registered after ours, clips: ours must still run last."""
    game = Game()
    parameters = list(game.model.parameters())

    def clipped(gs: list[Tensor]) -> list[Tensor]:
        norm = float(torch.stack([g.norm() for g in gs]).norm())
        return [g * min(1.0, 0.01 / (norm + 1e-6)) for g in gs]

    with game.accountant(method, update="secant") as accountant:
        game.optimizers[0].register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.01) and None)
        for i in range(3):
            want = game.truth(losses(game.model, game.x[i]), method, clipped)
            assert relative_error(game.step(accountant, i), want) < 1e-9
            assert accountant.last.clip[0] < 1.0


def test_value_clipping_after_another_optimizer_stepped_is_refused() -> None:
    game = Game(make=None)
    game.optimizers = [adamw(game.model.a.parameters()), adamw(game.model.b.parameters())]
    accountant = game.accountant()
    with pytest.raises(StepError, match="after another optimizer"), accountant.step(range(N)):
        losses(game.model, game.x[0]).sum().backward()
        game.optimizers[0].step()
        torch.nn.utils.clip_grad_value_(game.model.b.parameters(), 1e-2)
        game.optimizers[1].step()


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True), "momentum", 0.1),
        (adamw, "betas", (0.5, 0.9)),
        (lambda p: torch.optim.ASGD(p, lr=0.05), "lr", 0.5),
    ],
)
def test_options_changed_inside_the_step(make, name: str, value) -> None:
    """Streamed contributions were made with the old option; only a learning rate is read when the optimizer steps."""
    game = Game(make=make)
    with game.accountant("first") as accountant:
        for i in range(2):
            game.step(accountant, i)
        group = game.optimizers[0].param_groups[0]
        with pytest.raises(StepError, match=name):
            game.step(accountant, 2, lambda: group.__setitem__(name, value))
    game.optimizers[0].zero_grad()
    if name == "lr":
        return
    with game.accountant("midpoint", quadrature="midpoint") as accountant, accountant.step(range(N)):
        losses(game.model, game.x[3]).sum().backward()
        group[name] = value
        with accountant.paused():
            want = game.truth(losses(game.model, game.x[3]))
        game.optimizers[0].step()
    assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


def test_scheduler_inside_the_step() -> None:
    game = Game()
    group = game.optimizers[0].param_groups[0]
    with game.accountant() as accountant:
        for i in range(3):
            with accountant.step(range(N)):
                losses(game.model, game.x[i]).sum().backward()
                group["lr"] *= 0.3
                with accountant.paused():
                    want = game.truth(losses(game.model, game.x[i]))
                game.optimizers[0].step()
                game.optimizers[0].zero_grad()
            assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


def test_output_gradient_overwritten_before_the_step_is_refused() -> None:
    game = Game()
    accountant = game.accountant(form="project")
    kept: list[Tensor] = []
    with pytest.raises(StepError, match="output gradient of a Linear"), accountant.step(range(N)):
        out = game.model(game.x[0])
        out.register_hook(kept.append)
        out.square().sum().backward()
        kept[0].zero_()
        game.optimizers[0].step()


# Failures inside a step


class Failing(torch.optim.AdamW):
    fails = False

    def _init_group(self, *args, **kwargs):
        if self.fails:
            raise MemoryError
        return super()._init_group(*args, **kwargs)


@pytest.mark.parametrize("where", ["in the audit", "in the optimizer"])
def test_a_failed_optimizer_step_that_was_caught_is_not_recorded(where: str) -> None:
    game = Game(make=lambda p: Failing(p, lr=0.05))
    game.optimizers[0].fails = where == "in the optimizer"
    accountant = game.accountant(audit_every=1)
    with pytest.raises(StepError, match="exception was caught"), accountant.step(range(N)):
        penalty = sum(p.square().sum() for p in game.model.parameters()) if where == "in the audit" else 0.0
        (losses(game.model, game.x[0]).sum() + penalty).backward()
        with contextlib.suppress(ConservationError, MemoryError):
            game.optimizers[0].step()
    assert accountant.steps_done == 0


@pytest.mark.parametrize("method", ["lookahead", "second", "midpoint"])
def test_interrupt_inside_a_validation_pass(method: str) -> None:
    game, calls = Game(), []
    usual = game.validation

    def interrupted(model: nn.Module) -> Tensor:
        loss = usual(model)
        calls.append(1)
        if len(calls) == (9 if method == "midpoint" else 6):  # somewhere in the second step
            raise KeyboardInterrupt
        return loss

    game.validation = interrupted
    with game.accountant(method, update="secant", audit_every=1) as accountant:
        for i in range(3):
            before = [p.detach().clone() for p in game.model.parameters()]
            try:
                game.step(accountant, i)
            except KeyboardInterrupt:
                break
        assert all(torch.equal(p, b) for p, b in zip(game.model.parameters(), before, strict=True))
        assert torch.is_grad_enabled()
        assert game.model.training
        game.model.zero_grad()
        game.step(accountant, 5)
        if method == "midpoint":
            game.model.zero_grad()
            want = game.truth(losses(game.model, game.x[6]))
            assert relative_error(game.step(accountant, 6), want) < 1e-9


# Which parameters move, and where they are


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(D, 3), nn.Linear(D, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(x) if self.head else self.a(x))


def test_lookahead_where_unused_parts_keep_zero_gradients() -> None:
    """zero_grad(set_to_none=False): the optimizer goes on moving a head that is not used, by momentum and decay."""
    game = Game(TwoHeads)
    game.validation = lambda m: (m.a(game.xv) * m.b(game.xv)).tanh().square().mean() + m.a(game.xv).square().mean()
    with game.accountant("lookahead", update="secant") as accountant:
        for i, head in enumerate([0, 1, 0, 0, 1]):
            game.model.head = head
            want = game.truth(losses(game.model, game.x[i]), "lookahead")
            got = game.step(accountant, i, set_to_none=False)
            assert i < 2 or relative_error(got, want) < 1e-9


class SameMemory(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 3, bias=False), nn.Linear(D, 3, bias=False)
        both = torch.randn(3, 2 * D, dtype=torch.float64)
        self.a.weight = nn.Parameter(both[:, :D])
        self.b.weight = nn.Parameter(both[:, D:] if apart else both[:, :D])

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + torch.tanh(self.b(x))


def test_two_parameters_in_the_same_memory_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="same memory"):
        Game(lambda: SameMemory(apart=False)).accountant()
    Game(lambda: SameMemory(apart=True)).check()  # interleaved columns of one tensor


@pytest.mark.parametrize("kind", ["transposed", "flat", "channels last"])
def test_unusual_memory(kind: str) -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.b = nn.Conv2d(2, 3, 2), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.c(x.view(-1, 2, 2, 1).expand(-1, 2, 2, 2))).flatten(1))

    game = Game(Image if kind == "channels last" else Net, make=None)
    if kind == "channels last":
        game.model.to(memory_format=torch.channels_last)
        assert not game.model.c.weight.is_contiguous()
    elif kind == "transposed":
        for layer in (game.model.a, game.model.b):
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    else:
        flat, start = torch.cat([p.detach().reshape(-1) for p in game.model.parameters()]), 0
        for p in game.model.parameters():
            p.data, start = flat[start : start + p.numel()].view(p.shape), start + p.numel()
    for make in (adamw, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)):
        game.optimizers = [make(game.model.parameters())]
        for method in ("lookahead", "midpoint"):
            game.check(2, method, audit_every=1)


def test_transposed_output_vocabulary() -> None:
    class Words(nn.Module):
        def __init__(self, transposed: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(D, 2), nn.Linear(2, 13, bias=False)
            if transposed:
                self.b.weight = nn.Parameter(self.b.weight.detach().t().contiguous().t())

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    found = []
    for transposed in (False, True):
        game = Game(lambda transposed=transposed: Words(transposed))
        with game.accountant("first", audit_every=1) as accountant:
            found.append([game.step(accountant, i) for i in range(3)])
    assert all(relative_error(a, b) < 1e-9 for a, b in zip(*found, strict=True))


def test_groups_of_their_own_options() -> None:
    game = Game(make=None)
    a, b = game.model.a, game.model.b
    groups = [
        {"params": a.parameters(), "lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.3},
        {"params": [b.weight], "lr": torch.tensor(0.1, dtype=torch.float64), "amsgrad": True},
        {"params": [b.bias], "lr": 0.02, "maximize": True},
    ]
    game.optimizers = [torch.optim.AdamW(groups, weight_decay=0.0, foreach=False)]
    game.check(4, audit_every=1)


# Kept contractions


class Again(nn.Module):
    """One weight, called several times and from two modules, once small enough to keep factors and once not."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.a(x))
        x = x.unsqueeze(1) * torch.linspace(0, 1, 7, dtype=x.dtype)[:, None]
        return torch.tanh(self.b(x)).mean(1)


@pytest.mark.parametrize("form", ["auto", "shared", "project"])
def test_kept_contractions_of_many_uses(form: str) -> None:
    Game(Again).check(form=form, audit_every=1)


def test_microbatches_of_changing_sizes() -> None:
    game = Game(Again)
    with game.accountant(audit_every=1) as accountant:
        for i, sizes in enumerate([(1, 5), (4, 2), (2, 3, 1), (6,)]):
            want = game.truth(losses(game.model, game.x[i]))
            with accountant.step() as step:
                for rows, ids in zip(game.x[i].split(list(sizes)), torch.arange(N).split(list(sizes)), strict=True):
                    with step.microbatch(ids):
                        losses(game.model, rows).sum().backward()
                game.optimizers[0].step()
                game.optimizers[0].zero_grad()
            assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


@pytest.mark.parametrize("net", [Net, Again])
def test_two_backwards_and_a_forward_for_nothing(net) -> None:
    game = Game(net)
    with game.accountant(audit_every=1) as accountant:
        for i in range(3):
            want = game.truth(3 * losses(game.model, game.x[i]))
            with accountant.step(range(N)):
                game.model(game.x[i] + 1)
                loss = losses(game.model, game.x[i]).sum()
                loss.backward(retain_graph=True)
                torch.autograd.grad(loss, game.model.a.weight, retain_graph=True)
                (2 * loss).backward()
                game.optimizers[0].step()
                game.optimizers[0].zero_grad(set_to_none=False)
            assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.h = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.g) * self.h


@pytest.mark.parametrize("fused", [False, True])
def test_fallback_with_weights_in_two_optimizers_is_refused(fused: bool) -> None:
    """It runs again when the second optimizer steps, and the first has moved it; a fused one does not count its writes."""
    game = Game(lambda: nn.Sequential(nn.Linear(D, 5), Scale(), nn.Linear(5, 3)), make=None)
    first, scale, last = game.model
    parts = [[scale.g, *first.parameters()], [scale.h, *last.parameters()]]
    game.optimizers = [torch.optim.AdamW(part, lr=0.05, fused=fused) for part in parts]
    with pytest.raises(StepError, match="Scale has no rule"):
        game.step(game.accountant(check_rows=False), 0)  # what it reads is not followed then


def test_fallback_that_writes_its_buffers() -> None:
    """Spectral norm improves its estimate at every forward: a replay must start where the forward started."""

    def net() -> nn.Module:
        layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(D, 5))
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))

    game = Game(net)
    with game.accountant(audit_every=1) as accountant:
        for i in range(3):
            game.step(accountant, i)  # the audit holds the sum against the gradient


class Drops(nn.Module):
    """Draws for the whole batch, between uses of a parameter that only a second run can score."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(torch.einsum("nd,d->nd", x, self.weight).cumsum(1), 0.4, self.training)


@pytest.mark.parametrize("memory", ["sketch", "exact"])
def test_fallback_with_dropout_under_whole_credit(memory: str) -> None:
    """A sample that runs alone would draw other numbers: gradients come from the call as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Drops(), nn.Linear(D, 2)).double()
    params, x = list(model.parameters()), torch.randn(4, D, dtype=torch.float64)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(params, lr=1e-6)
    options = {"credit": "whole", "credit_memory": memory, "sketch": 10**6, "quadrature": "gauss1"}
    with inrun.Accountant(model, optimizer, lambda m: m(x).square().sum(), audit_every=1, **options) as accountant:
        torch.manual_seed(1)
        with accountant.step(range(4)):
            model(x).sin().sum().backward()
            optimizer.step()
    torch.manual_seed(1)
    each = twin(x).sin().sum(1)
    g_val = gradients(twin.eval()(x).square().sum(), list(twin.parameters()))
    g_n = [torch.autograd.grad(loss, list(twin.parameters()), retain_graph=True) for loss in each]
    truth = torch.stack([1e-6 * sum((a * b).sum() for a, b in zip(g, g_val, strict=True)) for g in g_n])
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-4  # the middle of the move is near


# Gains


class Gated(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.gate = nn.Linear(5, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.b(h) + self.gate * self.c(h)


def test_a_first_gradient_after_many_steps() -> None:
    """No history yet at step 24: the parameter waits for its real gain, whether the step is audited or not."""
    found = []
    for audit_every in (0, 1):
        game = Game(Gated)
        game.validation = lambda m, game=game: m(game.xv).square().mean() + m.c(m.a(game.xv).tanh()).sum()
        with game.accountant("first", audit_every=audit_every) as accountant:
            for i in range(25):
                game.model.gate = float(i == 24)
                found.append(game.step(accountant, i % 10))
    assert all(torch.equal(a, b) for a, b in zip(found[:25], found[25:], strict=True))


def test_history_is_looked_at_again_after_loading_an_older_state() -> None:
    game = Game(Gated)
    game.validation = lambda m: m(game.xv).square().mean() + m.c(m.a(game.xv).tanh()).sum()
    with game.accountant("first") as accountant:
        game.step(accountant, 0)
        old = copy.deepcopy(game.optimizers[0].state_dict())
        game.model.gate = 1.0
        for i in range(1, 4):
            game.step(accountant, i)
        game.optimizers[0].load_state_dict(old)
        game.step(accountant, 4)
        assert accountant.last.zero_gains == sum(p.numel() for p in game.model.c.parameters())


def test_midpoint_with_frozen_gains_waits_where_there_is_no_history() -> None:
    """The frozen gain of a parameter that had only zeros is 0 everywhere, its real one is not."""
    found = {}
    for method in ("first", "midpoint"):
        game = Game(Gated, make=lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0))
        with game.accountant(method, update="frozen") as accountant:
            for i in range(3):
                game.model.gate = float(i == 2)
                found[method] = game.step(accountant, i)
    assert relative_error(found["midpoint"], found["first"]) < 1e-2


@pytest.mark.parametrize("method", ["lookahead", "midpoint"])
def test_states_loaded_and_cleared_between_steps(method: str) -> None:
    game = Game()
    optimizer = game.optimizers[0]
    with game.accountant(method, update="secant") as accountant:
        for i in range(6):
            if i == 2:
                saved = copy.deepcopy(optimizer.state_dict())
            if i == 4:
                optimizer.load_state_dict(saved)
            if i == 5:
                optimizer.state.clear()
            want = game.truth(losses(game.model, game.x[i]), method)
            assert relative_error(game.step(accountant, i), want) < 1e-9


def test_half_precision_gains_do_not_overflow() -> None:
    """lr / (√v + ε) can exceed what float16 holds, where gradients are tiny."""
    torch.manual_seed(0)
    model = nn.Linear(D, 3).half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, eps=1e-7, weight_decay=0.0)
    x = 1e-4 * torch.randn(N, D).half()
    with inrun.Accountant(model, optimizer, lambda m: m(x).float().sum(), method="midpoint", audit_every=0) as accountant:
        for _ in range(3):
            with accountant.step(range(N)):
                model(x).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert accountant.last.skipped is None


# Validation passes


class Cube(torch.autograd.Function):
    """Its backward is written with plain tensors: autograd takes it for a constant when it differentiates again."""

    @staticmethod
    def forward(ctx, x):
        ctx.x = x.detach()
        return x**3

    @staticmethod
    def backward(ctx, g):
        return g * 3 * ctx.x**2


def test_the_hessian_is_checked_at_the_first_step_that_moves() -> None:
    """Warm-up from 0: the first step tells nothing about the second derivative."""
    game = Game(make=lambda p: torch.optim.SGD(p, lr=0.0))
    game.validation = lambda m: Cube.apply(m(game.xv)).sum()
    with game.accountant("second") as accountant:
        game.step(accountant, 0)
        game.optimizers[0].param_groups[0]["lr"] = 0.05
        with pytest.raises(ValidationError, match="differences"):
            game.step(accountant, 1)


def test_a_validation_that_draws_by_python_is_one_function_within_a_step() -> None:
    drawn = []
    pool = torch.randn(50, D).double()

    def some(model: nn.Module) -> Tensor:
        drawn.append(random.randrange(50))
        return model(pool[drawn[-1]][None]).square().sum()

    game = Game(validation=some)
    with game.accountant("first", audit_every=1) as accountant:
        random.seed(1)
        game.step(accountant, 0, between=random.random)
        assert len(set(drawn)) == 1
        after = random.random()
        game.step(accountant, 1)
        assert len(set(drawn)) == 2
    random.seed(1)
    random.random()
    assert random.random() == after


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(D, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.norm(self.a(x)))))


@pytest.mark.parametrize("method", METHODS)
def test_validation_in_train_mode_leaves_training_alone(method: str) -> None:
    """Batch norm's kernel writes its statistics without counting: they must come back all the same."""
    finals = []
    for scored in (False, True):
        torch.manual_seed(3)
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        x, xv = torch.randn(8, N, D), torch.randn(5, D)
        accountant = None
        if scored:
            accountant = inrun.Accountant(
                model, optimizer, lambda m, xv=xv: m(xv).square().mean(), method=method, bitwise=True, audit_every=2,
                validation_mode="train",
            )  # fmt: skip
        torch.manual_seed(5)
        for i in range(6):
            model.train(i != 0)  # a first pass in eval mode must not decide what is put back later
            with accountant.step(range(N)) if accountant else contextlib.nullcontext():
                model(x[i]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        finals.append([x.detach().clone() for x in (*model.parameters(), *model.buffers(), torch.rand(3))])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_dropout_in_validation_is_the_same_in_all_passes_of_a_step() -> None:
    game = Game(Noisy)
    with game.accountant(quadrature="gauss3", validation_mode="train", audit_every=1) as accountant:
        for i in range(4):
            game.step(accountant, i)
            account = accountant.last.accounts["validation"]
            assert abs(account.residual) < 1e-3 * account.spread


@pytest.mark.parametrize("method", METHODS)
def test_points_folds_and_sets_side_by_side(method: str) -> None:
    rows = batch(3, 99)

    def points(model: nn.Module) -> Tensor:
        return torch.stack([next_token_loss(model, row) for row in rows.split(1)])

    def run(fn) -> list[dict[str, Tensor]]:
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        # More points would be taken for all sets together, where one of them asks for it.
        rule = {"quadrature": "midpoint"} if method == "midpoint" else {}
        with inrun.Accountant(model, optimizer, fn, method=method, audit_every=1, **rule) as accountant:
            return [train_step(accountant, model, optimizer, batch(4, i), clip=0.5).contributions for i in range(2)]

    together = run({"points": points, "twice": lambda m: 2 * points(m)[1], "folds": inrun.folds(points, 3)})
    alone = [run(lambda m, j=j: points(m)[j]) for j in range(3)]
    for i, found in enumerate(together):
        single = torch.stack([alone[j][i]["validation"] for j in range(3)], dim=1)
        assert relative_error(found["points"], single) < 1e-10
        assert relative_error(found["twice"], 2 * single[:, 1]) < 1e-10
        assert relative_error(found["folds"], single.mean(1)) < 1e-10


def test_points_may_change_in_number_from_step_to_step() -> None:
    game = Game()
    game.validation = lambda m, step: m(game.xv[: 2 + step]).square().sum(1)
    with game.accountant(audit_every=1) as accountant:
        assert [game.step(accountant, i).shape[1] for i in range(3)] == [2, 3, 4]


@pytest.mark.parametrize("method", ["first", "lookahead", "midpoint"])
def test_validation_of_part_of_the_model_and_a_part_without_gradient(method: str) -> None:
    class Unused(Net):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Linear(3, 3)

    game = Game(Unused, validation=None)
    game.validation = lambda m: m.a(game.xv).square().sum() + m.c.weight.square().sum()
    whole = game.optimizers[0]
    with game.accountant(method, update="secant", audit_every=1) as accountant:
        for i in range(3):
            used = adamw([*game.model.a.parameters(), *game.model.b.parameters()])
            used.state.update({p: s for p, s in whole.state.items() if p in set(used.param_groups[0]["params"])})
            game.optimizers = [used]
            want = game.truth(losses(game.model, game.x[i]), method)
            game.optimizers = [whole]
            got = game.step(accountant, i)
            assert (method, i) == ("lookahead", 0) or relative_error(got, want) < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("update", ["frozen", "secant"])
def test_audits_do_not_change_contributions(method: str, update: str) -> None:
    found = []
    for audit_every in (0, 1):
        game = Game()
        with game.accountant(method, update=update, audit_every=audit_every) as accountant:
            found.append([game.step(accountant, i) for i in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_loss_scaling_then_norm_then_value_clipping() -> None:
    found = []
    for scaled in (False, True):
        model, rows = tiny(dtype=torch.float32), batch(2, 99)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
        fn = lambda m, rows=rows: next_token_loss(m, rows)  # noqa: E731
        with inrun.Accountant(model, optimizer, fn, method="midpoint", audit_every=1) as accountant:
            for step in range(3):
                with accountant.step(range(4)):
                    scaler.scale(next_token_loss(model, batch(4, step))).backward()
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                    torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        found.append(accountant.last.contributions["validation"])
    assert relative_error(*found) < 1e-4


@pytest.mark.parametrize("kind", ["sgd", "adamw", "nadam", "adafactor"])
@pytest.mark.parametrize("begun", [False, True])
def test_fidelity_puts_everything_back(kind: str, begun: bool) -> None:
    game = Game(Noisy, make=None)
    model = game.model
    model.a.bias.requires_grad_(False)
    p = [p for p in model.parameters() if p.requires_grad]
    optimizer = {
        "sgd": lambda: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        "nadam": lambda: torch.optim.NAdam(p, lr=0.01),
        "adafactor": lambda: torch.optim.Adafactor(p, lr=0.01),
    }[kind]()
    game.optimizers = [optimizer]
    accountant = game.accountant()
    if begun:
        with accountant.step(range(N)):
            losses(model, game.x[0]).sum().backward()
            optimizer.step()
    model.drop.eval()

    def snapshot() -> list:
        held = [x for s in optimizer.state.values() for x in s.values()]
        tensors = [*model.parameters(), *model.buffers(), *(q.grad for q in model.parameters()), *held]
        copies = [x.detach().clone() if isinstance(x, Tensor) else x for x in tensors]
        flags = [[m.training for m in model.modules()], [q.requires_grad for q in model.parameters()], len(optimizer.state)]
        return [[id(x) for x in tensors], [*copies, torch.get_rng_state()], flags]

    before = snapshot()
    accountant.fidelity(lambda m: losses(m, game.x[1]), permutations=2)
    after = snapshot()
    assert before[0] == after[0]
    assert before[2] == after[2]
    for x, y in zip(before[1], after[1], strict=True):
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y

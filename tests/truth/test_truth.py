"""The truth itself, held against things written differently: literal steps, brute-force permutations, scipy."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import inrun
import tiny
from inrun.errors import ConfigurationError, InrunError, OptimizerError, ValidationError
from inrun.truth import StepGame, agreement, enumerate_values, sample_values

N = 4


class Net(nn.Module):
    """A perceptron with what goes wrong elsewhere: a tied weight, an idle one, a scalar, a buffer that counts, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.again, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.again.weight = self.inner.weight
        self.idle = nn.Parameter(torch.ones(2))
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.drop(torch.tanh(self.again(torch.tanh(self.inner(x)))))) * self.scale


class Odd(torch.optim.Optimizer):
    """An optimizer of nobody's making: a constructor of its own, state beside ``state``, and it writes into the gradient."""

    def __init__(self, named, speed: float) -> None:
        self.slow = {}
        super().__init__([p for _, p in named], {"lr": speed})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm() + 1e-3)
                    self.slow[p] = self.slow.get(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    p.add_(self.slow[p], alpha=-group["lr"])


def matrices(model: nn.Module, want: bool = True) -> list[nn.Parameter]:
    return [p for p in model.parameters() if (p.dim() == 2) == want]


OPTIMIZERS = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), 0.1)],
    "momentum": lambda m: [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=0.1)],
    "adam": lambda m: [torch.optim.Adam(m.parameters(), 0.05, amsgrad=True)],
    "adamw": lambda m: [torch.optim.AdamW(m.parameters(), 0.05, weight_decay=0.1, foreach=True)],
    "tensor lr": lambda m: [torch.optim.AdamW(m.parameters(), torch.tensor(0.05), weight_decay=0.1)],
    "groups": lambda m: [torch.optim.AdamW([{"params": matrices(m)}, {"params": matrices(m, False), "lr": 0.2}], 0.05)],
    "nadam": lambda m: [torch.optim.NAdam(m.parameters(), 0.05)],
    "radam": lambda m: [torch.optim.RAdam(m.parameters(), 0.05)],
    "adamax": lambda m: [torch.optim.Adamax(m.parameters(), 0.05)],
    "rmsprop": lambda m: [torch.optim.RMSprop(m.parameters(), 0.05, centered=True, momentum=0.5)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), 0.05)],
    "adadelta": lambda m: [torch.optim.Adadelta(m.parameters(), 1.0)],
    "asgd": lambda m: [torch.optim.ASGD(m.parameters(), 0.05)],
    "rprop": lambda m: [torch.optim.Rprop(m.parameters(), 0.01)],
    "adafactor": lambda m: [torch.optim.Adafactor(m.parameters(), 0.05)],
    "muon and adamw": lambda m: [torch.optim.Muon(matrices(m), 0.05), torch.optim.AdamW(matrices(m, False), 0.05)],
    "part": lambda m: [torch.optim.SGD(m.out.parameters(), 0.1, momentum=0.9)],
    "odd": lambda m: [Odd(m.named_parameters(), 0.05)],
}


class World:
    """A model in the middle of training, and the batch of its next step."""

    def __init__(
        self, kind: str = "adamw", n: int = N, dropout: float = 0.0, seed: int = 0, steps: int = 3, lr: float | None = None
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (n,), generator=g)
        self.vx, self.vy = torch.randn(5, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (5,), generator=g)
        self.weights = torch.ones(n, dtype=torch.float64)
        torch.manual_seed(seed)
        self.model = Net(dropout).double()
        self.optimizers = OPTIMIZERS[kind](self.model)
        for _ in range(steps):
            x, y = torch.randn(3, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (3,), generator=g)
            self.model.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        if lr is not None:
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr

    def parts(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.x), self.y, reduction="none") * self.weights / len(self.x)

    def validation(self, model: nn.Module) -> Tensor:
        return F.cross_entropy(model(self.vx), self.vy)

    def game(self, validation=None, **options) -> StepGame:
        return StepGame(self.model, self.optimizers, validation or self.validation, self.parts, **options)


def all_masks(n: int) -> Tensor:
    return torch.tensor(list(itertools.product([False, True], repeat=n)))


def literal(world: World, mask: Tensor, max_norm: float | None = None) -> float:
    """U(S) by doing it: copy model and optimizer, set the gradient, step, look."""
    whole = copy.deepcopy(world.model)
    whole.zero_grad()
    world.parts(whole).sum().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), max_norm or 1e9))
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    model, optimizers = copy.deepcopy((world.model, world.optimizers))
    for made, kept in zip(optimizers, world.optimizers, strict=True):
        if isinstance(kept, Odd):  # torch's own copy forgets attributes it does not know
            names = {p: name for name, p in world.model.named_parameters()}
            made.slow = {model.get_parameter(names[p]): value.clone() for p, value in kept.slow.items()}
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        p.grad = None if q.grad is None else torch.zeros_like(p)
    for j in mask.nonzero().flatten().tolist():
        alone = copy.deepcopy(world.model)
        alone.zero_grad()
        (F.cross_entropy(alone(world.x[j : j + 1]), world.y[j : j + 1]) * world.weights[j] / len(world.x)).backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            if q.grad is not None:
                p.grad += clip * q.grad
    for optimizer in optimizers:
        optimizer.step()
    return float(world.validation(copy.deepcopy(world.model).eval()).detach() - world.validation(model.eval()).detach())


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_utilities_are_literal_steps_of_the_real_optimizer(kind: str, max_norm: float | None) -> None:
    world = World(kind)
    masks = all_masks(N)[[0, 3, 6, 15]]
    expected = torch.tensor([literal(world, mask, max_norm) for mask in masks], dtype=torch.float64)
    assert expected[3].abs() > 1e-4
    for chunk in (None, 1, 3):
        torch.testing.assert_close(world.game(max_norm=max_norm, chunk=chunk).utilities(masks), expected, rtol=0, atol=1e-12)


def test_proxy_is_the_papers_game() -> None:
    world = World("adamw")
    sgd = World("adamw")
    sgd.optimizers = [torch.optim.SGD(sgd.model.parameters(), 0.05)]
    masks = all_masks(N)
    torch.testing.assert_close(
        world.game(proxy=True, max_norm=0.1).utilities(masks), sgd.game(max_norm=0.1).utilities(masks), rtol=0, atol=1e-13
    )


def test_a_forgotten_state_is_another_game() -> None:
    """A control that must fail: without its memory the optimizer takes other steps."""
    for kind in ("momentum", "adamw", "rmsprop", "muon and adamw", "odd"):
        world, fresh = World(kind), World(kind)
        fresh.optimizers = OPTIMIZERS[kind](fresh.model)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(
                world.game().utilities(all_masks(N)), fresh.game().utilities(all_masks(N)), rtol=1e-3, atol=1e-6
            )


# ---- axioms


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw", "muon and adamw"])
def test_axioms(kind: str) -> None:
    world = World(kind, n=5)
    world.x[3], world.y[3] = world.x[1], world.y[1]  # equals
    world.weights[4] = 0.0  # masked out
    game = world.game(max_norm=0.5)
    exact = enumerate_values(game)
    assert len(game._known) == 16  # with or without the masked sample is the same subset
    assert exact.values.dtype == torch.float64 and exact.evaluations == 32 and not exact.standard_errors.any()
    assert abs(float(exact.values.sum()) - exact.total) < 1e-12
    assert abs(float(exact.values[1] - exact.values[3])) < 1e-14 and abs(float(exact.values[1])) > 1e-6
    assert float(exact.values[4]) == 0.0
    both = enumerate_values(world.game(lambda m: world.validation(m) + 3 * m(world.x[:1]).square().sum(), max_norm=0.5))
    other = enumerate_values(world.game(lambda m: m(world.x[:1]).square().sum(), max_norm=0.5))
    torch.testing.assert_close(both.values, exact.values + 3 * other.values, rtol=0, atol=1e-12)


def test_enumeration_is_the_mean_over_all_orders() -> None:
    game = World("adamw").game()
    known = {tuple(mask.tolist()): float(u) for mask, u in zip(all_masks(N), game.utilities(all_masks(N)), strict=True)}
    expected = np.zeros(N)
    orders = list(itertools.permutations(range(N)))
    for order in orders:
        inside = [False] * N
        for i in order:
            before = known[tuple(inside)]
            inside[i] = True
            expected[i] += (known[tuple(inside)] - before) / len(orders)
    exact = enumerate_values(game)
    np.testing.assert_allclose(exact.values.numpy(), expected, rtol=0, atol=1e-14)
    assert exact.empty == known[(False,) * N] != 0


class Table:
    """A game of random utilities: as far from a sum as can be."""

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self.table = torch.rand(2**n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def utilities(self, masks: Tensor, progress=None) -> Tensor:
        return self.table[(masks.long() << torch.arange(self.n)).sum(1)]


def test_one_antithetic_pair_is_exact_for_pairwise_interactions() -> None:
    game, A = Table(5, 0), torch.randn(5, 5, dtype=torch.float64)
    m = ((torch.arange(32).unsqueeze(1) >> torch.arange(5)) & 1).double()
    game.table = ((m @ A) * m).sum(1)
    expected = (A + A.T).sum(1) / 2
    torch.testing.assert_close(enumerate_values(game).values, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(sample_values(game, 2).values, expected, rtol=0, atol=1e-14)
    assert (sample_values(game, 2, antithetic=False).values - expected).abs().max() > 0.1


@pytest.mark.parametrize("antithetic", [True, False])
@pytest.mark.parametrize("make", [lambda: Table(6, 0), lambda: World("adamw", n=6, lr=0.5).game()], ids=["table", "step"])
def test_sampling_converges_and_its_errors_are_honest(make, antithetic: bool) -> None:
    game = make()
    exact = enumerate_values(game)
    far, covered = [], []
    for seed in range(100):
        found = sample_values(game, 80, seed, antithetic)
        assert abs(float(found.values.sum()) - exact.total) < 1e-12 and (found.total, found.empty) == (exact.total, exact.empty)
        z = (found.values - exact.values).abs() / found.standard_errors
        far.append(z < 4)
        covered.append(z < scipy.stats.t.ppf(0.975, 80 // (2 if antithetic else 1) - 1))
    assert torch.stack(far).double().mean() > 0.99
    assert 0.90 < float(torch.stack(covered).double().mean()) < 0.98
    more = sample_values(game, 4000, 0, antithetic)
    assert (more.values - exact.values).abs().max() < 5 * more.standard_errors.max() < found.standard_errors.max()


def test_sampling_counts_repeats_and_reports() -> None:
    game, calls = World("sgd").game(), []
    first = sample_values(game, 5, seed=1, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (6, 6) and first.evaluations <= 2**N  # five become three pairs
    again = sample_values(game, 6, seed=1)
    assert torch.equal(first.values, again.values) and torch.equal(first.standard_errors, again.standard_errors)
    assert not torch.equal(first.values, sample_values(game, 6, seed=2).values)
    assert sample_values(game, 1).standard_errors.isinf().all()
    calls.clear()
    enumerate_values(World("sgd").game(chunk=5), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(5, 16), (10, 16), (15, 16), (16, 16)]
    enumerate_values(game, progress=True)


def test_no_subset_is_evaluated_twice() -> None:
    world, count = World("adamw"), [0]

    def counting(model: nn.Module) -> float:
        count[0] += 1
        return world.validation(model).item()  # leaves torch: one at a time

    game = world.game(counting)
    masks = all_masks(N)
    game.utilities(torch.cat([masks, masks]))
    before = count[0]
    enumerate_values(game)
    sample_values(game, 20)
    assert count[0] == before


# ---- what the user lent comes back


def bits(world: World) -> list:
    tensors = [*world.model.parameters(), *world.model.buffers(), *(p.grad for p in world.model.parameters())]
    for optimizer in world.optimizers:
        tensors += [v for p in world.model.parameters() for v in optimizer.state.get(p, {}).values()]
        tensors += list(getattr(optimizer, "slow", {}).values())
    options = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in world.optimizers]
    plain = [(id(t), t.numpy(force=True).tobytes()) if isinstance(t, Tensor) else t for t in tensors]
    modes = [m.training for m in world.model.modules()]
    states = [torch.get_rng_state().numpy().tobytes(), random.getstate(), str(np.random.get_state())]
    return [plain, repr(options), modes, states]


@pytest.mark.parametrize("kind", ["momentum", "adamw", "muon and adamw", "odd"])
@pytest.mark.parametrize("fails_at", [None, 1, 2, 6])
@pytest.mark.parametrize("chunk", [1, 3])
def test_nothing_is_touched(kind: str, fails_at: int | None, chunk: int) -> None:
    world, count = World(kind, dropout=0.2), [0]
    world.model.drop.eval()
    for p in world.model.parameters():
        p.grad = torch.randn_like(p)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(world.optimizers[0], 0.5)  # wraps optimizer.step
    fired = []
    world.optimizers[0].register_step_pre_hook(lambda *a: fired.append(1))
    pending = world.model(world.x).sum()

    def validation(model: nn.Module) -> Tensor:
        count[0] += 1
        torch.rand(1), random.random(), np.random.rand()
        if count[0] == fails_at:
            raise KeyError("on purpose")
        return world.validation(model)

    before = bits(world)
    raised = False
    try:
        game = world.game(validation, chunk=chunk, max_norm=0.1)
        enumerate_values(game)
        game.taylor_utilities(all_masks(N)[:5], 2)
    except KeyError:
        raised = True
    # Under vmap a failure inside the trial run only means "not by vmap".
    assert raised == (fails_at is not None and not (chunk == 3 and fails_at == 2))
    assert bits(world) == before
    assert not fired and scheduler.get_last_lr() == [world.optimizers[0].param_groups[0]["lr"]]
    torch.autograd.grad(pending, list(world.model.inner.parameters()))  # a backward that was pending still runs


def test_global_optimizer_hooks_do_not_fire() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    world, fired = World("adamw"), []
    handle = register_optimizer_step_post_hook(lambda *a: fired.append(1))
    try:
        world.game().utilities(all_masks(N))
        assert not fired
        world.optimizers[0].step()
        assert fired
    finally:
        handle.remove()


def test_training_on_does_not_change_the_game() -> None:
    world, twin = World("adamw"), World("adamw")
    for chunk in (1, 4):
        game = world.game(chunk=chunk)
        expected, taylor = world.game(chunk=chunk).utilities(all_masks(N)), game.taylor_utilities(all_masks(N), 2)
        before = bits(world)
        saved = copy.deepcopy((world.model.state_dict(), world.optimizers[0].state_dict()))
        F.cross_entropy(world.model(world.vx), world.vy).backward()
        world.optimizers[0].step()
        world.model.calls += 7
        torch.testing.assert_close(game.utilities(all_masks(N)), expected, rtol=0, atol=1e-15)
        torch.testing.assert_close(game.taylor_utilities(all_masks(N), 2), taylor, rtol=0, atol=1e-15)
        assert bits(world)[0] != before[0]
        world.model.load_state_dict(saved[0])
        world.optimizers[0].load_state_dict(saved[1])
    torch.testing.assert_close(twin.game(chunk=4).utilities(all_masks(N)), expected, rtol=0, atol=1e-15)


def test_gradients_are_those_of_the_step_that_follows_dropout_included() -> None:
    world = World("adamw", dropout=0.3)
    game = world.game()
    world.model.zero_grad()
    world.parts(world.model).sum().backward()
    real = torch.cat([p.grad.flatten() for p in world.model.parameters() if p.grad is not None])
    torch.testing.assert_close(game.gradients.sum(0), real, rtol=0, atol=1e-15)
    assert game.loss == pytest.approx(float(world.validation(world.model.eval()).detach()), rel=1e-14)  # no dropout in validation


# ---- vmap and the loop


def submodules(world: World):
    def loss(model: nn.Module) -> Tensor:
        assert isinstance(model, Net)
        return F.cross_entropy(model.out(torch.tanh(model.inner(world.vx))), world.vy) + model.again.weight.square().sum()

    return loss


def holding_a_weight(world: World):
    weight = world.model.out.weight.view(-1)
    return lambda model: world.validation(model) + weight.square().sum()


CALLABLES = {  # name: (validation, whether vmap may serve it)
    "plain": (lambda w: w.validation, True),
    "captures the model": (lambda w: lambda _: w.validation(w.model), True),
    "calls submodules": (submodules, True),
    "draws noise": (lambda w: lambda m: w.validation(m) * (1 + torch.rand(())), True),
    "holds a weight": (holding_a_weight, False),
    "leaves torch": (lambda w: lambda m: float(w.validation(m)), False),
    "branches": (lambda w: lambda m: w.validation(m) * (2 if m.scale > 0 else 3), False),
}


@pytest.mark.parametrize("name", CALLABLES)
def test_vmap_equals_the_loop_or_is_not_used(name: str) -> None:
    make, may_vmap = CALLABLES[name]
    world = World("adamw")
    validation = make(world)
    game, loop = world.game(validation, chunk=5), world.game(validation, chunk=1)
    torch.testing.assert_close(game.utilities(all_masks(N)), loop.utilities(all_masks(N)), rtol=0, atol=1e-13)
    assert (game._rows > 1) == may_vmap and loop._rows == 1
    assert loop.utilities(all_masks(N)).std() > 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_with_an_accountant_attached(tied: bool) -> None:
    model, rows = tiny.tiny(dropout=0.1, tied=tied), tiny.batch(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def parts(m: nn.Module) -> Tensor:
        return F.cross_entropy(m(rows[:, :-1]).transpose(1, 2), rows[:, 1:], reduction="none").mean(1) / len(rows)

    bare = StepGame(model, optimizer, tiny.validation(), parts, max_norm=1.0, chunk=1).utilities(all_masks(3))
    accountant = inrun.Accountant(model, optimizer, tiny.validation(), method="step")
    game = StepGame(model, optimizer, tiny.validation(), parts, max_norm=1.0)
    torch.testing.assert_close(game.utilities(all_masks(3)), bare, rtol=0, atol=1e-13)
    assert game._rows > 1
    accountant.close()


# ---- Taylor


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_taylor_errors_fall_at_their_order(kind: str, order: int) -> None:
    errors = []
    for lr in (4e-3, 2e-3):
        game = World(kind, lr=lr).game()
        masks = all_masks(N)[1:]
        errors.append((game.utilities(masks) - game.taylor_utilities(masks, order)).abs().mean())
    assert float(errors[0] / errors[1]) == pytest.approx(2 ** (order + 1), rel=0.1)


def test_taylor_of_a_linear_loss_is_exact() -> None:
    world = World("adamw")
    game = world.game(lambda m: 2 * m.out.weight.sum() - m.inner.bias[0])
    for order in (1, 2):
        torch.testing.assert_close(game.taylor_utilities(all_masks(N), order), game.utilities(all_masks(N)), rtol=0, atol=1e-13)


def test_taylor_through_attention() -> None:
    model, rows = tiny.tiny(), tiny.batch(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    game = StepGame(
        model, optimizer, tiny.validation(), lambda m: torch.stack([tiny.next_token_loss(m, r[None]) / 3 for r in rows])
    )
    truth, first, second = game.utilities(all_masks(3)), *(game.taylor_utilities(all_masks(3), k) for k in (1, 2))
    assert (truth - second).abs().max() < 0.2 * (truth - first).abs().max()


# ---- agreement and errors


def test_agreement_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 6, 12) * 1e-170, rng.normal(size=12)
        got = agreement(torch.tensor(a), list(b))
        assert got.spearman == pytest.approx(scipy.stats.spearmanr(a, b).statistic)
        assert got.pearson == pytest.approx(scipy.stats.pearsonr(a * 1e170, b).statistic)
        assert got.rmse == pytest.approx(np.sqrt(np.mean((a - b) ** 2)))
    assert np.isnan(agreement([0.1] * 3, [1, 2, 3]).spearman) and agreement([1, 2], [3, 9]).pearson == pytest.approx(1)


WRONG = {
    "too many to enumerate": (ConfigurationError, lambda w: enumerate_values(Table(17, 0)), "sample_values"),
    "no permutations": (ConfigurationError, lambda w: sample_values(w.game(), 0), "at least 1"),
    "masks of numbers": (ConfigurationError, lambda w: w.game().utilities(torch.zeros(2, N)), "bool"),
    "masks of another length": (ConfigurationError, lambda w: w.game().utilities(torch.zeros(2, 3, dtype=torch.bool)), r"\[B, 4\]"),
    "order": (ConfigurationError, lambda w: w.game().taylor_utilities(all_masks(N), 3), "1 or 2"),
    "chunk": (ConfigurationError, lambda w: w.game(chunk=0), "chunk"),
    "max_norm": (ConfigurationError, lambda w: w.game(max_norm=0.0), "max_norm"),
    "batch loss for sample losses": (
        ConfigurationError,
        lambda w: StepGame(w.model, w.optimizers, w.validation, w.validation),
        "vector",
    ),
    "detached": (
        ConfigurationError,
        lambda w: StepGame(w.model, w.optimizers, w.validation, lambda m: w.parts(m).detach()),
        "autograd",
    ),
    "nothing moves": (ConfigurationError, lambda w: StepGame(w.model, [], w.validation, w.parts), "no parameter moves"),
    "two owners": (ConfigurationError, lambda w: StepGame(w.model, w.optimizers * 2, w.validation, w.parts), "two optimizers"),
    "other model": (ConfigurationError, lambda w: StepGame(w.model.out, w.optimizers, w.validation, w.parts), "not in the model"),
    "lbfgs": (OptimizerError, lambda w: StepGame(w.model, torch.optim.LBFGS(w.model.parameters()), w.validation, w.parts), "LBFGS"),
    "validation vector": (ValidationError, lambda w: w.game(w.parts), "scalar"),
    "validation nan": (ValidationError, lambda w: w.game(lambda m: w.validation(m) * float("nan")), "nan"),
    "validation diverges": (
        ValidationError,
        lambda w: World("sgd", lr=1e300).game(w.validation).utilities(all_masks(N)),
        "not finite",
    ),
    "lengths": (ConfigurationError, lambda w: agreement([1, 2, 3], [1, 2]), "same length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_gets_one_clear_error(name: str) -> None:
    error, call, words = WRONG[name]
    world = World("adamw")
    before = bits(world)
    with pytest.raises(error, match=words) as caught:
        call(world)
    assert isinstance(caught.value, InrunError)
    assert bits(world) == before or name == "validation diverges"

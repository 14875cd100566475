"""Methods and updates against slow references in float64: real moves, real gradients along them, all subsets."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.attention
from torch import Tensor, nn

import inrun
from inrun.errors import ConfigurationError, OptimizerError, StepError
from inrun.old import DeferredMemoryError
from inrun.training.gpt import next_token_loss
from reference import gradients, real_move, relative_error, secant_gain
from tiny import batch, tiny, train_step, validation

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.003, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def plain(method: str) -> dict[str, str]:
    """A rule that is named is kept at every step; rough steps would take more points."""
    return {"quadrature": "midpoint"} if method == "midpoint" else {}


def shares(model: nn.Module, rows: Tensor) -> list[list[Tensor]]:
    """g_n, one sample at a time."""
    parameters = list(model.parameters())
    return [gradients(next_token_loss(model, row) / len(rows), parameters) for row in rows.split(1)]


def gradient_at(model: nn.Module, fn, moves: list[Tensor]) -> list[Tensor]:
    """∇ℓ at w + moves, on weights that are written and put back."""
    parameters = list(model.parameters())
    saved = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, d in zip(parameters, moves, strict=True):
            p.add_(d)
    found = gradients(fn(model), parameters)
    with torch.no_grad():
        for p, w in zip(parameters, saved, strict=True):
            p.copy_(w)
    return found


def hessian_product(model: nn.Module, fn, d: list[Tensor]) -> list[Tensor]:
    """H·d, forward over reverse (the engine takes reverse over reverse)."""
    names = [name for name, _ in model.named_parameters()]

    class Swapped:
        def __init__(self, values):
            self.values = values

        def __call__(self, x):
            return torch.func.functional_call(model, self.values, (x,))

    slope = torch.func.grad(lambda values: fn(Swapped(values)))
    at = {name: p.detach() for name, p in model.named_parameters()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found = torch.func.jvp(slope, (at,), (dict(zip(names, d, strict=True)),))[1]
    return [found[name] for name in names]


def expected(model, optimizer, rows: list[Tensor], fn, method: str, clip: float | None, points=((0.5, 1.0),)) -> Tensor:
    """c_n = −⟨δ_n, ∇̄⟩ from real moves of the real optimizer, for all samples of all microbatches."""
    parameters = list(model.parameters())
    g_n = [[g / len(rows) for g in sample] for part in rows for sample in shares(model, part)]
    whole = [torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
    norm = torch.stack([g.norm() for g in whole]).norm()
    c = 1.0 if clip is None else min(1.0, float(clip / (norm + 1e-6)))
    used = [c * g for g in whole]
    zero = [real_move(optimizer, p, torch.zeros_like(p)) for p in parameters]
    full = [real_move(optimizer, p, g) for p, g in zip(parameters, used, strict=True)]
    gain = [secant_gain(optimizer, p, g) for p, g in zip(parameters, used, strict=True)]
    if method == "first":
        bar = gradient_at(model, fn, [torch.zeros_like(p) for p in parameters])
    elif method == "lookahead":
        bar = gradient_at(model, fn, zero)
    elif method == "midpoint":
        found = [
            [w * g for g in gradient_at(model, fn, [z + s * (f - z) for z, f in zip(zero, full, strict=True)])] for s, w in points
        ]
        bar = [torch.stack(gs).sum(0) for gs in zip(*found, strict=True)]
    else:
        bar = gradient_at(model, fn, [torch.zeros_like(p) for p in parameters])
        d = [z + f for z, f in zip(zero, full, strict=True)]
        bar = [b + 0.5 * k for b, k in zip(bar, hessian_product(model, fn, d), strict=True)]
    return torch.stack([c * sum((g * k * b).sum() for g, k, b in zip(gs, gain, bar, strict=True)) for gs in g_n])


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("method", ["first", "lookahead", "second", "midpoint"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_secant_shares_against_real_moves(name: str, method: str, clip: float | None) -> None:
    model, fn = tiny(), validation()
    optimizer = OPTIMIZERS[name](model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    with inrun.Accountant(model, optimizer, fn, method=method, update="secant", audit_every=1, **plain(method)) as accountant:
        for step in range(4):
            rows = batch(5, step)
            # The reference divides by G; entries that cancel to rounding (key biases) have no P of their own there.
            want = expected(model, optimizer, [rows], fn, method, clip)
            got = train_step(accountant, model, optimizer, rows, clip=clip).contributions["validation"]
            assert relative_error(got, want) < 1e-7, (step, got, want)
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("method", ["second", "midpoint"])
def test_accumulation(method: str) -> None:
    """Several microbatches of different sizes, clipped, AdamW: kept until the optimizer steps."""
    model, fn = tiny(), validation()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with inrun.Accountant(model, optimizer, fn, method=method, audit_every=1, **plain(method)) as accountant:
        for step in range(3):
            parts = [batch(3, 10 * step), batch(2, 10 * step + 1, t=7)]
            want = expected(model, optimizer, parts, fn, method, 0.5)
            with accountant.step() as open_step:
                for j, rows in enumerate(parts):
                    with open_step.microbatch(range(10 * j, 10 * j + len(rows))):
                        (next_token_loss(model, rows) / 2).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            assert accountant.last.sample_ids.tolist() == [0, 1, 2, 10, 11]
            assert relative_error(accountant.last.contributions["validation"], want) < 2e-6


@pytest.mark.parametrize(
    ("quadrature", "points"),
    [
        ("trapezoid", ((0.0, 0.5), (1.0, 0.5))),
        ("simpson", ((0.0, 1 / 6), (0.5, 2 / 3), (1.0, 1 / 6))),
        ("gauss2", ((0.5 - 0.5 / math.sqrt(3), 0.5), (0.5 + 0.5 / math.sqrt(3), 0.5))),
    ],
)
def test_quadrature(quadrature: str, points) -> None:
    model, fn = tiny(), validation()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with inrun.Accountant(model, optimizer, fn, method="midpoint", quadrature=quadrature) as accountant:
        for step in range(2):
            rows = batch(4, step)
            want = expected(model, optimizer, [rows], fn, "midpoint", None, points)
            got = train_step(accountant, model, optimizer, rows).contributions["validation"]
            assert relative_error(got, want) < 1e-7


def test_gauss_makes_the_path_average_exact() -> None:
    """With SGD the shares of the path average sum to the real change of the loss, whatever its size."""
    model, fn = tiny(), validation()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    residuals = {}
    for quadrature in ("midpoint", "gauss16"):
        torch.manual_seed(0)
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        with inrun.Accountant(model, optimizer, fn, method="midpoint", quadrature=quadrature, audit_every=1) as accountant:
            for step in range(3):
                account = train_step(accountant, model, optimizer, batch(4, step)).accounts["validation"]
        residuals[quadrature] = abs(account.residual) / account.spread
    assert residuals["gauss16"] < 1e-7 < residuals["midpoint"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def net_game(lr: float, momentum: float, decay: float, n: int = 8, steps: int = 2):
    torch.manual_seed(3)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
    x, y = torch.randn(steps + 1, n, 3).double(), torch.randn(steps + 1, n, 2).double()
    xv, yv = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    return model, optimizer, x, y, lambda m: (m(xv) - yv).square().mean()


def flat(tensors) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def brute_hessian(model: nn.Module, fn) -> Tensor:
    """All second derivatives, one row at a time."""
    parameters = list(model.parameters())
    first = flat(torch.autograd.grad(fn(model), parameters, create_graph=True))
    return torch.stack([flat(torch.autograd.grad(g, parameters, retain_graph=True)) for g in first])


def shapley_by_enumeration(utility, n: int) -> Tensor:
    value = {s: float(utility(s)) for size in range(n + 1) for s in itertools.combinations(range(n), size)}
    found = torch.zeros(n, dtype=torch.float64)
    for s, u in value.items():
        for j in set(range(n)) - set(s):
            weight = math.factorial(len(s)) * math.factorial(n - len(s) - 1) / math.factorial(n)
            found[j] += weight * (value[tuple(sorted((*s, j)))] - u)
    return found


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
@pytest.mark.parametrize("method", ["first", "second"])
@pytest.mark.parametrize("update", ["auto", "sgd"])
def test_shapley_values_of_the_taylor_utility(method: str, momentum: float, decay: float, update: str) -> None:
    """Theorems 1 and 2: equal to enumerating all 256 subsets of the expanded utility, with a brute-force Hessian."""
    model, optimizer, x, y, fn = net_game(0.2, momentum, decay)
    parameters = list(model.parameters())
    with inrun.Accountant(model, optimizer, fn, method=method, update=update, check_rows=False) as accountant:
        for step in range(3):
            loss_of = lambda j, step=step: (model(x[step, j : j + 1]) - y[step, j : j + 1]).square().mean() / 8  # noqa: E731
            g_n = [flat(gradients(loss_of(j), parameters)) for j in range(8)]
            slope, hessian = flat(gradients(fn(model), parameters)), brute_hessian(model, fn)
            if update == "sgd":
                zero, gain = torch.zeros_like(slope), 0.2
            else:
                zero = flat([real_move(optimizer, p, torch.zeros_like(p)) for p in parameters])
                one = flat([real_move(optimizer, p, torch.ones_like(p)) for p in parameters])
                gain = float((zero - one).mean())

            def utility(s, zero=zero, gain=gain, g_n=g_n, slope=slope, hessian=hessian) -> Tensor:
                move = zero - gain * sum((g_n[j] for j in s), torch.zeros_like(slope))
                second = 0.5 * move @ hessian @ move if method == "second" else 0.0
                return -(slope @ move + second)

            want = shapley_by_enumeration(utility, 8)
            with accountant.step(range(8)):
                (model(x[step]) - y[step]).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert relative_error(accountant.last.contributions["validation"], want) < 1e-9


def test_second_order_by_differences() -> None:
    model, optimizer, x, y, fn = net_game(0.2, 0.9, 0.1)
    found = {}
    for hessian in ("double", "differences"):
        model, optimizer, x, y, fn = net_game(0.2, 0.9, 0.1)
        with inrun.Accountant(model, optimizer, fn, method="second", hessian=hessian) as accountant:
            for step in range(2):
                with accountant.step(range(8)):
                    (model(x[step]) - y[step]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        found[hessian] = accountant.last.contributions["validation"]
    assert relative_error(found["differences"], found["double"]) < 1e-7


@pytest.mark.parametrize("inside", [True, False])
def test_differences_go_a_longer_way_where_passes_are_rounded_by_autocast(inside: bool) -> None:
    """By the block of a callable, or by one that a model enters itself: the block is theirs and stays on."""

    class Net(nn.Sequential):
        rounds = False

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.rounds):
                return super().forward(x)

    def ways(rounds: bool) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = (Net if inside else nn.Sequential)(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Tensor] = []

        def loss(called: nn.Module) -> Tensor:
            seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            model.rounds = rounds and inside
            with torch.autocast("cpu", torch.bfloat16, enabled=rounds and not inside):
                found = called(x).float().square().mean()
            model.rounds = False
            return found

        options = {"method": "second", "hessian": "differences", "audit_every": 0, "validation_mode": "train"}
        with inrun.Accountant(model, optimizer, loss, **options) as accountant, accountant.step(range(6)):
            model(x).square().mean().backward()
            optimizer.step()
        here, *there = seen[-3:]
        return [float((w - here).norm()) for w in there]

    for short, long in zip(ways(False), ways(True), strict=True):
        assert long / short == pytest.approx(2.0 ** (16 / 3) / 10, rel=1e-2)


@pytest.mark.parametrize(("method", "order"), [("first", 2), ("second", 3), ("midpoint", 3)])
def test_convergence_order(method: str, order: int) -> None:
    """Halving the step divides the error of the sum by 2^order, for SGD with momentum."""
    errors = []
    for lr in (0.02, 0.01, 0.005):
        # All steps share the momentum buffer of a first step at its own rate, so that only this step's size differs.
        model, optimizer, x, y, fn = net_game(0.05, 0.9, 0.0)
        with inrun.Accountant(model, optimizer, fn, method=method, audit_every=1) as accountant:
            for step in range(2):
                optimizer.param_groups[0]["lr"] = 0.05 if step == 0 else lr
                with accountant.step(range(8)):
                    (model(x[step]) - y[step]).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        errors.append(abs(accountant.last.accounts["validation"].residual))
    for coarse, fine in itertools.pairwise(errors):
        assert coarse / fine == pytest.approx(2**order, rel=0.15), errors


@pytest.mark.parametrize("method", ["lookahead", "second", "midpoint"])
def test_weights_come_back_bit_for_bit(method: str) -> None:
    """Training with bitwise=True is the plain run, dropout and all, though weights are shifted at every step."""
    finals = []
    for scored in (False, True):
        model = tiny(dropout=0.2, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        accountant = None
        if scored:
            accountant = inrun.Accountant(model, optimizer, validation(), method=method, bitwise=True, audit_every=3)
        torch.manual_seed(7)
        for step in range(12):
            rows = batch(4, step)
            if accountant is not None:
                train_step(accountant, model, optimizer, rows, clip=1.0)
                continue
            next_token_loss(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finals.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_weights_come_back_when_validation_fails() -> None:
    model = tiny()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    calls = []

    def failing(m):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("no more data")
        return next_token_loss(m, batch(2, 99))

    accountant = inrun.Accountant(model, optimizer, failing, method="midpoint", audit_every=0, **plain("midpoint"))
    for step in range(2):
        train_step(accountant, model, optimizer, batch(3, step))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="no more data"):
        train_step(accountant, model, optimizer, batch(3, 2))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_two_optimizers_share_one_move() -> None:
    model, fn = tiny(tied=False), validation()
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    both = [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]
    with inrun.Accountant(model, both, fn, method="midpoint", audit_every=1, **plain("midpoint")) as accountant:
        for step in range(3):
            parameters = list(model.parameters())
            owner = {p: both[0] if any(p is q for q in matrices) else both[1] for p in parameters}
            rows = batch(4, step)
            g_n = shares(model, rows)
            whole = [torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
            middle = [
                0.5 * (real_move(owner[p], p, g) + real_move(owner[p], p, torch.zeros_like(g)))
                for p, g in zip(parameters, whole, strict=True)
            ]
            bar = gradient_at(model, fn, middle)
            gains = [secant_gain(owner[p], p, g) for p, g in zip(parameters, whole, strict=True)]
            want = torch.stack([sum((g * k * b).sum() for g, k, b in zip(gs, gains, bar, strict=True)) for gs in g_n])
            with accountant.step(range(4)):
                next_token_loss(model, rows).backward()
                for o in both:
                    o.step()
                    o.zero_grad()
            assert relative_error(accountant.last.contributions["validation"], want) < 1e-7
    with inrun.Accountant(model, both, fn, method="midpoint") as accountant, pytest.raises(StepError, match="clipped or unscaled"):
        with accountant.step(range(4)):
            next_token_loss(model, batch(4, 9)).backward()
            both[0].step()
            torch.nn.utils.clip_grad_norm_(others, 1e-3)
            both[1].step()


@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_value_clipping_is_scored_with_secant(method: str) -> None:
    """Entry by entry: the share is P ∘ (used / G) ∘ g_n, and the shares still sum to the real move."""
    model, fn = tiny(), validation()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    parameters = list(model.parameters())
    with inrun.Accountant(model, optimizer, fn, method=method, update="secant", audit_every=1, **plain(method)) as accountant:
        for step in range(3):
            rows = batch(4, step)
            g_n = shares(model, rows)
            whole = [torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
            used = [g.clamp(-0.01, 0.01) for g in whole]
            full = [real_move(optimizer, p, g) for p, g in zip(parameters, used, strict=True)]
            zero = [real_move(optimizer, p, torch.zeros_like(g)) for p, g in zip(parameters, used, strict=True)]
            at = [0.5 * (z + f) for z, f in zip(zero, full, strict=True)] if method == "midpoint" else [0 * z for z in zero]
            bar = gradient_at(model, fn, at)
            with accountant.step(range(4)):
                next_token_loss(model, rows).backward()
                torch.nn.utils.clip_grad_value_(parameters, 0.01)
                optimizer.step()
                optimizer.zero_grad()
            total = -sum(((f - z) * b).sum() for f, z, b in zip(full, zero, bar, strict=True))
            got = accountant.last.contributions["validation"]
            assert float(got.sum()) == pytest.approx(float(total), rel=1e-6)
            ratio = [
                torch.where(g.abs() < 1e-12, 0.0, (z - f) / torch.where(g == 0, 1.0, g))
                for g, f, z in zip(whole, full, zero, strict=True)
            ]
            want = torch.stack([sum((g * k * b).sum() for g, k, b in zip(gs, ratio, bar, strict=True)) for gs in g_n])
            assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize(("dtype", "accuracy"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_value_clipping_lets_the_smallest_entries_through(dtype: torch.dtype, accuracy: float) -> None:
    """Where all larger entries of a tensor are clipped to a few per cent of themselves, the smallest are what they were."""
    model = torch.nn.Linear(3, 1, bias=False).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.tensor([[2.0, 3.0, 2e-4], [1.0, 4.0, 3e-4]], dtype=dtype)
    fn = lambda m: (m.weight * torch.tensor([1e-3, 1e-3, 1.0], dtype=dtype)).sum()  # noqa: E731
    with inrun.Accountant(model, optimizer, fn, method="first", update="secant", audit_every=1) as accountant:
        for factor in (1.0, 0.7):
            used = (factor * rows).sum(0, keepdim=True).clamp(-0.01, 0.01)
            gain = secant_gain(optimizer, model.weight, used)
            with accountant.step(range(2)):
                (factor * model(rows)).sum().backward()
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
            want = (gain * used / rows.sum(0) * rows * torch.tensor([1e-3, 1e-3, 1.0], dtype=dtype)).sum(1)
            assert relative_error(accountant.last.contributions["validation"], want) < accuracy


def test_streaming_still_refuses_value_clipping_and_noise_is_refused_always() -> None:
    model = tiny()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with inrun.Accountant(model, optimizer, validation(), method="midpoint") as accountant:
        train_step(accountant, model, optimizer, batch(4, 0))
        with pytest.raises(OptimizerError, match="sign"), accountant.step(range(4)):
            next_token_loss(model, batch(4, 1)).backward()
            for p in model.parameters():
                p.grad.add_(torch.randn_like(p), alpha=0.1)
            optimizer.step()
    optimizer.zero_grad()
    with inrun.Accountant(model, optimizer, validation(), method="first") as accountant:
        with pytest.raises(OptimizerError, match="secant"), accountant.step(range(4)):
            next_token_loss(model, batch(4, 1)).backward()
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()


def test_what_helps_with_clipping_by_groups_is_said_and_helps() -> None:
    """SGD's direction is known before the backward, with update="secant" too: another method waits for the gradient."""
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(accountant: inrun.Accountant) -> None:
        with accountant.step(range(4)):
            next_token_loss(model, batch(4, 1)).backward()
            torch.nn.utils.clip_grad_norm_(next(iter(model.parameters())), 1e-3)
            optimizer.step()

    with inrun.Accountant(model, optimizer, validation(), method="first", update="secant") as accountant:
        with pytest.raises(OptimizerError, match=r'take credit="step" with method="midpoint" and update="secant"'):
            step(accountant)
    optimizer.zero_grad()
    with inrun.Accountant(model, optimizer, validation(), method="midpoint", credit="step", update="secant") as accountant:
        step(accountant)
        assert accountant.last.contributions["validation"].shape == (4,)


def test_memory_is_told_and_limited(caplog) -> None:
    model = tiny(dtype=torch.float32)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with inrun.Accountant(model, optimizer, validation(), method="midpoint", deferred_memory="1GB") as accountant:
        result = train_step(accountant, model, optimizer, batch(4, 0))
        told = [r.getMessage() for r in caplog.records if "keeps" in r.getMessage()]
        assert len(told) == 1
        assert f"keeps {result.kept_bytes / 1e6:.0f} MB" in told[0]
        expected_bytes, kept = result.expected_bytes, result.kept_bytes
        assert kept == pytest.approx(expected_bytes, rel=0.05)
    before = [p.detach().clone() for p in model.parameters()]
    with inrun.Accountant(model, optimizer, validation(), method="midpoint", deferred_memory=kept // 2) as accountant:
        with pytest.raises(DeferredMemoryError, match="lookahead"):
            train_step(accountant, model, optimizer, batch(4, 1))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with inrun.Accountant(model, optimizer, validation(), method="lookahead", deferred_memory="1GB") as accountant:
        train_step(accountant, model, optimizer, batch(4, 1))


def test_buffers_are_reused() -> None:
    model = tiny()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    with inrun.Accountant(model, optimizer, validation(), method="midpoint") as accountant:
        sizes = []
        for step in range(4):
            train_step(accountant, model, optimizer, batch(4, step))
            sizes.append(accountant.held_bytes())
        assert len(set(sizes)) == 1
        assert sizes[0] > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "lookahead", "update": "sgd"}, "lookahead"),
        ({"method": "second", "hessian": "magic"}, "differences"),
        ({"method": "midpoint", "quadrature": "gauss99"}, "gauss1"),
        ({"method": "second", "quadrature": "simpson"}, "midpoint"),
        ({"method": "midpoint", "refresh": 2}, "refresh"),
        ({"method": "third"}, "first, lookahead, second, midpoint"),
        ({"update": "exact"}, "secant"),
        ({"method": "midpoint", "deferred_memory": "lots"}, "4GB"),
    ],
)
def test_bad_choices(options, match: str) -> None:
    model = tiny()
    with pytest.raises(ConfigurationError, match=match):
        inrun.Accountant(model, torch.optim.AdamW(model.parameters()), validation(), credit="step", **options)


def test_refresh_with_secant_keeps_the_raw_gradient() -> None:
    """first+secant with refresh: the second step uses the same validation gradient with its own gain."""
    model, fn = tiny(), validation()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    stale = gradients(fn(model), list(model.parameters()))
    with inrun.Accountant(model, optimizer, fn, update="secant", refresh=2) as accountant:
        for step in range(2):
            rows = batch(4, step)
            g_n = shares(model, rows)
            whole = [torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
            gains = [secant_gain(optimizer, p, g) for p, g in zip(model.parameters(), whole, strict=True)]
            want = torch.stack([sum((g * k * b).sum() for g, k, b in zip(gs, gains, stale, strict=True)) for gs in g_n])
            got = train_step(accountant, model, optimizer, rows).contributions["validation"]
            assert relative_error(got, want) < 1e-7


ELEMENTWISE = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01, weight_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, weight_decay=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, weight_decay=0.1),
    "maximize": lambda p: torch.optim.AdamW(p, lr=0.01, maximize=True),
}


@pytest.mark.parametrize("name", list(ELEMENTWISE))
def test_shares_sum_to_the_real_move(name: str) -> None:
    """Loss scaling, two microbatches, unscaling, clipping and decay on: Σ c_n = −⟨w' − w − u(0), ∇ℓ⟩ to 1e-6."""
    model, fn = tiny(), validation()
    optimizer = ELEMENTWISE[name](model.parameters())
    parameters = list(model.parameters())
    with inrun.Accountant(model, optimizer, fn, update="secant", audit_every=1) as accountant:
        for step in range(4):
            slope = gradients(fn(model), parameters)
            zero = [real_move(optimizer, p, torch.zeros_like(p)) for p in parameters]
            before = [p.detach().clone() for p in parameters]
            with accountant.step() as open_step:
                for j in range(2):
                    with open_step.microbatch(range(3)):
                        (1024 * next_token_loss(model, batch(3, 10 * step + j)) / 2).backward()
                for p in parameters:
                    p.grad.div_(1024)
                torch.nn.utils.clip_grad_norm_(parameters, 0.3)
                optimizer.step()
                optimizer.zero_grad()
            data = [p.detach() - b - z for p, b, z in zip(parameters, before, zero, strict=True)]
            total = -sum(float((d * g).sum()) for d, g in zip(data, slope, strict=True))
            sizes = sum(float((d * g).abs().sum()) for d, g in zip(data, slope, strict=True))
            assert float(accountant.last.contributions["validation"].sum()) == pytest.approx(total, abs=1e-6 * sizes)
            assert accountant.last.clip[0] < 1.0


@pytest.mark.slow
def test_muon_beside_adamw() -> None:
    """Not elementwise: the shares of the matrices sum to the move within a few per cent, and the books say so."""
    model, fn = tiny(tied=False, dtype=torch.float32), validation()
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n]
    others = [p for p in model.parameters() if all(p is not q for q in matrices)]
    both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.002)]
    with inrun.Accountant(model, both, fn, method="midpoint", audit_every=1) as accountant:
        for step in range(8):
            with accountant.step(range(6)):
                next_token_loss(model, batch(6, step)).backward()
                for o in both:
                    o.step()
                    o.zero_grad()
            account = accountant.last.accounts["validation"]
            if step >= 2:
                assert abs(account.residual) < 0.05 * account.spread


def test_a_loss_without_a_second_derivative_names_the_way_out() -> None:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().mean()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * 2 * x / x.numel()

    x = torch.randn(2, 3).double()
    for hessian in ("double", "differences"):
        model, optimizer, xs, ys, _ = net_game(0.2, 0.9, 0.0)
        with inrun.Accountant(model, optimizer, lambda m: Once.apply(m(x)), method="second", hessian=hessian) as accountant:
            if hessian == "double":
                with pytest.raises(inrun.errors.ValidationError, match="differences"), accountant.step(range(8)):
                    (model(xs[0]) - ys[0]).square().mean().backward()
                    optimizer.step()
                continue
            with accountant.step(range(8)):
                (model(xs[0]) - ys[0]).square().mean().backward()
                optimizer.step()
            assert torch.isfinite(accountant.last.contributions["validation"]).all()


@pytest.mark.parametrize("method", ["lookahead", "second", "midpoint"])
def test_a_step_the_scaler_holds_back_scores_nothing(method: str) -> None:
    model = tiny(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with inrun.Accountant(model, optimizer, validation(), method=method, audit_every=1) as accountant:
        for step in range(3):
            with accountant.step(range(4)):
                loss = next_token_loss(model, batch(4, step)) * (float("inf") if step == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert (accountant.last.skipped is not None) == (step == 1)
            assert bool((accountant.last.contributions["validation"] == 0).all()) == (step == 1)
        assert accountant.ledger.contributions().num_rows == 8
        assert all(torch.isfinite(p).all() for p in model.parameters())


def test_half_precision_weights() -> None:
    """bfloat16 weights: shares still sum to what the books measure, to that precision."""
    model = tiny(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = batch(2, 99)
    with inrun.Accountant(
        model, optimizer, lambda m: next_token_loss(m, rows).float(), method="midpoint", audit_every=1
    ) as accountant:
        for step in range(4):
            account = train_step(accountant, model, optimizer, batch(4, step)).accounts["validation"]
        assert math.isfinite(account.data)
        assert accountant.last.contributions["validation"].dtype == torch.float32


def test_parameters_without_gradient_do_not_move() -> None:
    """A head that a batch does not use: the optimizer passes over it, and so do the zero-gradient moves."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, second: bool) -> Tensor:
            return self.b(x) if second else self.a(x)

    torch.manual_seed(0)
    model = Two().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    xv = torch.randn(3, 3).double()
    fn = lambda m: m(xv, False).square().mean() + m(xv, True).square().mean()  # noqa: E731
    for method in ("lookahead", "midpoint"):
        with inrun.Accountant(model, optimizer, fn, method=method, audit_every=1) as accountant:
            for step in range(6):
                with accountant.step(range(4)):
                    model(torch.randn(4, 3).double(), step % 3 == 2).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                account = accountant.last.accounts["validation"]
                assert account.data + account.optimizer + account.residual == pytest.approx(
                    account.loss_before - account.loss_after
                )
                if method == "midpoint" and step >= 3:
                    assert abs(account.residual) < 0.1 * account.spread

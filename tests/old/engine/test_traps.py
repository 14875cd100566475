"""Defects a second reader found or feared, each with the reference that shows it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import inrun
from inrun.errors import CoverageError, OptimizerError, RowOwnershipError, StepError
from inrun.old.engine.checks.gradients import norm_of, norms
from inrun.training.gpt import next_token_loss
from reference import contributions, gradients, relative_error, sample_gradients, secant_gain, sgd_gain
from tiny import batch, tiny, train_step, validation

D = 4


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def sgd_truth(model: nn.Module, x: torch.Tensor, lr: float = 0.1) -> torch.Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=lr)
    g_n = sample_gradients(lambda j: square(model, x[j : j + 1]), len(x), params)
    return contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], gradients(square(model, x[:1]), params))


def attach(model: nn.Module, x: torch.Tensor, kind: str = "SGD", **options):
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    return optimizer, inrun.Accountant(model, optimizer, lambda m: square(m, x[:1]), audit_every=1, credit="step", **options)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_backward_with_inputs_is_refused(kind: str) -> None:
    """The probes are not among the inputs: nothing would be scored."""
    model, x = nn.Linear(D, D).double(), floats(3, D)
    optimizer, accountant = attach(model, x, kind)
    with pytest.raises(CoverageError, match=r"weight.*inputs"), accountant.step(range(3)):
        square(model, x).backward(inputs=list(model.parameters()))
        optimizer.step()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_autograd_grad_inside_the_step_is_not_counted(kind: str) -> None:
    """A saliency pass trains nothing."""
    results = []
    for saliency in (False, True):
        model = tiny()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
        accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
        for step in range(3):
            with accountant.step(range(3)):
                loss = next_token_loss(model, batch(3, step))
                if saliency:
                    torch.autograd.grad(loss, model.norm.weight, retain_graph=True)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(accountant.last.contributions["validation"])
    assert relative_error(results[1], results[0]) < 1e-12


class Summed(nn.Module):
    """Two parameters whose validation gradients autograd hands out as one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(floats(D, seed=1)), nn.Parameter(floats(D, seed=2))

    def forward(self, x):
        return torch.tanh(x + (self.a + self.b))


def test_aliased_validation_gradients() -> None:
    model, x = Summed().double(), floats(3, D)
    optimizer, accountant = attach(model, x, "AdamW")
    for step in range(3):
        twin = copy.deepcopy(model)
        twin.__dict__.pop("forward", None)
        state = copy.deepcopy(optimizer.state_dict())
        with accountant.step(range(3)):
            square(model, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step:
            params = list(twin.parameters())
            moments = [state["state"][i] for i in range(2)]
            t = step + 1
            gains = [0.1 * 0.1 / (1 - 0.9**t) / (torch.sqrt(m["exp_avg_sq"] / (1 - 0.999 ** (t - 1))) + 1e-8) for m in moments]
            run = lambda z, twin=twin: torch.tanh(z + (twin.a + twin.b)).square().sum()  # noqa: E731
            g_n = sample_gradients(lambda j, run=run: run(x[j : j + 1]), 3, params)
            truth = contributions(g_n, gains, gradients(run(x[:1]), params))
            assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


class SharedTable(nn.Module):
    """A module without a rule whose output has no sample dimension, though its first size equals the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(floats(3, D, seed=1))

    def forward(self, x):
        return self.table * 1.0


class UsesTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = SharedTable()

    def forward(self, x):
        return torch.tanh(x + self.positions(x))


def test_a_table_of_a_module_without_samples_is_scored() -> None:
    model, x = UsesTable().double(), floats(3, 3, D)
    truth = sgd_truth(model, x)
    optimizer, accountant = attach(model, x)
    with accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


class LastPositions(nn.Module):
    """Positions after the last observed layer, with as many positions as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(D, D), nn.Embedding(8, D)

    def forward(self, x):
        return torch.tanh(self.layer(x)) + self.table(torch.arange(x.shape[1]))


@pytest.mark.parametrize("t", [3, 4])
def test_positions_after_the_last_layer(t: int) -> None:
    model, x = LastPositions().double(), floats(3, t, D)
    truth = sgd_truth(model, x)
    optimizer, accountant = attach(model, x)
    with accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


class SortedRows(nn.Module):
    """Sorts the batch so that sample 0 stays in place and two others change places."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        order = torch.tensor([0, 1, 3, 2])[: len(x)]
        return self.inner(x[order])[order]


def test_permutation_of_other_samples_is_seen() -> None:
    model, x = SortedRows().double(), floats(4, D)
    optimizer, accountant = attach(model, x)
    with pytest.raises(RowOwnershipError, match="inner"), accountant.step(range(4)):
        square(model, x).backward()
        optimizer.step()


def test_unfreezing_later_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), floats(3, D)
    model[0].weight.requires_grad_(False)
    _, accountant = attach(model, x)
    model[0].weight.requires_grad_(True)
    with pytest.raises(CoverageError, match=r"0\.weight was unfrozen"), accountant.step(range(3)):
        pass


def test_unfreezing_inside_a_step_is_refused() -> None:
    """As adapters are switched on: other parameters have gradient too, so that nothing else tells."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), floats(3, D)
    model[0].weight.requires_grad_(False)
    optimizer, accountant = attach(model, x)
    with pytest.raises(CoverageError, match=r"0\.weight was unfrozen"), accountant.step(range(3)):
        model[0].weight.requires_grad_(True)
        square(model, x).backward()
        optimizer.step()


def test_unfreezing_behind_the_validation_gradient_is_refused() -> None:
    """There was none for the parameter, which would score 0."""
    model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), floats(3, D)
    optimizer, accountant = attach(model, x, method="first")
    model[0].weight.requires_grad_(False)
    with pytest.raises(StepError, match=r"0\.weight was frozen when"), accountant.step(range(3)):
        model[0].weight.requires_grad_(True)
        square(model, x).backward()
        optimizer.step()


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    """It scores nothing meanwhile: the same contributions as if the optimizer did not have it."""
    found = []
    for known in (True, False):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)).double(), floats(3, D)
        if not known:
            model[0].weight.requires_grad_(False)
        optimizer, accountant = attach(model, x)
        model[0].weight.requires_grad_(False)
        with accountant.step(range(3)):
            square(model, x).backward()
            optimizer.step()
        found.append(accountant.last.contributions["validation"])
    torch.testing.assert_close(*found)


def test_loss_before_is_this_steps_loss_with_refresh() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), refresh=3, audit_every=1, credit="step")
    for step in range(4):
        with torch.no_grad():
            true = float(validation()(model))
        account = train_step(accountant, model, optimizer, batch(3, step)).accounts["validation"]
        assert account.loss_before == pytest.approx(true, rel=1e-12)


def test_gradient_reset_between_backwards_is_refused() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=0, credit="step")
    with pytest.raises(StepError, match="between two backwards"), accountant.step(range(3)):
        next_token_loss(model, batch(3, 0)).backward()
        optimizer.zero_grad()
        next_token_loss(model, batch(3, 1)).backward()
        optimizer.step()


def test_gradient_changed_between_microbatches_is_refused() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=0, credit="step")
    with pytest.raises(StepError, match="between two backwards"), accountant.step() as step:
        for seed in (0, 1):
            with step.microbatch(range(3)):
                next_token_loss(model, batch(3, seed)).backward()
            for p in model.parameters():
                p.grad.mul_(0.5)
        optimizer.step()


def test_failed_microbatch_breaks_the_step() -> None:
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=0, credit="step")
    with pytest.raises(StepError, match="microbatch of this step failed"), accountant.step() as step:
        with pytest.raises(KeyError), step.microbatch([0]):
            raise KeyError
        with step.microbatch(range(3)):
            next_token_loss(model, batch(3, 0)).backward()
        optimizer.step()


def test_gradient_after_an_optimizer_stepped_is_refused() -> None:
    model = tiny(tied=False)
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.SGD(model.head.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, [first, second], validation(), audit_every=0, credit="step")
    with pytest.raises((StepError, CoverageError), match=r"head\.weight"), accountant.step(range(3)):
        next_token_loss(model, batch(3, 0)).backward()
        first.step()
        model.zero_grad()
        next_token_loss(model, batch(3, 1)).backward()
        second.step()


def test_backward_outside_the_microbatch_of_an_unobserved_forward() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=0, credit="step")
    with pytest.raises(CoverageError, match=r"tokens\.weight"), accountant.step() as step:
        with step.microbatch(range(3)):
            next_token_loss(model, batch(3, 0)).backward()
        next_token_loss(model, batch(3, 1)).backward()
        optimizer.step()


def test_turned_sign_is_refused() -> None:
    model, x = nn.Linear(D, D).double(), floats(3, D)
    optimizer, accountant = attach(model, x)
    with pytest.raises(OptimizerError, match="one factor"), accountant.step(range(3)):
        square(model, x).backward()
        for p in model.parameters():
            p.grad.neg_()
        optimizer.step()


def test_token_buffer_refilled_between_microbatches() -> None:
    """Look-ups wait for the optimizer under Adam; a loader that refills one buffer must not change what was seen."""
    results = []
    for refill in (False, True):
        model = tiny(tied=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
        buffer = torch.empty(3, 9, dtype=torch.long)
        with accountant.step() as step:
            for seed in (0, 1):
                rows = batch(3, seed)
                tokens = buffer.copy_(rows[:, :-1]) if refill else rows[:, :-1]
                with step.microbatch(range(3)):
                    logits = model(tokens)
                    nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
            optimizer.step()
        results.append(accountant.last.contributions["validation"])
    assert torch.equal(results[0], results[1])


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(floats(D, seed=1))

    def forward(self, x):
        return x.exp() * self.g


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x):
        x = x * 1.0
        h = self.gate(x)
        x += h
        return x


def test_fallback_whose_input_is_overwritten_is_refused() -> None:
    model, x = Overwrites().double(), floats(3, D)
    optimizer, accountant = attach(model, x, check_rows=False)  # what it reads is not followed then
    with pytest.raises(StepError, match="Gate has no rule"), accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()


@pytest.mark.parametrize("form", ["shared", "project"])
def test_in_place_activations_may_follow(form: str) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Conv1d(2, 3, 1), nn.ReLU(inplace=True)).double()
    x = floats(3, 2, D)
    truth = sgd_truth(model, x)
    optimizer, accountant = attach(model, x, form=form)
    with accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


def test_bfloat16_model_agrees_with_its_float32_twin() -> None:
    exact, rough = tiny(dtype=torch.float32), tiny(dtype=torch.bfloat16)
    results = []
    for model in (exact, rough):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
        results.append(train_step(accountant, model, optimizer, batch(4, 0), clip=0.5).contributions["validation"])
    assert relative_error(results[1], results[0]) < 0.1


def test_autocast_passes_the_audit() -> None:
    model = tiny(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
    exact = tiny(dtype=torch.float32)
    exact_optimizer = torch.optim.SGD(exact.parameters(), lr=0.1)
    exact_accountant = inrun.Accountant(exact, exact_optimizer, validation(), audit_every=1, credit="step")
    expected = train_step(exact_accountant, exact, exact_optimizer, batch(4, 0)).contributions["validation"]
    with accountant.step(range(4)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = next_token_loss(model, batch(4, 0))
        loss.backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], expected) < 0.1


class LowRank(nn.Module):
    """LoRA's start: B = 0, so A has no gradient at the first step and no history at the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return x + self.b(self.a(x))


def test_parameter_without_any_history_waits() -> None:
    model, x = LowRank().double(), floats(3, D)
    optimizer, accountant = attach(model, x, "AdamW")
    with accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    params = list(model.parameters())
    with accountant.paused():
        g_n = sample_gradients(lambda j: square(model, x[j : j + 1]), 3, params)
        g_val = gradients(square(model, x[:1]), params)
    whole = [torch.stack([g[i] for g in g_n]).sum(0) for i in range(2)]
    state = optimizer.state[params[1]]
    frozen = 0.1 * 0.1 / (1 - 0.9**2) / (torch.sqrt(state["exp_avg_sq"] / (1 - 0.999)) + 1e-8)
    truth = contributions(g_n, [secant_gain(optimizer, params[0], whole[0]), frozen], g_val)
    with accountant.step(range(3)):
        square(model, x).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9
    assert accountant.last.zero_gains == params[0].numel()


def test_model_with_accountant_can_be_copied_and_its_weights_saved(tmp_path) -> None:
    model, x = nn.Linear(D, D).double(), floats(3, D)
    attach(model, x)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert "_inrun_accountant" not in model.__dict__


def test_subclass_that_keeps_the_step_is_known() -> None:
    from inrun.old.optimizers import find_update

    class Renamed(torch.optim.AdamW):
        pass

    assert find_update(Renamed([nn.Parameter(torch.zeros(1))])) is not None


def test_ledger_has_the_rate_of_the_step() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
    accountant = inrun.Accountant(model, optimizer, validation(), credit="step")
    with accountant.step(range(3)):
        next_token_loss(model, batch(3, 0)).backward()
        optimizer.step()
        schedule.step()
    assert accountant.ledger.accounts()["lr"].to_pylist() == [0.1]


class DropsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(floats(D, seed=1))

    def forward(self, x):
        return nn.functional.dropout(x * self.g, 0.5, self.training)


def test_eval_mode_between_forward_and_backward() -> None:
    """A fallback runs again in the mode of its call; conservation is checked on this step."""
    model, x = DropsOut().double().train(), floats(3, D)
    optimizer, accountant = attach(model, x)
    with accountant.step(range(3)):
        loss = square(model, x)
        model.eval()
        loss.backward()
        optimizer.step()
    assert not model.training
    assert accountant.last.audited


def test_fused_optimizer_divides_the_loss_scale_out() -> None:
    """GradScaler hands a fused optimizer the scale; scores and audit must see the gradient that is used."""
    results = []
    for scaled in (False, True):
        model = tiny(dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        accountant = inrun.Accountant(model, optimizer, validation(), audit_every=1, credit="step")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(3):
            with accountant.step(range(3)):
                scaler.scale(next_token_loss(model, batch(3, step))).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        results.append(accountant.last.contributions["validation"])
    assert relative_error(results[1], results[0]) < 1e-4


@pytest.mark.parametrize("kind", ["sgd", "adamw", "adamw fused"])
@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_a_loss_scaler_does_not_scale_the_scores(kind: str, method: str) -> None:
    """The scaler's kernel writes gradients without counting the write; scores must be those of the unscaled run all the same."""
    found = []
    for scaled in (False, True):
        model = tiny(dtype=torch.float32)
        p = model.parameters()
        optimizer = torch.optim.SGD(p, lr=0.1) if kind == "sgd" else torch.optim.AdamW(p, lr=1e-3, fused=kind == "adamw fused")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        with inrun.Accountant(model, optimizer, validation(), method=method, audit_every=0) as accountant:
            for step in range(3):
                with accountant.step(range(4)):
                    scaler.scale(next_token_loss(model, batch(4, step))).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
            found.append(accountant.last.contributions["validation"])
    assert relative_error(found[1], found[0]) < 1e-4


def test_a_large_weight_is_not_taken_for_a_changed_gradient():
    # torch's norm of three million entries of mixed size is off by 1e-4: more than what tells one factor from another change.
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(3072, 1024, generator=generator) * torch.logspace(-4, 0, 1024)
    truth = float(gradient.double().norm())
    assert abs(float(norm_of(gradient)) / truth - 1) < 1e-6
    assert abs(float(torch.linalg.vector_norm(gradient)) / truth - 1) > 1e-5  # the control: why it is not enough
    for shape in ((), (1,), (1023,), (1024,), (1025,), (3, 1024, 1024), (0,)):
        some = torch.randn(shape, generator=generator)
        assert torch.allclose(norm_of(some), some.double().norm().float(), rtol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_that_fails_on_its_way_is_not_settled(fails: bool) -> None:
    """Gradients are measured when their backward has ended; of one that never did, clipping could not be told."""

    class Fragile(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = self[0](x)
            if fails and torch.is_grad_enabled() and len(x) > 1:
                between.register_hook(lambda g: 1 / 0)
            return self[1](between)

    model, x = Fragile(nn.Linear(D, D), nn.Linear(D, D)).double(), floats(3, D)
    optimizer, accountant = attach(model, x)
    with contextlib.ExitStack() as expected:
        if fails:
            expected.enter_context(pytest.raises(StepError, match="failed on its way"))
        with accountant.step(range(3)):
            with contextlib.suppress(ZeroDivisionError):
                square(model, x).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


def test_norms_of_many_gradients_are_those_of_each() -> None:
    """Small ones go in one call, large and coarse ones in pieces; the order is theirs."""
    shapes = [(3,), (300, 200), (0,), (7, 5), (2, 2)]
    kinds = [torch.float64, torch.float32, torch.float64, torch.bfloat16, torch.float32]
    gradients = [floats(*shape, seed=i).to(kind) for i, (shape, kind) in enumerate(zip(shapes, kinds, strict=True))]
    for found, g in zip(norms(gradients), gradients, strict=True):
        assert float(found) == pytest.approx(float(g.double().norm()), rel=1e-6)

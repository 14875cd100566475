"""The merged pass: training and validation rows in one forward and backward, against the separate pass and plain autograd."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import inrun
from inrun.errors import ConfigurationError, ConservationError, CoverageError, StepError, ValidationError
from problems import PROBLEMS, Problem, perceptron, points, token_losses
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain
from tiny import VOCAB, batch

N, M = 4, 3


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
}


def train(problem: Problem, optimizer: str, update: str, mode: str, per_point: bool = False, form: str = "auto", steps: int = 4):
    """Return contributions of all steps and the weights after them; ``mode`` is plain, separate, merged or added."""
    torch.manual_seed(0)
    model = problem.build().double()
    opt = OPTIMIZERS[optimizer](model)
    held = problem.draw(M, 99)

    def validation(m: nn.Module) -> Tensor:
        losses = problem.losses(m(held), held)
        return losses if per_point else losses.mean()

    accountant = None
    if mode != "plain":
        fn = validation if mode == "separate" else None
        accountant = inrun.Accountant(model, opt, fn, method="first", update=update, form=form, audit_every=2)
    found = []
    for number in range(steps):
        rows = problem.draw(N, number)
        if accountant is None:
            problem.losses(model(rows), rows).mean().backward()
            _update(model, opt)
            continue
        if mode == "separate":
            with accountant.step(range(N)):
                problem.losses(model(rows), rows).mean().backward()
                _update(model, opt)
        else:
            with accountant.step(range(N), merged=M, points=per_point) as step:
                out = model(torch.cat([rows, held]))
                ours, theirs = problem.losses(out[:N], rows).mean(), problem.losses(out[N:], held)
                theirs = theirs if per_point else theirs.mean()
                # A loss scaler multiplies both parts; merge() tells it apart.
                loss = step.merge(ours, theirs) * 64.0 if mode == "merged" else ours + theirs.sum()
                loss.backward()
                if mode == "merged":
                    for p in model.parameters():
                        p.grad /= 64.0
                _update(model, opt)
        found.append(accountant.last.contributions["validation"])
    if accountant is not None:
        accountant.close()
    return (torch.stack(found) if found else None), [p.detach() for p in model.parameters()], accountant


def _update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


CASES = [
    (problem, optimizer, update, per_point)
    for problem in PROBLEMS
    for optimizer, update in (("sgd", "frozen"), ("adamw", "frozen"), ("adamw", "sgd"))
    for per_point in (False, True)
]


@pytest.mark.parametrize(("problem", "optimizer", "update", "per_point"), CASES)
def test_merged_equals_separate_and_trains_the_same(problem: str, optimizer: str, update: str, per_point: bool) -> None:
    chosen = PROBLEMS[problem]
    expected, _, _ = train(chosen, optimizer, update, "separate", per_point)
    _, plain, _ = train(chosen, optimizer, update, "plain")
    for mode in ("merged", "added"):
        got, weights, _ = train(chosen, optimizer, update, mode, per_point)
        assert got.shape == expected.shape == ((4, N, M) if per_point else (4, N))
        assert relative_error(got, expected) < 1e-9
        assert all(relative_error(w, p) < 1e-9 for w, p in zip(weights, plain, strict=True))


@pytest.mark.parametrize("form", ["shared", "project", "gram"])
@pytest.mark.parametrize("problem", list(PROBLEMS))
def test_forms_agree(problem: str, form: str) -> None:
    expected, _, _ = train(PROBLEMS[problem], "sgd", "sgd", "separate", steps=3)
    got, _, accountant = train(PROBLEMS[problem], "sgd", "sgd", "added", form=form, steps=3)
    assert relative_error(got, expected) < 1e-9
    assert any(form in row.form for row in accountant.coverage)


def test_against_one_sample_at_a_time() -> None:
    problem = PROBLEMS["repeating"]
    torch.manual_seed(0)
    model = problem.build().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, held = problem.draw(N, 0), problem.draw(M, 99)
    parameters = list(model.parameters())
    each = sample_gradients(lambda j: problem.losses(model(rows[j : j + 1]), rows[j : j + 1])[0] / N, N, parameters)
    towards = gradients(problem.losses(model(held), held).mean(), parameters)
    total = [sum(g[i] for g in each) for i in range(len(parameters))]
    gains = [sgd_gain(opt, p, p) for p in parameters]
    with inrun.Accountant(model, opt, update="sgd") as accountant:
        with accountant.step(range(N), merged=M) as step:
            out = model(torch.cat([rows, held]))
            step.merge(problem.losses(out[:N], rows).mean(), problem.losses(out[N:], held).mean()).backward()
            assert all(relative_error(p.grad, g) < 1e-9 for p, g in zip(parameters, total, strict=True))
            opt.step()
        got = accountant.last
        assert relative_error(got.contributions["validation"], contributions(each, gains, towards)) < 1e-9
        assert got.losses["validation"] == pytest.approx(problem.losses(out[N:], held).mean().item())
        assert accountant.about()["merged"] is True


def test_control_cross_terms_matter() -> None:
    """A layer that is used twice, scored use by use, would be far off: the books see it."""
    problem = PROBLEMS["repeating"]
    torch.manual_seed(0)
    model = problem.build().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, held = problem.draw(N, 0), problem.draw(M, 99)
    with inrun.Accountant(model, opt, update="sgd", check_rows=False) as accountant:
        capture = accountant._run.capture
        with pytest.raises(StepError, match="more than once"), accountant.step(range(N), merged=M):
            model(torch.cat([rows, held]))
        assert [site.name for site in capture.repeated] == ["twice"]
        capture.repeated = _Forgetful()
        with pytest.raises(ConservationError, match="twice.weight"), accountant.step(range(N), merged=M):
            out = model(torch.cat([rows, held]))
            (problem.losses(out[:N], rows).mean() + problem.losses(out[N:], held).mean()).backward()
            opt.step()


class _Forgetful(set):
    """Says of no module that it runs twice, except when it is asked whether to complain."""

    def __contains__(self, site: object) -> bool:
        return inspect.currentframe().f_back.f_code.co_name == "_note_call"


def merged_step(model: nn.Module, accountant, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    rows, held = points(N, 0), points(M, 99)
    with accountant.step(range(N), merged=M) as step:
        out = model(torch.cat([rows, held]))
        loss(step, out, torch.cat([rows, held])[:, :3].sin()).backward()
        for opt in accountant.optimizers:
            opt.step()
            opt.zero_grad()


def mse(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().mean()


WRONG_LOSSES = {
    "no validation part": (lambda step, out, y: mse(out[:N], y[:N]), "last 3 rows"),
    "no training part": (lambda step, out, y: mse(out[N:], y[N:]), "exactly 0"),
    "training loss over all rows": (lambda step, out, y: step.merge(mse(out, y), mse(out[N:], y[N:])), "training loss"),
    "validation loss over all rows": (lambda step, out, y: step.merge(mse(out[:N], y[:N]), mse(out, y)), "validation loss"),
    "training loss without a graph": (
        lambda step, out, y: step.merge(mse(out[:N], y[:N]).detach(), mse(out[N:], y[N:])),
        "a graph",
    ),
    "a vector": (lambda step, out, y: step.merge(mse(out[:N], y[:N]), (out[N:] - y[N:]).mean(1)), r"\(3,\)"),
}


@pytest.mark.parametrize("name", list(WRONG_LOSSES))
def test_wrong_losses_are_seen(name: str) -> None:
    loss, text = WRONG_LOSSES[name]
    model = perceptron().double()
    with (
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1)) as accountant,
        pytest.raises(ValidationError, match=text),
    ):
        merged_step(model, accountant, loss)


OPTIONS = {
    "second": {"method": "second"},
    "midpoint": {"method": "midpoint"},
    "lookahead": {"method": "lookahead"},
    "whole": {"credit": "whole"},
    "refresh": {"refresh": 2},
    "bitwise": {"bitwise": True},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_what_one_pass_cannot_give_is_refused_by_name(name: str) -> None:
    model = perceptron()
    with pytest.raises(ConfigurationError, match=f"{name}.*validation="):
        inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1), **OPTIONS[name])


def test_gram_is_refused_where_gains_differ_by_entry() -> None:
    model = perceptron()
    with pytest.raises(ConfigurationError, match="gram"):
        inrun.Accountant(model, torch.optim.AdamW(model.parameters()), form="gram")
    with pytest.raises(ConfigurationError, match="gram"):
        inrun.Accountant(model, torch.optim.SGD(model.parameters()), lambda m: m(points(1, 0)).mean(), update="sgd", form="gram")


MODELS = {
    "recurrent": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LSTM(6, 3)), "weight_ih_l0, .* of 1 .LSTM"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), "batch norm in training mode"),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_that_would_leak_are_refused(name: str) -> None:
    build, text = MODELS[name]
    model = build().double()
    with inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1)) as accountant:
        with pytest.raises(CoverageError, match=text), accountant.step(range(N), merged=M):
            pass
        if name == "batch norm":
            model.eval()
            merged_step(model, accountant, lambda step, out, y: step.merge(mse(out[:N], y[:N]), mse(out[N:], y[N:])))


def test_parameters_in_no_optimizer_are_refused() -> None:
    model = perceptron().double()
    with (
        inrun.Accountant(model, torch.optim.SGD(model[0].parameters(), lr=0.1)) as accountant,
        pytest.raises(CoverageError, match=r"2\.weight.*Freeze"),
        accountant.step(range(N), merged=M),
    ):
        pass


def test_steps_that_do_not_fit_are_refused() -> None:
    model = perceptron().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    held = points(M, 99)
    with inrun.Accountant(model, opt) as accountant:
        for arguments, kind, text in (
            ({"ids": range(N)}, ConfigurationError, "merged=m"),
            ({"merged": M}, StepError, "microbatches"),
            ({"ids": range(N), "merged": 0}, ConfigurationError, "at least 1"),
        ):
            with pytest.raises(kind, match=text):
                accountant.step(**arguments)
        with pytest.raises(ConfigurationError, match="validation="):
            accountant.validation_loss()[1](model)
    with inrun.Accountant(model, opt, lambda m: m(held).square().mean(), credit="step") as accountant:
        with pytest.raises(StepError, match="already"):
            accountant.step(range(N), merged=M)
        with pytest.raises(StepError, match="merged step"), accountant.step(range(N)) as step:
            step.merge(torch.ones(()), torch.ones(()))


def test_dropout_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for rate, expected in ((0.0, False), (0.5, True)):
        model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate), nn.Linear(6, 3)).double()
        caplog.clear()
        with inrun.Accountant(model, torch.optim.SGD(model.parameters(), lr=0.1)) as accountant:
            merged_step(model, accountant, lambda step, out, y: step.merge(mse(out[:N], y[:N]), mse(out[N:], y[N:])))
        assert ("dropout in training mode (1)" in caplog.text) is expected


def test_two_backwards_are_refused() -> None:
    model = perceptron().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, held = points(N, 0), points(M, 99)
    with (
        inrun.Accountant(model, opt) as accountant,
        pytest.raises(StepError, match="one backward"),
        accountant.step(range(N), merged=M),
    ):
        out = model(torch.cat([rows, held]))
        out[:N].square().mean().backward(retain_graph=True)
        out[N:].square().mean().backward()
        opt.step()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints(reentrant: bool) -> None:
    problem = PROBLEMS["perceptron"]

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), perceptron()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    class Straight(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.first(x))

    expected, _, _ = train(Problem(Straight, problem.draw, problem.losses), "adamw", "frozen", "separate")
    got, _, _ = train(Problem(Checkpointed, problem.draw, problem.losses), "adamw", "frozen", "added")
    assert relative_error(got, expected) < 1e-9


def test_half_precision_without_merge_is_refused() -> None:
    """Its losses are scaled, which nobody but merge() can tell from clipping."""
    model = perceptron()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.cat([points(N, 0), points(M, 99)]).float()
    with inrun.Accountant(model, opt) as accountant:
        for merges in (False, True):
            refused = contextlib.nullcontext() if merges else pytest.raises(StepError, match=r"step\.merge")
            with refused, accountant.step(range(N), merged=M) as step:
                with torch.autocast("cpu", torch.float16):
                    out = model(rows).float()
                ours, theirs = out[:N].square().mean(), out[N:].square().mean()
                (step.merge(ours, theirs) if merges else ours + theirs).backward()
                opt.step()
            opt.zero_grad()


def test_autocast_agrees_with_single_precision() -> None:
    problem = PROBLEMS["perceptron"]

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = perceptron()

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.training):
                out = self.inner.float()(x.float())
            return out.double()

    class Full(Rounded):
        def forward(self, x: Tensor) -> Tensor:
            return self.inner.float()(x.float()).double()

    expected, _, _ = train(Problem(Full, problem.draw, problem.losses), "sgd", "sgd", "added", steps=1)
    got, _, _ = train(Problem(Rounded, problem.draw, problem.losses), "sgd", "sgd", "added", steps=1)
    assert relative_error(got, expected) < 2e-2


def test_compiled_models_are_refused() -> None:
    model = perceptron().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    with (
        inrun.Accountant(compiled, opt) as accountant,
        pytest.raises(StepError, match="not compiled"),
        accountant.step(range(N), merged=M),
    ):
        compiled(torch.cat([points(N, 0), points(M, 99)]))


@pytest.mark.parametrize("name", ["a rate of 0", "all masked", "all masked, added up"])
def test_steps_in_which_nobody_scores_anything(name: str) -> None:
    """A warm-up from 0, and training rows that are all masked: 0 is right. What cannot be told from a missing part is asked for."""
    model, mask = perceptron().double(), 0.0 if "masked" in name else 1.0

    def loss(step: Any, out: Tensor, y: Tensor) -> Tensor:
        train, held = mse(out[:N], y[:N]) * mask, mse(out[N:], y[N:])
        return train + held if name != "all masked" else step.merge(train, held)

    opt = torch.optim.SGD(model.parameters(), lr=0.0 if "rate" in name else 0.1)
    with inrun.Accountant(model, opt) as accountant:
        if name == "all masked, added up":
            with pytest.raises(ValidationError, match=r"exactly 0.*all are masked.*step\.merge"):
                merged_step(model, accountant, loss)
            return
        merged_step(model, accountant, loss)
        assert accountant.last.contributions["validation"].tolist() == [0.0] * N
        opt.param_groups[0]["lr"] = 0.1
        merged_step(model, accountant, lambda step, out, y: step.merge(mse(out[:N], y[:N]), mse(out[N:], y[N:])))
        assert bool((accountant.last.contributions["validation"] != 0).all())


LOST = {
    "a detached validation loss": (lambda out, y: mse(out[N:], y[N:]).detach(), "without a graph"),
    "the validation loss of training rows": (lambda out, y: mse(out[:M], y[:M]), "exactly 0"),
}


@pytest.mark.parametrize("name", list(LOST))
def test_a_lost_validation_part_is_seen_on_any_step(name: str) -> None:
    """Also where both losses are told, and between audits."""
    model = perceptron().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    held, message = LOST[name]
    with inrun.Accountant(model, opt, credit="step", update="sgd", audit_every=0) as accountant:
        for _ in range(2):
            merged_step(model, accountant, lambda step, out, y: step.merge(mse(out[:N], y[:N]), mse(out[N:], y[N:])))
        with pytest.raises(ValidationError, match=message):
            merged_step(model, accountant, lambda step, out, y: step.merge(mse(out[:N], y[:N]), held(out, y)))


def test_a_first_group_that_stands_still_hides_nothing() -> None:
    model = perceptron().double()
    first, *others = model.parameters()
    opt = torch.optim.SGD([{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.1}])
    with inrun.Accountant(model, opt, credit="step", update="sgd", audit_every=0) as accountant:
        for _ in range(2):
            merged_step(model, accountant, lambda step, out, y: mse(out[:N], y[:N]) + mse(out[N:], y[N:]))
        with pytest.raises(ValidationError, match="exactly 0"):
            merged_step(model, accountant, lambda step, out, y: mse(out[:N], y[:N]))


class Tied(nn.Module):
    """Token tables and a head of one weight; ``order`` names the calls of a forward, ``saved`` those in a checkpoint."""

    def __init__(self, order: str = "table inner head", bias: bool = False, padding: int | None = None, saved: str = "") -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(VOCAB, 6, padding_idx=padding), nn.Embedding(VOCAB, 6)
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, VOCAB, bias=bias)
        self.head.weight = self.table.weight
        self.order, self.saved = order.split(), saved
        if "other" in self.order:
            self.other.weight = self.table.weight
        else:
            del self.other

    def forward(self, rows: Tensor) -> Tensor:
        x = torch.sin(rows.unsqueeze(-1) + torch.arange(6.0, dtype=torch.float64))
        for place, name in enumerate(self.order):
            call = getattr(self, name)
            if name in self.saved:
                call = functools.partial(torch.utils.checkpoint.checkpoint, call, use_reentrant=False)
            if name in ("table", "other"):
                x = x + call(rows if name == "table" else rows.flip(1))
            elif name == "head" and place + 1 < len(self.order):
                x = x + call(x)[..., :6]
            else:
                x = call(x) if name == "head" else torch.tanh(call(x))
        return x


class SequenceFirst(nn.Module):
    """Samples are in the second dimension, or go round in the first; a layer that runs twice, a table and a head of one weight."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.table, self.twice, self.norm, self.head = nn.Embedding(VOCAB, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, VOCAB)
        self.head.weight, self.flat = self.table.weight, flat

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows.t().reshape(-1) if self.flat else rows.t())
        x = self.head(self.norm(self.twice(torch.tanh(self.twice(x)))))
        return (x.unflatten(0, (-1, len(rows))) if self.flat else x).transpose(0, 1)


@pytest.mark.parametrize(("optimizer", "update"), [("sgd", "sgd"), ("adamw", "frozen"), ("adamw", "secant")])
@pytest.mark.parametrize("flat", [False, True])
def test_samples_in_the_second_dimension(flat: bool, optimizer: str, update: str) -> None:
    """What is kept of the training rows is told by their number, wherever they lie."""
    problem = Problem(lambda: SequenceFirst(flat), batch, token_losses)
    expected, _, _ = train(problem, optimizer, update, "separate")
    got, _, _ = train(problem, optimizer, update, "merged")
    assert relative_error(got, expected) < 1e-9


TIED = {
    "plain": (Tied, False),
    "a bias, padding": (lambda: Tied(bias=True, padding=3), False),
    "two tables": (lambda: Tied("table other inner head"), False),
    "recomputed head": (lambda: Tied(saved="head"), False),
    "recomputed table": (lambda: Tied(saved="table"), False),
    "a recomputed head before the table": (lambda: Tied("inner head table", saved="head"), True),
    "a table after the head": (lambda: Tied("table inner head other inner"), True),
    "a head that runs twice": (lambda: Tied("table head inner head"), True),
}


@pytest.mark.parametrize("per_point", [False, True])
@pytest.mark.parametrize(("optimizer", "update"), [("sgd", "sgd"), ("adamw", "frozen"), ("adamw", "secant")])
@pytest.mark.parametrize("name", list(TIED))
def test_tied_heads(name: str, optimizer: str, update: str, per_point: bool) -> None:
    """Only the rows of the validation rows' tokens wait, unless other uses of the weight come later."""
    build, kept = TIED[name]
    problem = Problem(
        build, batch, token_losses if "after" not in name and "before" not in name else lambda out, rows: out.square().mean((1, 2))
    )
    expected, _, _ = train(problem, optimizer, update, "separate", per_point)
    for mode in ("merged", "added"):
        got, _, accountant = train(problem, optimizer, update, mode, per_point)
        assert relative_error(got, expected) < 1e-9
    (forms,) = {row.form for row in accountant.coverage if row.module == "head"}
    if update == "sgd":
        assert ("kept" in forms) is kept


class Registered(nn.Module):
    """A head whose bias is registered around it, too, as BERT's is; ``how`` it is used there."""

    def __init__(self, how: str = "by the layer") -> None:
        super().__init__()
        self.table, self.inner, self.head, self.how = nn.Embedding(VOCAB, 6), nn.Linear(6, 6), nn.Linear(6, VOCAB), how
        self.bias = nn.Parameter(torch.zeros(VOCAB)) if how == "its own" else self.head.bias

    def forward(self, rows: Tensor) -> Tensor:
        out = self.head(torch.tanh(self.inner(self.table(rows))))
        return out if self.how == "by the layer" else out + self.bias


@pytest.mark.parametrize(("optimizer", "update"), [("sgd", "sgd"), ("adamw", "frozen"), ("adamw", "secant")])
def test_parameters_that_a_module_registers_and_a_layer_uses(optimizer: str, update: str) -> None:
    problem = Problem(Registered, batch, token_losses)
    expected, weights, _ = train(problem, optimizer, update, "separate")
    got, same, _ = train(problem, optimizer, update, "merged")
    assert relative_error(got, expected) < 1e-9
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(weights, same, strict=True))


@pytest.mark.parametrize(
    ("how", "message"), [("by both", "the model itself .Registered. reads bias itself"), ("its own", "bias of the model itself")]
)
def test_parameters_that_a_module_reads_are_refused_by_name(how: str, message: str) -> None:
    with pytest.raises(CoverageError, match=message):
        train(Problem(lambda: Registered(how), batch, token_losses), "sgd", "sgd", "merged")


def test_a_tied_head_keeps_few_rows() -> None:
    model = Tied().double()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, held = batch(N, 0), batch(1, 99)[:, :3].repeat(1, 4)[:, :10]
    with inrun.Accountant(model, opt, update="sgd") as accountant:
        with accountant.step(range(N), merged=1) as step:
            out = model(torch.cat([rows, held]))
            step.merge(token_losses(out[:N], rows).mean(), token_losses(out[N:], held).mean()).backward()
            crossing = step.microbatches[0].crossing
            assert [(x.rows.tolist(), x.kept.kind.__name__) for x in crossing] == [(sorted(set(held[0].tolist())), "Formed")]
            # Few rows of the head, and output gradients and tokens of the look-up.
            assert step.expected_bytes()[0] == 8 * (N * len(set(held[0].tolist())) * 6 + N * 10 * 6 + N * 10)
            opt.step()


def test_control_cross_terms_of_tables_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look-ups' part the books do not balance."""
    monkeypatch.setattr("inrun.old.engine.merged.MergedMicrobatch._cross", lambda self: None)
    with pytest.raises(ConservationError, match=r"table\.weight"):
        train(Problem(Tied, batch, token_losses), "sgd", "sgd", "added")

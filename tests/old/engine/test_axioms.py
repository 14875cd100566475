"""The four Shapley axioms on the first-order utility, and a brute-force check that it is the Shapley value."""

from __future__ import annotations

import itertools
import math

import torch

import inrun
from inrun.training.gpt import next_token_loss
from reference import gradients, relative_error
from tiny import batch, tiny, train_step, validation


def setup(**options):
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return model, optimizer, inrun.Accountant(model, optimizer, options.pop("validation", validation()), credit="step", **options)


def test_efficiency() -> None:
    """Σ c_n is the first-order fall of the validation loss due to the batch gradient."""
    model, optimizer, accountant = setup(audit_every=1)
    rows = batch(6, 1)
    params = list(model.parameters())
    g_val = gradients(validation()(model), params)
    g = gradients(next_token_loss(model, rows), params)
    fall = 0.05 * sum((a * b).sum() for a, b in zip(g, g_val, strict=True))
    result = train_step(accountant, model, optimizer, rows)
    assert abs(result.contributions["validation"].sum() - fall) < 1e-12 * abs(fall) + 1e-15


def test_symmetry() -> None:
    model, optimizer, accountant = setup()
    rows = batch(6, 1)
    rows[4] = rows[1]
    c = train_step(accountant, model, optimizer, rows).contributions["validation"]
    assert abs(c[4] - c[1]) < 1e-12 * c.abs().max()
    assert abs(c[4] - c[2]) > 1e-3 * c.abs().max()


def test_null_player() -> None:
    """A sample that is masked out of the loss gets exactly 0, in either form, with SGD and Adam."""
    for form, kind in itertools.product(("shared", "project"), ("SGD", "AdamW")):
        model = tiny()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05)
        accountant = inrun.Accountant(model, optimizer, validation(), form=form, credit="step")
        for step in range(3):
            rows = batch(6, step)
            with accountant.step(range(6)):
                logits = model(rows[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(6, -1)
                mask = torch.ones(6, 1, dtype=loss.dtype)
                mask[2] = 0
                (loss * mask).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            c = accountant.last.contributions["validation"]
            assert c[2] == 0
            assert (c[[0, 1, 3, 4, 5]] != 0).all()


def test_linearity_over_validation_sets() -> None:
    a, b = validation(1), validation(2)
    model, optimizer, accountant = setup(validation={"a": a, "b": b, "mix": lambda m: 0.3 * a(m) + 2 * b(m)})
    c = train_step(accountant, model, optimizer, batch(5, 1)).contributions
    assert relative_error(c["mix"], 0.3 * c["a"] + 2 * c["b"]) < 1e-12


def test_shapley_values_by_enumeration() -> None:
    """Contributions are the Shapley values of U(S) = first-order fall of the loss, by all subsets of a batch of 5."""
    n = 5
    model, optimizer, accountant = setup()
    rows = batch(n, 1)
    params = list(model.parameters())
    g_val = gradients(validation()(model), params)

    def utility(subset: tuple[int, ...]) -> float:
        if not subset:
            return 0.0
        share = next_token_loss(model, rows[list(subset)]) * len(subset) / n
        g = gradients(share, params)
        return float(0.05 * sum((a * b).sum() for a, b in zip(g, g_val, strict=True)))

    values = {s: utility(s) for r in range(n + 1) for s in itertools.combinations(range(n), r)}
    shapley = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        for r in range(n):
            weight = math.factorial(r) * math.factorial(n - r - 1) / math.factorial(n)
            for s in itertools.combinations(others, r):
                shapley[i] += weight * (values[tuple(sorted((*s, i)))] - values[s])
    got = train_step(accountant, model, optimizer, rows).contributions["validation"]
    assert relative_error(got, shapley) < 1e-9

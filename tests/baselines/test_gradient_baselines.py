"""Baselines from gradients and losses: answers that are known in closed form, and what must differ from them."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from inrun.baselines import run
from inrun.errors import ConfigurationError, ValidationError

N, D = 24, 3
IDS = np.arange(N)


class Regression:
    """Least squares, ℓ = ½ (wᵀx − y)², with a validation set."""

    def __init__(self, seed: int = 0, even: bool = False) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.x = torch.randn(N, D, generator=draw, dtype=torch.float64)
        noise = torch.randn(N, generator=draw, dtype=torch.float64)
        if even:  # residuals of ±1 at the optimum, so that the Fisher matrix of the gradients is the Hessian
            noise = noise.sign()
            self.x = self.x - noise[:, None] * (noise @ self.x) / N
        self.y = self.x @ torch.tensor([1.0, -2.0, 0.5]).double() + noise
        self.x_val = torch.randn(6, D, generator=draw, dtype=torch.float64)
        self.y_val = torch.randn(6, generator=draw, dtype=torch.float64)
        self.model = nn.Linear(D, 1, bias=False).double()

    def optimum(self, weights: Tensor | None = None, decay: float = 0.0) -> Tensor:
        """argmin of (1/N) Σ weights ℓ + decay/2 |w|²."""
        c = (torch.ones(N).double() if weights is None else weights) / N
        return torch.linalg.solve((self.x.T * c) @ self.x + decay * torch.eye(D).double(), (self.x.T * c) @ self.y)

    def validation_loss(self, w: Tensor) -> Tensor:
        return 0.5 * (self.x_val @ w - self.y_val).square().mean()

    def gradients(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Of samples, [N, D], and of the validation loss, [D]."""
        return (self.x @ w - self.y)[:, None] * self.x, self.x_val.T @ (self.x_val @ w - self.y_val) / 6

    def at(self, w: Tensor) -> dict:
        self.model.weight.data.copy_(w[None])
        return {"model": self.model, "sample_loss": self.sample_loss}

    def sample_loss(self, m: nn.Module, k) -> Tensor:
        return 0.5 * (m(self.x[k]).squeeze() - self.y[k]).square()

    def validation(self, m: nn.Module) -> Tensor:
        return self.validation_loss(m.weight[0])

    def left_out(self, decay: float) -> np.ndarray:
        """Central difference of the validation loss after training, in the weight that a sample loses."""
        found = []
        for k in range(N):
            losses = []
            for loses in (1e-4, -1e-4):
                weights = torch.ones(N).double()
                weights[k] -= loses
                losses.append(self.validation_loss(self.optimum(weights, decay)))
            found.append(float(losses[0] - losses[1]) / 2e-4)
        return np.array(found)


def scores(name: str, validation, **given) -> np.ndarray:
    return run(name, np.arange(N), validation, **given)["score"].to_numpy()


def correlation(a, b) -> float:
    return float(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_influence_is_the_derivative_of_leaving_out(decay: float) -> None:
    r = Regression()
    found = scores(
        "influence_function", r.validation, **r.at(r.optimum(decay=decay)), curvature="hessian", damping=decay, tolerance=1e-12
    )
    np.testing.assert_allclose(found, r.left_out(decay), rtol=1e-5)
    assert not np.allclose(-found, r.left_out(decay), rtol=0.5)
    # Damping that is none of the objective, and the gradients of other samples, give something else.
    damped = scores("influence_function", r.validation, **r.at(r.optimum(decay=decay)), curvature="hessian", damping=decay + 1)
    assert not np.allclose(damped, found, rtol=0.1)
    assert abs(correlation(np.roll(found, 1), r.left_out(decay))) < 0.6


def test_influence_by_the_fisher_matrix() -> None:
    r = Regression(even=True)
    given = r.at(r.optimum())
    found = scores("influence_function", r.validation, **given, damping=0.0)
    np.testing.assert_allclose(found, r.left_out(0.0), rtol=1e-5)
    # The default damping is a tenth of the mean eigenvalue.
    hessian = r.x.T @ r.x / N
    g, g_val = r.gradients(r.optimum())
    expected = g @ torch.linalg.solve(hessian + hessian.trace() / D / 10 * torch.eye(D).double(), g_val) / N
    np.testing.assert_allclose(scores("influence_function", r.validation, **given), expected, rtol=1e-8)


def test_the_kronecker_basis_of_a_network() -> None:
    """A convolution and a linear layer: the basis as explicit Kronecker products, and against the dense Fisher matrix."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    r = Regression()
    labels, labels_val = r.x.argmax(1), r.x_val.argmax(1)
    given = {"model": net, "sample_loss": lambda m, k: nn.functional.cross_entropy(m(r.x[k][None]), labels[k][None])}
    found = scores("influence_function", lambda m: nn.functional.cross_entropy(m(r.x_val), labels_val), **given, damping=0.01)
    g = [
        torch.autograd.grad(nn.functional.cross_entropy(net(r.x[k : k + 1]), labels[k : k + 1]), list(net.parameters()))
        for k in range(N)
    ]
    g_val = torch.autograd.grad(nn.functional.cross_entropy(net(r.x_val), labels_val), list(net.parameters()))
    expected, dense = torch.zeros(N).double(), torch.zeros(N).double()
    for i, v in enumerate(g_val):
        flat = torch.stack([own[i].flatten() for own in g])
        matrices = flat.reshape(N, len(v), -1) if v.dim() > 1 else flat[:, None]
        left = torch.linalg.eigh(torch.einsum("noi,npi->op", matrices, matrices)).eigenvectors
        right = torch.linalg.eigh(torch.einsum("noi,noj->ij", matrices, matrices)).eigenvectors
        basis = torch.kron(left, right)
        fisher = basis @ torch.diag((flat @ basis).square().mean(0)) @ basis.T
        eye = 0.01 * torch.eye(len(fisher)).double()
        expected += flat @ torch.linalg.solve(fisher + eye, v.flatten()) / N
        dense += flat @ torch.linalg.solve(flat.T @ flat / N + eye, v.flatten()) / N
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    plain = torch.stack([sum((a * b).sum() for a, b in zip(own, g_val, strict=True)) for own in g])
    assert not np.allclose(found, plain / N / 0.01, rtol=0.5)  # as if without curvature
    assert correlation(found, dense) > 0.95


def test_negative_curvature_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    given = {"model": model, "sample_loss": lambda m, k: -m.weight.square().sum() + 0 * k}
    found = scores("influence_function", lambda m: m.weight.sum(), **given, curvature="hessian")
    assert "negative curvature" in caplog.text
    assert np.isfinite(found).all()


def test_conjugate_gradients_that_did_not_converge_are_said(caplog: pytest.LogCaptureFixture) -> None:
    r = Regression()
    sets = {"a": r.validation, "b": lambda m: m.weight.sum(), "solved": lambda m: 0.0 * m.weight.sum()}
    given = {**r.at(r.optimum()), "curvature": "hessian", "damping": 0.0}
    scores("influence_function", sets, **given, iterations=1)
    (record,) = caplog.records
    assert "after 1 iterations for 2 of 3 validation sets" in record.message and "iterations= or more damping=" in record.message
    # The residual that is named is that of one step along the gradient.
    hessian, parts = r.x.T @ r.x / N, []
    for g in (r.gradients(r.optimum())[1], torch.ones(D).double()):
        parts.append(float((g - (g @ g) / (g @ hessian @ g) * hessian @ g).norm() / g.norm()))
    assert f"up to {max(parts):.2g} of" in record.message
    caplog.clear()
    scores("influence_function", sets, **given, iterations=D + 1)  # the control: D steps are enough
    scores("influence_function", sets, **given, iterations=1, tolerance=1.0)
    assert not caplog.records


def test_tracin_is_the_sum_over_checkpoints() -> None:
    r = Regression()
    weights = [torch.randn(D, generator=torch.Generator().manual_seed(s)).double() for s in range(3)]
    lrs = [0.1, 0.05, 0.01]
    given = {"checkpoints": [{"weight": w[None]} for w in weights], "lrs": lrs}
    found = scores("tracin_cp", r.validation, **r.at(torch.zeros(D)), **given)
    expected = sum(lr * g @ g_val for lr, (g, g_val) in zip(lrs, map(r.gradients, weights), strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    turned = scores("tracin_cp", r.validation, **r.at(torch.zeros(D)), **{**given, "lrs": lrs[::-1]})
    assert not np.allclose(turned, expected, rtol=0.1)
    # To first order it is what a step on the sample alone does to the validation loss.
    w, tiny = weights[0], 1e-6
    one = scores("tracin_cp", r.validation, **r.at(w), checkpoints=[{"weight": w[None]}], lrs=[tiny])
    drops = [r.validation_loss(w) - r.validation_loss(w - tiny * g) for g in r.gradients(w)[0]]
    np.testing.assert_allclose(one, torch.stack(drops), rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("momentum", [False, True])
def test_less_compares_the_step_that_adam_takes(momentum: bool) -> None:
    """The moves are those of the real optimizer, taken from its state with a sample as the batch."""
    r = Regression()
    model = r.model
    r.at(torch.tensor([0.3, -1.0, 2.0]).double())
    betas, lr = (0.8, 0.9), 0.01
    adam = torch.optim.Adam(model.parameters(), lr, betas=betas)
    for start in (0, 8, 16):
        model.weight.grad = r.gradients(model.weight.data[0])[0][start : start + 8].mean(0)[None]
        adam.step()
    state = {k: v.clone() for k, v in adam.state[model.weight].items()}
    w = model.weight.data.clone()
    if not momentum:
        state["exp_avg"].zero_()
    g, g_val = r.gradients(w[0])
    expected = []
    for own in g:
        adam.state[model.weight].update({k: v.clone() for k, v in state.items()})
        model.weight.grad = own[None]
        adam.step()
        expected.append(torch.cosine_similarity(w[0] - model.weight.data[0], g_val, dim=0))
        model.weight.data.copy_(w)
    given = {
        "checkpoints": [{"weight": w}] * 2,
        "lrs": [lr, 2 * lr],
        "steps": [3, 3],
        "betas": betas,
        "second_moments": [{"weight": state["exp_avg_sq"]}] * 2,
        "first_moments": [{"weight": state["exp_avg"]}] * 2 if momentum else None,
    }
    found = scores("less", r.validation, **r.at(w[0]), **given)
    np.testing.assert_allclose(found, torch.stack(expected), rtol=1e-6)
    plain = torch.cosine_similarity(g, g_val[None])
    assert not np.allclose(found, plain, rtol=0.05)
    assert not np.allclose(-found, torch.stack(expected), rtol=0.05)


def test_less_with_known_numbers() -> None:
    """Two parameters, β₂ = ½ and no steps yet: v̂ = v + g², so that Γ = (1/√(3+1), 1/√(0+1)) for g = (1, 1)."""
    model = nn.Linear(2, 1, bias=False).double()
    given = {"model": model, "sample_loss": lambda m, k: m(torch.ones(2).double()).sum() + 0 * k}
    moments = {"second_moments": [{"weight": torch.tensor([[3.0, 0.0]])}], "steps": [0], "betas": (0.0, 0.5)}
    right = lambda m: m(torch.tensor([1.0, 0.0]).double()).sum()  # noqa: E731
    found = scores("less", right, **given, checkpoints=[model.state_dict()], lrs=[1.0], **moments)
    np.testing.assert_allclose(found, 0.5 / np.sqrt(1.25), rtol=1e-6)


def test_trak_of_a_linear_model() -> None:
    r = Regression()
    weights = [r.optimum() + 0.1 * s for s in (0, 1)]
    given = {**r.at(weights[0]), "output": "loss"}
    expected = []
    for w in weights:
        g, g_val = r.gradients(w)
        damped = g.T @ g + 0.1 * (g.T @ g).trace() / D * torch.eye(D).double()
        inverse = torch.linalg.inv(damped)
        # traker scales the inverse of every checkpoint, with gradients brought to a mean square of 1, to a mean entry of 1
        expected.append(g @ inverse @ g_val / inverse.abs().mean())
    checkpoints = [{"weight": w[None]} for w in weights]
    one = scores("trak", r.validation, **given, checkpoints=checkpoints[:1])
    np.testing.assert_allclose(one, expected[0], rtol=1e-3, atol=1e-4)
    both = scores("trak", r.validation, **given, checkpoints=checkpoints)
    np.testing.assert_allclose(both, (expected[0] + expected[1]) / 2, rtol=1e-3, atol=1e-4)
    assert not np.allclose(one, both, rtol=0.05)


def test_trak_of_a_logistic_model_foretells_leaving_out() -> None:
    """With margins, TRAK is a Newton step of logistic regression: it must follow the retrained models."""
    r = Regression()
    y = (r.y > 0).double()
    y_val = (r.y_val > 0).double()
    ridge, n = 0.02, 48
    x, y = torch.cat([r.x, -r.x + 0.1]), torch.cat([y, (torch.arange(N) % 2).double()])
    x_val = r.x_val

    def loss(w: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(rows @ w, labels, reduction="none")

    def train(keep: Tensor) -> Tensor:
        w = torch.zeros(D).double()
        for _ in range(30):
            p = torch.sigmoid(x @ w)
            slope = (x.T * keep) @ (p - y) + ridge * w
            w = w - torch.linalg.solve((x.T * (keep * p * (1 - p))) @ x + ridge * torch.eye(D).double(), slope)
        return w

    w = train(torch.ones(n).double())
    truth = []
    for k in range(n):
        keep = torch.ones(n).double()
        keep[k] = 0
        truth.append(float((loss(train(keep), x_val, y_val) - loss(w, x_val, y_val)).mean()))
    model = nn.Linear(D, 1, bias=False).double()
    given = {
        "model": model,
        "sample_loss": lambda m, k: loss(m.weight[0], x[k][None], y[k][None])[0],
        "checkpoints": [{"weight": w[None]}],
    }
    table = run("trak", np.arange(n), lambda m: loss(m.weight[0], x_val, y_val).mean(), **given, damping=1e-3)
    assert correlation(table["score"].to_numpy(), truth) > 0.9
    assert correlation(np.roll(table["score"].to_numpy(), 1), truth) < 0.5


def test_losses_of_samples() -> None:
    r = Regression()
    w, other = r.optimum(), torch.zeros(D).double()
    losses = [0.5 * (r.x @ at - r.y).square() for at in (w, other)]
    given = r.at(w)
    table = run("loss_at_end", IDS, {"a": None, "b": None}, **given)
    np.testing.assert_allclose(table["score"].to_numpy().reshape(2, N), np.stack([-losses[0]] * 2))
    found = scores("mean_loss", None, **given, checkpoints=[{"weight": w[None]}, {"weight": other[None]}])
    np.testing.assert_allclose(found, -(losses[0] + losses[1]) / 2)
    assert table["score"].to_numpy().max() <= 0


def test_what_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    r = Regression()
    given = r.at(r.optimum())
    one = {**given, "checkpoints": [{"weight": torch.zeros(1, D)}]}
    moments = {"second_moments": [{"weight": torch.zeros(1, D)}], "steps": [1]}
    for name, arguments, words in (
        ("tracin_cp", {**one, "lrs": [1.0, 2.0]}, "1 checkpoints, but 2 lrs"),
        ("tracin_cp", {**one, "checkpoints": [], "lrs": []}, "checkpoints is empty"),
        ("less", {**one, "lrs": [0.0], **moments}, "one must be above 0"),
        ("less", {**one, "lrs": [1.0], **moments, "second_moments": [{}]}, r"second_moments\[0\]: no tensor .* for weight"),
        ("trak", {**one, "output": "logits"}, "unknown output 'logits'; available: margin, loss"),
        ("influence_function", {**given, "curvature": "k-fac"}, "unknown curvature 'k-fac'; available: fisher, hessian"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            run(name, IDS, r.validation, **arguments)
    monkeypatch.setitem(sys.modules, "trak.score_computers", None)
    with pytest.raises(ConfigurationError, match=r"pip install inrun\[baselines\]"):
        run("trak", IDS, r.validation, **one)


# What is wrong is named, before anything is computed


def test_options_that_would_give_numbers_without_meaning_are_refused() -> None:
    task = Regression()
    given = task.at(task.optimum())
    state, squares = task.model.state_dict(), {"weight": torch.ones(1, D).double()}
    run_ = {"checkpoints": [state], "lrs": [0.1]}
    adam = {**run_, "second_moments": [squares], "steps": [3]}
    hessian = {"curvature": "hessian"}
    for name, options, error, words in (
        ("influence_function", {"damping": -1.0}, ConfigurationError, "damping=-1.0; it must be a finite number, 0 or more"),
        ("influence_function", {"damping": float("nan")}, ConfigurationError, "damping=nan"),
        ("influence_function", {**hessian, "damping": -0.1}, ConfigurationError, "damping=-0.1"),
        ("influence_function", {**hessian, "curvature_samples": 0}, ConfigurationError, "curvature_samples=0"),
        ("influence_function", {**hessian, "iterations": 0}, ConfigurationError, "iterations=0"),
        ("trak", {"checkpoints": [state], "damping": -0.1}, ConfigurationError, "damping=-0.1"),
        (
            "trak",
            {"checkpoints": [state], "dimension": 0},
            ConfigurationError,
            "dimension=0; it must be a finite number, 1 or more",
        ),
        ("tracin_cp", {**run_, "lrs": [-0.1]}, ConfigurationError, r"lrs\[0\]=-0.1"),
        ("tracin_cp", {**run_, "lrs": 0.1}, ConfigurationError, "lrs is a float; give a list"),
        ("tracin_cp", {**run_, "checkpoints": state}, ConfigurationError, "checkpoints is a OrderedDict; give a list"),
        ("mean_loss", {"checkpoints": state}, ConfigurationError, "checkpoints is a OrderedDict"),
        ("less", {**adam, "steps": [-1]}, ConfigurationError, r"steps\[0\]=-1"),
        ("less", {**adam, "first_moments": []}, ConfigurationError, "1 checkpoints, but 0 first_moments"),
        ("less", {**adam, "lrs": [0.0]}, ConfigurationError, "one must be above 0"),
        ("less", {**adam, "dimension": 0}, ConfigurationError, "dimension=0"),
    ):
        with pytest.raises(error, match=words):
            run(name, IDS, task.validation, **given, **options)
    with pytest.raises(ValidationError, match="validation 'v' is a tuple; it must be a function of the model"):
        run("gradient_cosine", IDS, {"v": (task.x_val, task.y_val)}, **given)


def test_trak_has_no_margin_where_a_loss_is_no_likelihood_and_no_inverse_without_damping() -> None:
    task = Regression()
    given = {**task.at(task.optimum()), "checkpoints": [task.model.state_dict()]}
    lower = {**given, "sample_loss": lambda m, k: task.sample_loss(m, k) - 0.05}  # below 0 for some
    with pytest.raises(ValidationError, match="the loss of sample .* is -0.0.*give output='loss'"):
        run("trak", IDS, task.validation, **lower)
    alike = [run("trak", IDS, task.validation, **g, output="loss")["score"].to_numpy() for g in (lower, given)]
    assert alike[0] == pytest.approx(alike[1], rel=1e-5)  # the control: a constant changes nothing else
    with pytest.raises(ConfigurationError, match=r"damping=0 with 2 samples in 3 dimensions"):
        run("trak", IDS[:2], task.validation, **given, output="loss", damping=0.0)
    run("trak", IDS, task.validation, **given, output="loss", damping=0.0)


def test_learning_rates_may_be_a_tensor() -> None:
    task = Regression()
    given = {**task.at(task.optimum() + 0.1), "checkpoints": [task.model.state_dict()] * 2}
    moments = {"second_moments": [{"weight": torch.ones(1, D)}] * 2, "steps": torch.tensor([3, 4])}
    for name, more in (("tracin_cp", {}), ("less", moments)):
        tables = [run(name, IDS, task.validation, **given, **more, lrs=lrs) for lrs in ([0.5, 0.25], torch.tensor([0.5, 0.25]))]
        assert tables[0].equals(tables[1])


def test_without_damping_nothing_is_said_along_what_no_sample_moves() -> None:
    """Two samples, three weights: the pseudo-inverse of F, not rounding errors divided by rounding errors."""
    task = Regression()
    w = task.optimum() + 0.1
    g, g_val = (x.numpy() for x in task.gradients(w))
    single = {"model": task.at(w)["model"], "sample_loss": task.sample_loss}
    found = run("influence_function", IDS[:2], task.validation, **single, damping=0.0)["score"].to_numpy()
    fisher = g[:2].T @ g[:2] / 2
    assert found == pytest.approx(g_val @ np.linalg.pinv(fisher, rcond=1e-12) @ g[:2].T / 2, rel=1e-6)
    assert not np.allclose(found, g_val @ np.linalg.inv(fisher + 0.1 * np.eye(D)) @ g[:2].T / 2, rtol=0.01)  # the control

"""Gradients of single samples: mapped and one at a time, at any weights, without a trace on the model."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from inrun.baselines import run
from inrun.baselines.gradients import looking
from inrun.baselines.projection import Projection
from inrun.errors import ConfigurationError, ValidationError
from reference import gradients
from tiny import batch, next_token_loss, tiny

IDS = np.array([7, 3, 11, 5], np.int64)


def gpt() -> tuple[nn.Module, object]:
    rows = batch(4, 1)
    return tiny(dropout=0.2), lambda m, k: next_token_loss(m, rows[k][None])


def convolutions() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    model(torch.randn(8, 2, 4, 4).double())  # running statistics that are not their initial ones
    images, labels = torch.randn(4, 2, 4, 4).double(), torch.tensor([0, 2, 1, 1])
    return model, lambda m, k: nn.functional.cross_entropy(m(images[k][None]), labels[k][None])


def one_at_a_time(model: nn.Module, sample_loss) -> Tensor:
    model.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.stack([torch.cat([g.flatten() for g in gradients(sample_loss(model, k), parameters)]) for k in range(4)])


@pytest.mark.parametrize("make", [gpt, convolutions])
@pytest.mark.parametrize("mappable", [True, False])
def test_gradients_and_losses(make, mappable: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inrun.baselines.gradients.MOST_SAMPLES", 3)
    model, loss = make()
    other = make()[0]
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05)
    next(model.parameters()).requires_grad_(False)
    next(other.parameters()).requires_grad_(False)
    sample_loss = loss if mappable else lambda m, k: loss(m, int(k))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    with caplog.at_level(logging.WARNING), looking(model, sample_loss, IDS) as look:
        found = torch.cat([g for _, g in look.blocks()])
        elsewhere = torch.cat([g for _, g in look.blocks(other.state_dict())])
        losses = look.losses()
    assert len(caplog.records) == (0 if mappable else 1)
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    torch.testing.assert_close(found, one_at_a_time(model, loss), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(elsewhere, one_at_a_time(other, loss), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(losses, torch.stack([loss(model, k) for k in range(4)]).detach())
    assert not torch.allclose(found, elsewhere)


def test_a_mapping_that_gives_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model, data = nn.Linear(2, 1, bias=False), torch.randn(4, 2)
    with looking(model, lambda m, k: m(data[k]).sum() * (2 if isinstance(k, Tensor) else 1), IDS) as look:
        torch.testing.assert_close(torch.cat([g for _, g in look.blocks()]), data)
    assert "another gradient" in caplog.text


class Weighed:
    """A linear model with a loss that weighs sample ``special`` ten times, by a way of knowing it that mapping cannot follow."""

    def __init__(self, how: str, n: int, special: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model, self.data = nn.Linear(3, 1, bias=False), torch.randn(n, 3, generator=draw)
        self.ids, self.how, self.special, self.table = np.arange(n), how, special, {special: 10.0}
        self.texts = {str(special): 10.0}

    def weight(self, k) -> float:
        if self.how == "text":
            return self.texts.get(f"{k}", 1.0)
        if self.how == "dict":
            return self.table.get(k, 1.0)
        return 10.0 if isinstance(k, int) and k == self.special else 1.0

    def loss(self, m: nn.Module, k) -> Tensor:
        return self.weight(k) * m(self.data[k]).squeeze()

    def gradients(self) -> Tensor:
        return torch.stack([self.weight(k) * self.data[k] for k in self.ids.tolist()])

    def losses(self) -> Tensor:
        return (self.gradients() @ self.model.weight.T).squeeze(1).detach()


@pytest.mark.parametrize("how", ["dict", "text", "type"])
@pytest.mark.parametrize("special", [0, 3, 5])
def test_a_single_sample_that_is_mapped_wrongly(how: str, special: int, caplog: pytest.LogCaptureFixture) -> None:
    """Six samples are all held against plain calls, by gradients, losses and Hessians alike."""
    w = Weighed(how, 6, special)
    with looking(w.model, w.loss, w.ids) as look:
        torch.testing.assert_close(torch.cat([g for _, g in look.blocks()]), w.gradients())
    with looking(w.model, w.loss, w.ids) as look:
        torch.testing.assert_close(look.losses(), w.losses())
    with looking(w.model, lambda m, k: w.loss(m, k).square(), w.ids) as look:
        g = w.gradients()
        torch.testing.assert_close(look.hessian_product(torch.ones(3), w.ids), 2 * (g.T @ g).sum(1) / 6)
    assert len(caplog.records) == 3
    plain = Weighed(how, 6, 99)  # the control: without such a sample, mapping goes on unless k is no index
    caplog.clear()
    with looking(plain.model, plain.loss, plain.ids) as look:
        assert torch.equal(look.losses(), torch.cat([loss for _, _, loss in look.blocks_with_losses()]))
    assert len(caplog.records) == (how != "type")


def test_a_wrong_sample_of_a_later_block_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inrun.baselines.gradients.MOST_SAMPLES", 4)
    w = Weighed("type", 8, 6)
    words = r"sample_loss of sample 6, a plain call .*; in sample_loss\(model, k\) use k only to index tensors, or int\(k\)"
    with looking(w.model, w.loss, w.ids) as look:
        blocks = look.blocks()
        next(blocks)
        with pytest.raises(ValidationError, match=words):
            next(blocks)
    with looking(w.model, w.loss, w.ids) as look, pytest.raises(ValidationError, match=words):
        look.losses()


def test_drawn_samples_are_others_each_time() -> None:
    """A sample that one pass does not draw is found by one of the next."""
    w = Weighed("type", 64, 40)
    with looking(w.model, w.loss, w.ids) as look, pytest.raises(ValidationError, match="sample 40, a plain"):
        for _ in range(200):
            found = look.losses()
            assert not torch.allclose(found, w.losses())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_other_loss(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Losses near 0, NaN, and of few digits: kernels of a batch and of one sample do not round alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 50), nn.Tanh(), nn.Linear(50, 10)).to(dtype)
    data, labels = torch.randn(40, 300).to(dtype), torch.randint(0, 10, (40,))
    boost = torch.nn.functional.one_hot(labels, 10).to(dtype) * torch.linspace(0, 20, 40)[:, None].to(dtype)
    boost[7] = torch.nan
    for _ in range(5):
        with looking(model, lambda m, k: nn.functional.cross_entropy(m(data[k]) + boost[k], labels[k]), np.arange(40)) as look:
            look.losses()
    assert not caplog.records


def test_the_hessian_of_a_gpt() -> None:
    model, loss = gpt()
    model.eval()
    parameters = list(model.parameters())
    vector = torch.randn(sum(p.numel() for p in parameters), generator=torch.Generator().manual_seed(3)).double()
    ks = np.array([0, 2, 3], np.int64)

    def slope(at: float) -> Tensor:
        moved, _ = gpt()
        with torch.no_grad():
            for p, step in zip(moved.parameters(), vector.split([p.numel() for p in parameters]), strict=True):
                p.add_(at * step.view_as(p))
        return one_at_a_time(moved, loss)[ks].mean(0)

    with looking(model, loss, IDS) as look:
        found = look.hessian_product(vector, ks)
    expected = (slope(1e-6) - slope(-1e-6)) / 2e-6
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_what_is_wrong_is_named() -> None:
    model = nn.Linear(2, 1)
    for loss, words in (
        (lambda m, k: m(torch.ones(2)), r"sample 7 returned a tensor of shape \[1\]"),
        (lambda m, k: torch.tensor(1.0), "sample 7 returned a loss without gradient"),
    ):
        with looking(model, loss, IDS) as look, pytest.raises(ValidationError, match=words):
            next(look.blocks())
    with looking(model, lambda m, k: m(torch.ones(2)), IDS) as look, pytest.raises(ValidationError, match="sample 7"):
        look.losses()
    with (
        looking(model, lambda m, k: m(torch.ones(2)).sum(), IDS) as look,
        pytest.raises(ConfigurationError, match="shape for bias"),
    ):
        next(look.blocks({"weight": model.weight}))


def test_projections_keep_inner_products() -> None:
    """The mean over seeds is the inner product, its variance what the docstring says."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    b = b + 0.5 * a
    seen = torch.stack([(lambda s: s[0] @ s[1])(Projection(500, 64, seed)(torch.stack([a, b]))) for seed in range(400)])
    variance = ((a @ a) * (b @ b) + (a @ b) ** 2 - 2 * (a**2 @ b**2)) / 64
    assert abs(seen.mean() - a @ b) < 4 * (variance / 400).sqrt()
    assert 0.8 < seen.var() / variance < 1.25
    assert Projection(500, 64, 1)(a[None]).shape == (1, 64)
    assert torch.equal(Projection(500, 64, 1)(a[None]), Projection(500, 64, 1)(a[None]))
    assert not torch.equal(Projection(500, 64, 1)(a[None]), Projection(500, 64, 2)(a[None]))
    assert torch.equal(Projection(64, 64)(a[None, :64]), a[None, :64])


# Nothing of the user's is written to


class Counts(nn.Module):
    """Counts its calls in a buffer, in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(tokens[..., :3] / 9)


class Renormalised(nn.Module):
    """Its embedding shortens rows of its own weight as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.rows(tokens).mean(-2))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("make", [Counts, Renormalised])
def test_a_forward_that_writes_changes_neither_model_nor_checkpoint(make) -> None:
    torch.manual_seed(0)
    model, tokens, labels = make(), torch.randint(0, 9, (4, 5)), torch.tensor([0, 1, 1, 0])
    before, checkpoint = tensors(model), tensors(make())
    kept = {name: w.clone() for name, w in checkpoint.items()}

    def loss(m: nn.Module, k) -> Tensor:
        return nn.functional.cross_entropy(m(tokens[k][None]), labels[k][None])

    with looking(model, loss, IDS) as look:
        for weights in (None, checkpoint):
            look.losses(weights)
            list(look.blocks(weights))
            look.validation({"v": lambda m: nn.functional.cross_entropy(m(tokens), labels)}, weights)
        look.hessian_product(torch.ones(look.size), np.arange(4))
    assert same(model.state_dict(), before) and same(checkpoint, kept)
    model(tokens)
    assert not same(model.state_dict(), before)  # the control: its forward does write


def test_losses_that_draw_leave_the_random_state_alone() -> None:
    model, x = nn.Linear(3, 1), torch.ones(4, 3)

    def loss(m: nn.Module, k) -> Tensor:
        return m(nn.functional.dropout(x[k], 0.5)).sum()

    state = torch.get_rng_state()
    with looking(model, loss, IDS) as look:
        look.losses()
        list(look.blocks())
        look.validation({"v": lambda m: loss(m, 0)})
    assert torch.equal(torch.get_rng_state(), state)
    loss(model, 0)
    assert not torch.equal(torch.get_rng_state(), state)  # the control


# Checkpoints


def test_a_checkpoint_must_have_what_training_changes() -> None:
    model, loss = convolutions()
    model[0].weight.requires_grad_(False)
    whole = model.state_dict()
    without = lambda *names: {name: w for name, w in whole.items() if name not in names}  # noqa: E731
    with looking(model, loss, IDS) as look:
        expected = look.losses()
        # Frozen weights and counters may be missing, as in the checkpoint of an adapter: the model has them.
        assert torch.equal(look.losses(without("0.weight", "1.num_batches_tracked")), expected)
        for checkpoint, words in (
            (without("1.running_mean"), "for 1.running_mean; it has 8 names"),
            (without("1.running_mean", "1.running_var"), "1.running_mean, 1.running_var"),
            (without("4.bias"), "4.bias"),
            ({**whole, "1.running_var": torch.ones(1)}, "1.running_var"),
            ({**whole, "0.weight": torch.ones(1)}, "0.weight"),
            ({name: w.numpy(force=True) for name, w in whole.items()}, "0.bias"),
            (model, "got a Sequential where tensors by name are wanted"),
        ):
            with pytest.raises(ConfigurationError, match=f"checkpoints: .*{words}"):
                look.losses(checkpoint)


def test_a_checkpoint_of_another_precision_is_taken_in_the_models() -> None:
    model, loss = convolutions()
    single = {name: w.float() if w.is_floating_point() else w for name, w in model.state_dict().items()}
    with looking(model, loss, IDS) as look:
        expected, found = next(look.blocks())[1], next(look.blocks(single))[1]
    assert found.dtype == torch.float64 and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, expected)  # the control: it was rounded once


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_mapped_and_its_sums_are_not_in_half_precision(dtype, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 200), nn.Tanh(), nn.Linear(200, 60), nn.Tanh(), nn.Linear(60, 3)).to(dtype)
    exact = copy.deepcopy(model).double()
    x, y, held = torch.randn(8, 6).to(dtype), torch.randint(0, 3, (8,)), torch.randn(4, 6).to(dtype)

    def scores(m: nn.Module, name: str, **given) -> np.ndarray:
        kind = next(m.parameters()).dtype

        def sample_loss(m: nn.Module, k) -> Tensor:
            return nn.functional.cross_entropy(m(x[k][None].to(kind)), y[k][None])

        validation = {"v": lambda m: nn.functional.cross_entropy(m(held.to(kind)), y[:4])}
        return run(name, np.arange(8), validation, model=m, sample_loss=sample_loss, **given)["score"].to_numpy()

    for name, given in (
        ("influence_function", {}),
        ("influence_function", {"curvature": "hessian", "damping": 30.0, "tolerance": 1e-2}),
        ("gradient_cosine", {}),
    ):
        with caplog.at_level(logging.WARNING):
            found, expected = scores(model, name, **given), scores(exact, name, **given)
        assert not caplog.records  # mapped, and solved
        assert np.abs(found - expected).max() < 12 * torch.finfo(dtype).eps * np.abs(expected).max(), (name, given)


def test_under_autocast_mapping_is_not_taken_for_wrong_because_it_rounds(caplog: pytest.LogCaptureFixture) -> None:
    def scores(k_of) -> None:
        def loss(m: nn.Module, k) -> Tensor:
            k = k_of(k)
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.cross_entropy(m(x[k][None]).float(), y[k][None])

        hessian = {"curvature": "hessian", "damping": 5.0, "tolerance": 1e-2}
        run("influence_function", np.arange(70), {"v": lambda m: loss(m, 0)}, model=model, sample_loss=loss, **hessian)

    for seed in range(4):
        torch.manual_seed(seed)
        model, x, y = nn.Sequential(nn.Linear(6, 400), nn.Tanh(), nn.Linear(400, 3)), torch.randn(70, 6), torch.randint(0, 3, (70,))
        with caplog.at_level(logging.WARNING):
            scores(lambda k: k)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        scores(lambda k: k if isinstance(k, int) else k // 2)
    assert "torch.func.vmap cannot map over them: it gives" in caplog.text  # the control: what is wrong is still seen

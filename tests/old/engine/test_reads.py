"""Parameters that are read: what shapes say about them must show, or they go through the fallback, or are refused by name."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import inrun
from inrun.errors import CoverageError, RowOwnershipError
from reference import contributions, gradients, relative_error, sample_gradients

D, WORDS = 6, 11


def words(n: int, t: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (n, t), generator=torch.Generator().manual_seed(seed))


def floats(n: int, t: int, seed: int = 0) -> Tensor:
    return torch.randn(n, t, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(made: Tensor) -> Tensor:
    return made if made.dim() == 0 else made.square().sum()


def score(model: nn.Module, x: Tensor, held_out: Tensor, steps: int = 2) -> tuple[inrun.Accountant, float]:
    """Take steps; return the accountant and the worst error of scores."""
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    value = lambda m: loss_of(m(held_out)).sin()  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, value, method="first", audit_every=1)
    worst, n = 0.0, len(x)
    for _ in range(steps):
        twin = copy.deepcopy(model)
        params = list(twin.parameters())
        g_n = sample_gradients(lambda j: loss_of(twin(x[j : j + 1])), n, params)  # noqa: B023
        truth = contributions(g_n, [torch.full_like(p, 0.05) for p in params], gradients(value(twin), params))
        optimizer.zero_grad()
        with accountant.step(range(n)):
            loss_of(model(x)).backward()
            optimizer.step()
        worst = max(worst, relative_error(accountant.last.contributions["validation"], truth))
    return accountant, worst


class Scaled(nn.Module):
    """Reads a parameter behind its last layer, sequence-first; returns its loss or what it has computed."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, D), nn.Linear(D, WORDS)
        self.scale, self.returns = nn.Parameter(torch.rand(WORDS) + 0.5), returns

    def forward(self, x: Tensor) -> Tensor:
        made = self.head(torch.tanh(self.words(x))).transpose(0, 1) * self.scale
        return made.square().sum() if self.returns == "loss" else made if self.returns == "sequence-first" else made.transpose(0, 1)


def test_as_many_positions_as_samples_behind_the_last_layer_are_refused() -> None:
    """The shape says that positions are samples; nothing behind says otherwise, but what the parameter met does."""
    torch.manual_seed(0)
    with pytest.raises((CoverageError, RowOwnershipError), match="the model itself"):
        score(Scaled("loss"), words(4, 4), words(3, 4, 1))


@pytest.mark.parametrize("returns", ["batch-first", "sequence-first"])
def test_they_are_scored_where_the_model_shows_the_rows(returns: str) -> None:
    """Where the shape is wrong about them, by running the model again, whose output has the samples in the second dimension."""
    torch.manual_seed(0)
    assert score(Scaled(returns), words(4, 4), words(3, 4, 1))[1] < 1e-9


def test_control_with_another_number_of_positions_a_loss_is_enough() -> None:
    """What the parameter met has moved with the samples, in the dimension that was taken for theirs."""
    torch.manual_seed(0)
    accountant, error = score(Scaled("loss"), words(4, 5), words(3, 5, 1))
    assert error < 1e-9
    assert not any(site.rule.replays for site in accountant._run.capture.sites)


class Queries(nn.Module):
    """A learned query, expanded, that nothing but the loss shows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.inner = nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x).sum(1) * self.query.expand(len(x), -1)).square().sum()


def test_copies_that_nothing_shows_are_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises((CoverageError, RowOwnershipError), match="the model itself"):
        score(Queries(), floats(4, 5), floats(3, 5, 1))


class Spectral(nn.Module):
    """A real parameter, used as complex numbers (FNO)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(D, D), nn.Parameter(torch.randn(D, D, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.inner(x).transpose(1, 2))
        mixed = torch.einsum("bil,iol->bol", spectrum, torch.view_as_complex(self.weight))
        return torch.fft.irfft(mixed, n=x.shape[1]).tanh()


class Rotated(nn.Module):
    """Learned frequencies of rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.frequencies = nn.Linear(D, D), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1]).double(), self.frequencies)
        turned = torch.view_as_complex(self.inner(x).view(*x.shape[:2], 3, 2)) * torch.polar(torch.ones_like(angles), angles)
        return torch.view_as_real(turned).flatten(2).tanh()


@pytest.mark.parametrize("module", [Spectral, Rotated])
def test_parameters_that_become_complex_go_through_the_fallback(module: Any) -> None:
    torch.manual_seed(0)
    assert score(module(), floats(4, 5), floats(3, 5, 1))[1] < 1e-9


class Decoder(nn.Module):
    """Learned queries into a decoder (DETR, Q-Former): its first layers see no sample."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(D, 2, 8, 0.0, batch_first=batch_first), 1)
        self.queries, self.batch_first = nn.Parameter(torch.randn(7, D)), batch_first

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if self.batch_first:
            return self.decoder(self.queries.unsqueeze(0).expand(n, -1, -1), x)
        return self.decoder(self.queries.unsqueeze(1).expand(-1, n, -1), x.transpose(0, 1)).transpose(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("n", [4, 7])
def test_learned_queries_are_followed_through_layers_that_see_no_sample(batch_first: bool, n: int) -> None:
    torch.manual_seed(0)
    accountant, error = score(Decoder(batch_first), floats(n, 5), floats(3, 5, 1))
    assert error < 1e-9
    if n == 4:
        assert not any(site.rule.replays for site in accountant._run.capture.sites)


class Multiplies(nn.Module):
    """Multiplies a table of positions by a weight that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.weight = nn.Embedding(WORDS, D), nn.Parameter(torch.randn(D, D))
        self.register_buffer("table", torch.randn(16, D))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(x) + nn.functional.linear(self.table[: x.shape[1]], self.weight)))


@pytest.mark.parametrize("n", [3, 8, 16])
def test_products_without_samples_go_through_the_fallback_where_shapes_say_otherwise(n: int) -> None:
    torch.manual_seed(0)
    assert score(Multiplies(), words(n, 16), words(3, 16, 1))[1] < 1e-9


class Written(nn.Module):
    """Writes into what it has made of a parameter, or of a layer that sees no sample, before that meets the samples."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.inner, self.outer = nn.Parameter(torch.randn(D, D)), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("table", torch.randn(D, D))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        made = self.weight.clone()
        if self.how == "entries":
            before = made * 0.5
            if x.shape[1] == 5:  # not in the validation pass, whose direction would tell nothing of these entries otherwise
                made[1:3] = 0.0
            made = made + before
        elif self.how == "whole":
            made.mul_(self.table).tanh_()
        elif self.how == "through a view":
            made.view(-1).mul_(3.0)
        elif self.how == "behind its back":
            other = made.view(-1)
            made.mul_(3.0)
            made = made + other.view(D, D)
        else:  # a layer's output, as activations in place do (Swin v2)
            made = nn.functional.leaky_relu(self.outer(nn.functional.relu(self.inner(self.table), inplace=True)).t(), 0.1, True).t()
            return (nn.functional.linear(x, self.weight) + made[: x.shape[1]]).tanh()
        return nn.functional.linear(x, made).tanh()


@pytest.mark.parametrize("how", ["entries", "whole", "through a view", "behind its back", "a layer's output"])
def test_what_is_made_of_a_parameter_may_be_written_to(how: str) -> None:
    torch.manual_seed(0)
    assert score(Written(how), floats(4, 5), floats(3, 6, 1))[1] < 1e-9


def test_writing_to_what_is_read_leaves_training_alone() -> None:
    weights = []
    for attached in (False, True):
        torch.manual_seed(0)
        model = Written("a layer's output").double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m(floats(3, 6, 1)))) if attached else None
        for number in range(3):
            with contextlib.nullcontext() if accountant is None else accountant.step(range(4)):
                loss_of(model(floats(4, 5, number))).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*weights, strict=True))


class Late(nn.Module):
    """Writes to what stood beside a parameter after its use, once it is told to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.writes = nn.Linear(D, D), how, False
        self.scale, self.shift = nn.Parameter(torch.randn(D) * 0.1), nn.Parameter(torch.randn(D) * 0.1)
        self.register_buffer("mean", torch.randn(D) * 0.1)
        self.held, self.count = torch.randn(D, dtype=torch.float64) * 0.1, 0

    def forward(self, x: Tensor) -> Tensor:
        writes = self.writes and self.training
        made = self.shift * 2.0
        other = {"buffer": self.mean, "view": self.mean.view(-1), "attribute": self.held, "tracked": made}.get(self.how, self.mean)
        if self.how.startswith("complex"):
            factor = torch.exp(self.scale + (self.held if "attribute" in self.how else self.mean)) * (1.0 + 0.1 * self.count)
            factor = torch.view_as_real(torch.view_as_complex(factor.view(-1, 2)) * 1.0).reshape(-1)
        else:
            factor = torch.exp(self.scale + other)
        if writes and self.how == "complex, counter":
            self.count += 1
        elif writes and self.how == "complex, unseen":
            self.mean.data.add_(0.5)
        elif writes and self.how == "complex, attribute":
            self.held.add_(0.5)
        elif writes:
            other.add_(0.5)
        return self.inner(x) * factor + made


#: By what is written to: what becomes of it where writes begin at a step that is looked at, and at one that is not.
RUN_AGAIN, CHANGED = "run this step again", "is another one then"
LATE = {
    "buffer": ("scored", RUN_AGAIN),
    "view": ("scored", RUN_AGAIN),
    "attribute": (CHANGED, RUN_AGAIN),
    "tracked": ("scored", "scored"),
    "complex, buffer": ("scored", RUN_AGAIN),
    "complex, attribute": (CHANGED, CHANGED),
    "complex, counter": (CHANGED, CHANGED),
    "complex, unseen": (CHANGED, CHANGED),
}


def score_late(how: str, begins: int, steps: int = 8) -> float:
    """Take steps that are not audited; return the worst error of scores."""
    torch.manual_seed(0)
    model = Late(how).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, held_out, worst = floats(4, 5), floats(3, 5, 1), 0.0
    value = lambda m: loss_of(m(held_out)).mul(0.01)  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, value, method="first", audit_every=0)
    for number in range(steps):
        model.writes = number >= begins
        params = list(copy.deepcopy(model).parameters())
        g_n = []
        for j in range(4):
            twin = copy.deepcopy(model)
            g_n.append(gradients(loss_of(twin(x[j : j + 1])) * 0.01, list(twin.parameters())))
        twin = copy.deepcopy(model).eval()
        truth = contributions(g_n, [torch.full_like(p, 0.05) for p in params], gradients(value(twin), list(twin.parameters())))
        optimizer.zero_grad()
        with accountant.step(range(4)):
            (loss_of(model(x)) * 0.01).backward()
            optimizer.step()
        worst = max(worst, relative_error(accountant.last.contributions["validation"], truth))
    return worst


@pytest.mark.parametrize("begins", [0, 5])
@pytest.mark.parametrize("how", LATE)
def test_what_stood_beside_a_parameter_may_be_written_to_or_that_is_refused(how: str, begins: int) -> None:
    """Steps 0 to 4 are looked at, the fifth is not; none is audited but the first."""
    expected = LATE[how][begins > 0]
    if expected == "scored":
        assert score_late(how, begins) < 1e-9
        return
    with pytest.raises((RowOwnershipError, inrun.errors.StepError), match=expected):
        score_late(how, begins)


@pytest.mark.parametrize("how", LATE)
def test_control_without_writes_all_of_them_are_scored(how: str) -> None:
    assert score_late(how, 99, steps=2) < 1e-9


@pytest.mark.parametrize("how", ["buffer", "complex, buffer"])
def test_a_step_that_was_to_be_run_again_is_scored(how: str) -> None:
    """What a forward writes to is kept from then on."""
    torch.manual_seed(0)
    model = Late(how).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(m(floats(3, 5, 1))) * 0.01, method="first", audit_every=0)

    def step() -> None:
        optimizer.zero_grad()
        with accountant.step(range(4)):
            (loss_of(model(floats(4, 5))) * 0.01).backward()
            optimizer.step()

    for _ in range(5):
        step()
    model.writes = True
    with pytest.raises((RowOwnershipError, inrun.errors.StepError), match=RUN_AGAIN):
        step()
    step()
    assert accountant.last.step == 5


class Listed(nn.Module):
    """Holds parameters in containers, which have no forward, and uses them in ways that no kind describes."""

    def __init__(self, shared: nn.ParameterDict | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.nested = nn.ModuleList([nn.ParameterList([torch.randn(D), torch.randn(D)])])
        self.bank = shared if shared is not None else nn.ParameterDict({"own": torch.randn(D)})

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.view_as_complex(torch.stack([p.tanh() for p in (*self.nested[0], *self.bank.values())]).view(-1, 2))
        return self.inner(x) * torch.view_as_real(whole).reshape(-1, D).prod(0)


class Sharing(nn.Module):
    """Two modules with one container."""

    def __init__(self) -> None:
        super().__init__()
        bank = nn.ParameterDict({"both": torch.randn(D)})
        self.blocks = nn.ModuleList([Listed(bank), Listed(bank)])
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + x
        return self.head(x).tanh()


@pytest.mark.parametrize("module", [Listed, Sharing])
def test_what_containers_hold_is_scored_by_the_module_around_them(module: Any) -> None:
    torch.manual_seed(0)
    assert score(module(), floats(4, 5), floats(3, 5, 1))[1] < 1e-9


class Hidden(nn.Module):
    """Uses a parameter where no operation tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.entries = nn.Linear(D, D), nn.Parameter(torch.randn(D))
        self.register_buffer("places", torch.stack([torch.arange(D), torch.arange(D).flip(0)]))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.eye(D, dtype=x.dtype) + torch.sparse_coo_tensor(self.places, self.entries * 2.0, (D, D))
        return nn.functional.linear(self.inner(x), weight).tanh()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_parameters_that_no_operation_tells_of_go_through_the_fallback() -> None:
    torch.manual_seed(0)
    accountant, error = score(Hidden(), floats(4, 5), floats(3, 5, 1))
    assert error < 1e-9
    assert any(site.rule.replays for site in accountant._run.capture.sites)


class Recurrent(nn.Module):
    """A recurrent network with a parametrised weight has no rule; its last states have the samples in the second dimension."""

    def __init__(self, kind: type[nn.RNNBase], uses: str, layers: int = 1) -> None:
        super().__init__()
        self.kind, self.uses = kind, uses
        self.inner = kind(D, D, num_layers=layers, batch_first=uses != "sequence-first")
        parametrizations.weight_norm(self.inner, "weight_hh_l0")
        self.head = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.uses == "sequence-first":
            return self.head(self.inner(x.transpose(0, 1))[0].transpose(0, 1)).tanh()
        out, last = self.inner(x)
        last = last[0] if isinstance(last, tuple) else last
        return self.head(out if self.uses == "outputs" else out * last.sum(0).unsqueeze(1)).tanh()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recurrent:
        """What torch keeps of the weights in a list cannot be copied."""
        twin = Recurrent(self.kind, self.uses, self.inner.num_layers).double()
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.parametrize("layers", [1, 4], ids=["one layer", "as many layers as samples"])
@pytest.mark.parametrize("uses", ["outputs", "last states", "sequence-first"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_what_runs_again_may_return_samples_in_the_second_dimension(kind: Any, uses: str, layers: int) -> None:
    torch.manual_seed(0)
    accountant, error = score(Recurrent(kind, uses, layers), floats(4, 5), floats(3, 5, 1))
    assert error < 1e-9
    assert any(site.rule.replays for site in accountant._run.capture.sites)

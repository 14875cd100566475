"""Whose row is it: what does not separate by sample is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import inrun
from inrun.errors import IdsError, RowOwnershipError
from inrun.old.engine.checks.exchange import exchange_sample
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

D = 4


class SequenceFirst(nn.Module):
    """Hands its inner layer [t, n, d]; with t = n every shape looks batch-first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Shuffled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        order = torch.arange(x.shape[0] - 1, -1, -1)
        return self.inner(x[order])[order]


class MixedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return self.inner(x + x.mean(0, keepdim=True))


class Windows(nn.Module):
    """[n·t] rows laid out position-major, as window partitioning does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        n, t, d = x.shape
        return self.inner(x.transpose(0, 1).reshape(n * t, d)).view(t, n, d).transpose(0, 1)


class UnsqueezedPositions(nn.Module):
    """Positions that the model indexes, so that copies, one per sample, cannot take their place at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, D)
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return self.inner(x + self.table(torch.arange(x.shape[1]))[None])


class RelativePositions(UnsqueezedPositions):
    """A table of pairs of positions, permuted before it meets the samples, twice."""

    def forward(self, x):
        places = torch.arange(x.shape[1])
        bias = self.table((places[None, :] - places[:, None]).abs()).permute(2, 0, 1).tanh()[None]
        scores = (x @ x.transpose(1, 2))[:, None] + bias
        return self.inner((scores.softmax(-1) * bias).sum(-1).transpose(1, 2) + x)


class MultipliedPositions(UnsqueezedPositions):
    """Positions by which the samples are multiplied as by a weight."""

    def forward(self, x):
        return self.inner(nn.functional.linear(x, self.table(torch.arange(D))))


def attempt(module: nn.Module, n: int = 3, t: int = 3, **options):
    model = module.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(n, t, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), audit_every=1, credit="step", **options)
    with accountant.step(range(n)):
        model(x).square().sum().backward()
        optimizer.step()
    return accountant, x


@pytest.mark.parametrize("module", [Shuffled, MixedRows])
def test_rows_that_do_not_separate_are_refused_by_name(module) -> None:
    with pytest.raises(RowOwnershipError, match="inner"):
        attempt(module())


@pytest.mark.parametrize("module", [SequenceFirst, Windows])
@pytest.mark.parametrize("t", [3, 5])
def test_samples_in_the_second_dimension_are_found(module, t: int) -> None:
    torch.manual_seed(0)
    model = module().double()
    twin = copy.deepcopy(model)
    accountant, x = attempt(model, t=t)
    params = list(twin.parameters())
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), 3, params)
    g_val = gradients(twin(x[:1]).square().sum(), params)
    truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], g_val)
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


class Tokens(nn.Module):
    """Embeds tokens batch-first, sequence-first, or with samples end to end."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.inner, self.way = nn.Embedding(11, D), nn.Linear(D, D), way

    def forward(self, x):
        if self.way == "sequence-first":
            return self.inner(torch.tanh(self.words(x.t()))).transpose(0, 1)
        if self.way == "end to end":
            return self.inner(torch.tanh(self.words(x.flatten()))).view(*x.shape, D)
        return self.inner(torch.tanh(self.words(x)))


def score_tokens(way: str, x: torch.Tensor) -> float:
    """Return the error of one step's scores."""
    torch.manual_seed(0)
    model, n = Tokens(way).double(), len(x)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), method="first", audit_every=1)
    with accountant.step(range(n)):
        model(x).square().sum().backward()
        optimizer.step()
    params = list(twin.parameters())
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), n, params)
    truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], gradients(twin(x[:1]).square().sum(), params))
    return relative_error(accountant.last.contributions["validation"], truth)


@pytest.mark.parametrize("way", ["batch-first", "sequence-first", "end to end"])
def test_all_exchanges_together_tell_the_layout(way: str) -> None:
    """The last sample differs from the first in its last token alone: that one moves a row as well as a column."""
    x = torch.randint(0, 10, (4, 4), generator=torch.Generator().manual_seed(0))
    x[3] = x[0]
    x[3, 3] += 1
    assert score_tokens(way, x) < 1e-9


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("way", ["batch-first", "sequence-first", "end to end"])
def test_samples_that_differ_in_one_token(way: str, t: int, place: int) -> None:
    """What is exchanged moves one row; the layout shows when the entries of a sample change places."""
    x = torch.arange(t).repeat(2, 1)
    x[1, place] = 9
    assert score_tokens(way, x) < 1e-9


@pytest.mark.parametrize("blocks", [False, True])
def test_a_sample_is_exchanged_for_the_one_that_differs_most(blocks: bool) -> None:
    x = torch.tensor([[0, 0, 0], [0, 0, 1], [2, 2, 2], [0, 0, 0]])
    more = torch.arange(8).view(8, 1)
    (other, others), _ = exchange_sample(((x, more), {}), 4, 0, blocks)
    assert other[0].tolist() == [2, 2, 2]
    assert torch.equal(other[1:], x[1:])
    assert others.flatten().tolist() == ([4, 5, 2, 3, 4, 5, 6, 7] if blocks else list(range(8)))


class Documents(nn.Module):
    """Several documents per query: [n, d] and [n k, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(D, D), nn.Linear(D, D)

    def encode(self, x):
        return self.inner(torch.tanh(self.first(x)))

    def forward(self, queries, documents):
        if self.mixed:
            documents = documents.roll(1, 0)
        return (self.encode(queries).unsqueeze(1) * self.encode(documents).view(len(queries), -1, D)).sum(-1)

    mixed = False


def test_several_rows_per_sample_are_exchanged_together() -> None:
    torch.manual_seed(0)
    model = Documents().double()
    q, d = torch.randn(4, D, dtype=torch.float64), torch.randn(12, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = lambda m: m(q[:2], d[:6]).sin().sum()  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, value, method="first", audit_every=1)
    for _ in range(2):
        twin = copy.deepcopy(model)
        params = list(twin.parameters())
        g_n = sample_gradients(lambda j: twin(q[j : j + 1], d[3 * j : 3 * j + 3]).square().sum(), 4, params)  # noqa: B023
        truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], gradients(value(twin), params))
        optimizer.zero_grad()
        with accountant.step(range(4)):
            model(q, d).square().sum().backward()
            optimizer.step()
        assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


def test_rows_of_several_samples_in_one_block_are_refused() -> None:
    model = Documents().double()
    model.mixed = True
    q, d = torch.randn(4, D, dtype=torch.float64), torch.randn(12, D, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(q[:2], d[:6]).sin().sum(), method="first")
    with pytest.raises(RowOwnershipError, match="inner|first"), accountant.step(range(4)):
        model(q, d)


class PaddedToTheLongest(nn.Module):
    """Unpacks without a total length, so that the longest sample decides how many positions there are."""

    def __init__(self, end_to_end: bool = False) -> None:
        super().__init__()
        self.recurrent, self.inner, self.end_to_end = nn.GRU(D, D, batch_first=True), nn.Linear(D, D), end_to_end

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, _ = nn.utils.rnn.pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        if self.end_to_end:
            inside = torch.arange(made.shape[1]) < lengths[:, None]
            return torch.zeros_like(made).masked_scatter(inside.unsqueeze(-1), self.inner(made[inside]))
        return self.inner(made)


def train_with_lengths(model: nn.Module, batches) -> float:
    """Take a step on every batch and return the worst error of the scores."""
    torch.manual_seed(0)
    model, worst = model.double(), 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(m, x, lengths):
        made = m(x, lengths)
        return (made.square().sum(-1) * (torch.arange(made.shape[1]) < lengths[:, None])).sum()

    value = lambda m: loss(m, *batches[0]).sin()  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, value, method="first", audit_every=1)
    for x, lengths in batches:
        twin = copy.deepcopy(model)
        params = list(twin.parameters())
        g_n = sample_gradients(lambda j: loss(twin, x[j : j + 1], lengths[j : j + 1]), len(x), params)  # noqa: B023
        truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], gradients(value(twin), params))
        optimizer.zero_grad()
        with accountant.step(range(len(x))):
            loss(model, x, lengths).backward()
            optimizer.step()
        worst = max(worst, relative_error(accountant.last.contributions["validation"], truth))
    return worst


def lengths_of(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return torch.randn(len(lengths), 6, D, dtype=torch.float64, generator=generator), torch.tensor(lengths)


def test_rows_that_are_padded_to_the_longest_sample() -> None:
    batches = [lengths_of(5, 3, 2, 4), lengths_of(3, 6, 2, 2), lengths_of(2, 2, 2, 6), lengths_of(1, 1, 1, 1)]
    assert train_with_lengths(PaddedToTheLongest(), batches) < 1e-9


def test_rows_end_to_end_by_lengths_are_refused() -> None:
    assert train_with_lengths(PaddedToTheLongest(end_to_end=True), [lengths_of(4, 4, 4, 4)]) < 1e-9
    with pytest.raises(RowOwnershipError, match="exchange"):
        train_with_lengths(PaddedToTheLongest(end_to_end=True), [lengths_of(4, 4, 4, 4), lengths_of(5, 3, 4, 4)])


def test_control_sums_alone_do_not_see_it() -> None:
    """Without the row check the same module passes coverage and conservation, and the scores are wrong."""
    torch.manual_seed(0)
    model = SequenceFirst().double()
    twin = SequenceFirst().double()
    twin.load_state_dict(model.state_dict())
    accountant, x = attempt(model, check_rows=False)
    assert accountant.last.audited
    params = list(twin.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), 3, params)
    g_val = gradients(twin(x[:1]).square().sum(), params)
    truth = contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], g_val)
    got = accountant.last.contributions["validation"]
    assert abs(got.sum() - truth.sum()) < 1e-9 * truth.abs().max()
    assert relative_error(got, truth) > 0.1


def test_multihead_attention_batch_first_is_scored() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(D, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model = Attends().double()
    twin = Attends().double()
    twin.load_state_dict(model.state_dict())
    accountant, x = attempt(model)
    params = list(twin.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), 3, params)
    g_val = gradients(twin(x[:1]).square().sum(), params)
    truth = contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], g_val)
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


@pytest.mark.parametrize("module", [UnsqueezedPositions, RelativePositions])
@pytest.mark.parametrize(("n", "t"), [(3, 3), (4, 3), (2, 5), (1, 3)])
def test_positions_that_are_worked_on_before_they_meet_the_samples(module, n: int, t: int) -> None:
    torch.manual_seed(0)
    model = module().double()
    twin = module().double()
    twin.load_state_dict(model.state_dict())
    accountant, x = attempt(model, n, t)
    params = list(twin.parameters())
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), n, params)
    g_val = gradients(twin(x[:1]).square().sum(), params)
    truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], g_val)
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


def test_positions_that_cannot_be_copied_are_refused_by_name() -> None:
    with pytest.raises(RowOwnershipError, match="table runs once for the whole batch"):
        attempt(MultipliedPositions())


def test_positions_with_as_many_positions_as_samples() -> None:
    """[t] position indices with t = n look like one row per sample and are not."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, D)
            self.inner = nn.Linear(D, D)

        def forward(self, x):
            return self.inner(x + self.table(torch.arange(x.shape[1])))

    torch.manual_seed(0)
    model = Positions().double()
    twin = Positions().double()
    twin.load_state_dict(model.state_dict())
    accountant, x = attempt(model)
    params = list(twin.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    g_n = sample_gradients(lambda j: twin(x[j : j + 1]).square().sum(), 3, params)
    g_val = gradients(twin(x[:1]).square().sum(), params)
    truth = contributions(g_n, [sgd_gain(optimizer, p, p) for p in params], g_val)
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9


def test_a_new_pattern_of_shapes_is_verified_again() -> None:
    """t ≠ n separates, t = n later does not: the second step is refused."""

    class Sometimes(Shuffled):
        def forward(self, x):
            return super().forward(x) if x.shape[0] == x.shape[1] else self.inner(x)

    model = Sometimes().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(3, 5, D, dtype=torch.float64)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(rows[:1]).square().sum(), credit="step")
    for t in (5, 4):
        with accountant.step(range(3)):
            model(rows[:, :t]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with pytest.raises(RowOwnershipError, match="inner"), accountant.step(range(3)):
        model(rows[:, :3]).square().sum().backward()


def test_equal_samples_postpone_the_check() -> None:
    model = Shuffled().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    same = torch.ones(3, 3, D, dtype=torch.float64)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(same[:1]).square().sum(), credit="step")
    with accountant.step(range(3)):
        model(same).square().sum().backward()
        optimizer.step()
    with pytest.raises(RowOwnershipError, match="inner"), accountant.step(range(3)):
        model(torch.randn_like(same)).square().sum().backward()


def test_calls_outside_the_model_are_refused() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    model = Parts().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, D, dtype=torch.float64)
    run = lambda m, z: m.second(torch.tanh(m.first(z))).square().sum()  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, lambda m: run(m, x[:1]), credit="step")
    with pytest.raises(RowOwnershipError, match="first was called outside"), accountant.step(range(3)):
        run(model, x).backward()
    accountant.close()
    accountant = inrun.Accountant(model, optimizer, lambda m: run(m, x[:1]), check_rows=False, credit="step")
    with accountant.step(range(3)):
        run(model, x).backward()
        optimizer.step()
    assert accountant.last.contributions["validation"].shape == (3,)


def test_wrong_number_of_ids() -> None:
    model = nn.Linear(D, D).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(6, D, dtype=torch.float64)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x[:1]).square().sum(), credit="step")
    for wrong in (3, 5, 12):
        with pytest.raises(IdsError, match=f"got {wrong} sample ids.*6"), accountant.step(range(wrong)):
            model(x).square().sum().backward()


def test_a_diverged_model_is_called_so():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        model[0].weight.fill_(float("inf"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(torch.ones(1, 4)).sum(), credit="step")
    with pytest.raises(RowOwnershipError, match="not finite"), accountant.step(range(3)):
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    accountant.close()

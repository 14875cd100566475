"""Packed documents: the same numbers as one document per row, and refused by name where documents see each other."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import inrun
from inrun.errors import ConservationError, CoverageError, IdsError, RowOwnershipError
from inrun.old.engine import documents as documents_module
from packing import ONE_ROW, TWO_ROWS, Batch, both, gpt_logits, loss_of, packed_gpt
from reference import contributions, gradients, relative_error, sample_gradients, sgd_gain

Logits = Callable[[nn.Module, Batch], Tensor]


@pytest.fixture(params=[32, 1], ids=["whole", "chunks"])
def cost(request, monkeypatch) -> int:
    """With a low cost of chunks, small documents are cut into several."""
    monkeypatch.setattr(documents_module, "CHUNK_COST", request.param)
    return request.param


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model: nn.Module, logits: Logits, optimizer: str, arrangement: str, rows, steps: int = 3, **options):
    """Train on packed batches or on the same documents one per row; return the accountant, results and settled credits."""
    opt = make_optimizer(model, optimizer)
    held_out = both(rows, 50)[1]
    ledger = inrun.ledger.MemoryLedger({})
    accountant = inrun.Accountant(
        model, opt, lambda m: loss_of(logits(m, held_out), held_out.labels), audit_every=1, ledger=ledger, **options
    )
    results = []
    for step in range(steps):
        packed, plain, ids = both(rows, step)
        batch, given = (packed, packed.ids) if arrangement == "packed" else (plain, ids)
        with accountant.step(given):
            loss_of(logits(model, batch), batch.labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        results.append(accountant.last)
    return accountant, results


def table(accountant) -> dict[int, float]:
    scores = accountant.scores().to_pydict()
    return dict(zip(scores["sample_id"], scores["score"], strict=True))


def assert_same(make, logits: Logits, rows, optimizer: str, tolerance: float = 1e-9, **options) -> None:
    model = make()
    twin = copy.deepcopy(model)
    packed, got = train(model, logits, optimizer, "packed", rows, **options)
    plain, expected = train(twin, logits, optimizer, "rows", rows, **options)
    for a, b in zip(got, expected, strict=True):
        assert a.sample_ids.tolist() == b.sample_ids.tolist()
        assert relative_error(a.contributions["validation"], b.contributions["validation"]) < tolerance
        assert b.contributions["validation"].abs().max() > 1e-8
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(p.detach(), q.detach()) < tolerance
    mine, theirs = table(packed), table(plain)
    assert mine.keys() == theirs.keys()
    largest = max(abs(x) for x in theirs.values())
    assert max(abs(mine[i] - theirs[i]) for i in theirs) < 1e-5 * largest  # the ledger keeps single precision


GAMES = [
    {"credit": "step", "method": "first"},
    {"credit": "step", "method": "lookahead"},
    {"credit": "step", "method": "second"},
    {"credit": "step", "method": "midpoint"},
    {"credit": "whole", "credit_memory": "exact"},
    {"credit": "whole", "credit_memory": "sketch"},
    {"credit": "whole", "credit_memory": "sketch", "sketch": 64},
]


@pytest.mark.parametrize("game", GAMES, ids=lambda g: "-".join(str(x) for x in g.values()))
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_packed_documents_equal_documents_in_rows(game, optimizer, cost) -> None:
    assert_same(packed_gpt, gpt_logits, TWO_ROWS, optimizer, **game)


def test_some_documents_are_cut_into_several_chunks(cost) -> None:
    """The fixture means what it says."""
    packing = documents_module.Documents(both(TWO_ROWS)[0].ids, torch.device("cpu")).packing
    assert (packing.chunks > packing.documents) == (cost == 1)


@pytest.mark.parametrize("options", [{"bitwise": True}, {"form": "project"}, {"form": "shared"}], ids=str)
def test_one_sample_at_a_time(options, cost) -> None:
    """The independent reference: one document at a time, plain autograd."""
    model = packed_gpt(tied=False)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    packed, plain, ids = both(TWO_ROWS)
    held_out = both(TWO_ROWS, 5)[1]
    count = int((plain.labels >= 0).sum())

    def share(j: int) -> Tensor:
        one = Batch(*(x[j : j + 1] for x in (plain.tokens, plain.ids, plain.positions, plain.labels, plain.documents)))
        n = int((one.labels >= 0).sum())
        return loss_of(gpt_logits(model, one), one.labels) * n / count if n else gpt_logits(model, one).sum() * 0.0

    g_val = gradients(loss_of(gpt_logits(model, held_out), held_out.labels), params)
    truth = contributions(sample_gradients(share, len(ids), params), [sgd_gain(optimizer, p, p) for p in params], g_val)
    accountant = inrun.Accountant(
        model, optimizer, lambda m: loss_of(gpt_logits(m, held_out), held_out.labels), credit="step", method="first", **options
    )
    with accountant.step(packed.ids):
        loss_of(gpt_logits(model, packed), packed.labels).backward()
        optimizer.step()
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9
    assert accountant.last.sample_ids.tolist() == ids


# Models of transformers


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=19, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return _wide(GPT2LMHeadModel(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=16
    )
    return _wide(LlamaForCausalLM(config))


def qwen3() -> nn.Module:
    """Its norms of queries and keys have heads behind the positions."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=19, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=4, max_position_embeddings=16,
    )  # fmt: skip
    return _wide(Qwen3ForCausalLM(config))


def _wide(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


def with_mask(model: nn.Module, batch: Batch) -> Tensor:
    """Position ids that restart, and a block-diagonal mask."""
    return model(input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.mask(), use_cache=False).logits


def by_positions(model: nn.Module, batch: Batch) -> Tensor:
    """Position ids alone: transformers makes the mask from them where they restart."""
    return model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits


# Norms and rotary tables of transformers compute in float32, whatever the rest does.
MODELS = {"gpt2": (gpt2, 1e-9), "llama": (llama, 1e-9), "qwen3": (qwen3, 1e-9)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("game", [GAMES[0], GAMES[3], GAMES[5]], ids=["first", "midpoint", "whole"])
@pytest.mark.parametrize(("rows", "logits"), [(TWO_ROWS, with_mask), (ONE_ROW, by_positions)], ids=["mask", "padding-free"])
def test_models_of_transformers(name, game, rows, logits) -> None:
    make, tolerance = MODELS[name]
    assert_same(make, logits, rows, "adamw", tolerance, steps=2, **game)


# Modules without a rule


class Scaled(nn.Module):
    """A raw parameter and a function of two tensors, which only the fallback can score."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.gate * x) * y + self.shift


class WithScaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scaled = packed_gpt(), Scaled().double()
        self.body.head = nn.Identity()
        self.out = nn.Linear(8, 19).double()

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = self.body(tokens, positions, mask)
        return self.out(self.scaled(x, x.flip(-1)))


@pytest.mark.parametrize("game", [GAMES[0], GAMES[3], GAMES[4], GAMES[5]], ids=["first", "midpoint", "exact", "sketch"])
def test_modules_without_a_rule(game) -> None:
    def make() -> nn.Module:
        torch.manual_seed(3)
        return WithScaled()

    assert_same(make, gpt_logits, TWO_ROWS, "adamw", steps=2, **game)


class ReadScale(nn.Module):
    """Reads a parameter, and treats every position by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.words(x)) * self.scale)


@pytest.mark.parametrize("ids", [[[7] * 5, [9] * 5], [[7, 7, 7, 4, 4], [9] * 5], [[7] * 5], [[7, 7, 4, 4, 4]]])
def test_parameters_that_are_read_where_documents_are_as_many_as_rows(ids) -> None:
    torch.manual_seed(0)
    model = ReadScale().double()
    x, ids = torch.randint(0, 11, (len(ids), 5)), torch.tensor(ids)
    params = list(model.parameters())
    g_val = torch.autograd.grad(model(x).sin().mean(), params)
    wanted = {}
    for document in ids.unique().tolist():
        g = torch.autograd.grad(model(x)[ids == document].square().sum(), params)
        wanted[document] = 0.1 * sum(float((a * b).sum()) for a, b in zip(g, g_val, strict=True))
    optimizer = torch.optim.SGD(params, lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: m(x).sin().mean(), method="first", audit_every=1)
    with accountant.step(ids):
        model(x).square().sum().backward()
        optimizer.step()
    assert table(accountant) == pytest.approx(wanted, rel=1e-6)


def test_modules_without_a_rule_nor_forward_mode(monkeypatch) -> None:
    """The other form: documents are pulled back one at a time."""
    from inrun.old.layers.fallback import FallbackRule

    begin = FallbackRule.__init__
    monkeypatch.setattr(FallbackRule, "__init__", lambda self: (begin(self), setattr(self, "form", "vmap"))[0])
    torch.manual_seed(3)
    model = WithScaled()
    assert_same(lambda: model, gpt_logits, TWO_ROWS, "adamw", steps=1, **GAMES[0])


# What is refused


def one_step(model: nn.Module, logits: Logits, batch: Batch, ids, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    validation = lambda m: loss_of(logits(m, batch), batch.labels)  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, validation, credit="step", **options)
    with accountant.step(ids):
        loss_of(logits(model, batch), batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return accountant


def causal(model: nn.Module, batch: Batch) -> Tensor:
    t = batch.tokens.shape[1]
    mask = torch.zeros(len(batch.tokens), 1, t, t, dtype=torch.float64).masked_fill_(~torch.ones(t, t).bool().tril(), -torch.inf)
    return model(batch.tokens, batch.positions, mask)


def backward_looking(model: nn.Module, batch: Batch) -> Tensor:
    """Only the last document of a row is seen by others."""
    seen = batch.mask()
    seen[:, :, 0, -1] = 0.0
    return model(batch.tokens, batch.positions, seen)


@pytest.mark.parametrize("rows", [TWO_ROWS, ONE_ROW], ids=["rows", "padding-free"])
@pytest.mark.parametrize("logits", [causal, backward_looking])
def test_documents_that_see_each_other_are_refused_by_name(rows, logits) -> None:
    batch = both(rows)[0]
    if logits is backward_looking:
        batch.ids[:, -1] = torch.where(batch.ids[:, -1] < 0, 1000, batch.ids[:, -1])
    with pytest.raises(RowOwnershipError, match=r"documents see each other at blocks.0.out.*document \d+ moved"):
        one_step(packed_gpt(), logits, batch, batch.ids)


def test_transformers_with_positions_that_do_not_restart_are_refused() -> None:
    batch = both(ONE_ROW)[0]
    batch.positions = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    with pytest.raises(RowOwnershipError, match="documents see each other"):
        one_step(llama(), by_positions, batch, batch.ids)


def test_control_sums_alone_do_not_see_it() -> None:
    """With check_rows=False documents that see each other pass every sum, and the numbers are not those of documents in rows."""
    packed, plain, ids = both(ONE_ROW)
    got = one_step(packed_gpt(), causal, packed, packed.ids, check_rows=False, audit_every=1).last
    expected = one_step(packed_gpt(), causal, plain, ids, check_rows=False).last
    assert got.audited
    assert relative_error(got.contributions["validation"], expected.contributions["validation"]) > 1e-3


def test_one_id_per_row_is_the_way_out() -> None:
    batch = both(TWO_ROWS)[0]
    batch.labels[batch.ids < 0] = -100
    accountant = one_step(packed_gpt(), causal, batch, [7, 8])
    assert accountant.last.sample_ids.tolist() == [7, 8]


def test_a_leak_that_comes_later_is_seen_on_the_next_look() -> None:
    leaks = False

    def logits(model: nn.Module, batch: Batch) -> Tensor:
        return causal(model, batch) if leaks else gpt_logits(model, batch)

    model = packed_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = both(TWO_ROWS)[0]
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(gpt_logits(m, batch), batch.labels), audit_every=1)
    for step in range(7):
        leaks = step == 6
        with pytest.raises(RowOwnershipError, match="see each other") if leaks else contextlib.nullcontext():
            with accountant.step(batch.ids):
                loss_of(logits(model, batch), batch.labels).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (lambda ids: ids[:, :-1], r"shape \(2, 11\).*none of which has these positions"),
        (lambda ids: ids[:1], "none of which has these positions"),
        (lambda ids: ids.unsqueeze(0), r"got shape \(1, 2, 12\)"),
        (lambda ids: torch.where(ids < 0, -100, ids), "got -100"),
        (lambda ids: torch.full_like(ids, -1), "there is no document"),
        (lambda ids: ids.double(), "must be integers"),
    ],
)
def test_ids_of_another_shape_are_refused(ids, message) -> None:
    batch = both(TWO_ROWS)[0]
    with pytest.raises(IdsError, match=message):
        one_step(packed_gpt(), gpt_logits, batch, ids(batch.ids))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = packed_gpt(), nn.Linear(19, 1).double()

    def forward(self, *args: Tensor) -> Tensor:
        logits = self.body(*args)
        return logits + self.pooler(logits.mean(1)).unsqueeze(1)


def test_pooled_heads_are_refused_by_name() -> None:
    batch = both(TWO_ROWS)[0]
    with pytest.raises(RowOwnershipError, match=r"pooler \(Linear\) works on a tensor of shape \(2, 19\)"):
        one_step(Pooled(), gpt_logits, batch, batch.ids)
    with pytest.raises(RowOwnershipError, match="pooler"):
        one_step(Pooled(), gpt_logits, batch, batch.ids, check_rows=False)


def test_rules_that_know_rows_only_are_refused_by_name(monkeypatch) -> None:
    from inrun.old.layers.linear import LinearRule

    monkeypatch.setattr(LinearRule, "positionwise", False)
    batch = both(TWO_ROWS)[0]
    with pytest.raises(CoverageError, match=r"blocks.0.qkv \(Linear\) cannot be scored for packed documents"):
        one_step(packed_gpt(), gpt_logits, batch, batch.ids)


class Mixing(nn.Module):
    """Mixes positions in a way that does not change when tokens of a document change places."""

    def __init__(self, how: str, length: int) -> None:
        super().__init__()
        self.how, self.words, self.head = how, nn.Embedding(19, 6), nn.Linear(6, 19)
        self.norm = nn.LayerNorm([length, 6] if how == "norm" else [6])
        self.attention = nn.Linear(6, 18)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.how == "mean":
            x = x + x.mean(1, keepdim=True)
        elif self.how == "attention":
            x = x + nn.functional.scaled_dot_product_attention(*self.attention(x).chunk(3, -1))
        return self.head(self.norm(x))


@pytest.mark.parametrize("how", ["mean", "attention", "norm"])
def test_documents_that_see_a_sum_over_others_are_refused(how: str) -> None:
    batch = both(TWO_ROWS)[0]
    with pytest.raises(RowOwnershipError, match="documents see each other at"):
        one_step(Mixing(how, batch.tokens.shape[1]).double(), lambda m, b: m(b.tokens), batch, batch.ids.clamp(min=0))


def test_control_without_mixing_they_are_scored() -> None:
    batch = both(TWO_ROWS)[0]
    one_step(Mixing("none", 0).double(), lambda m, b: m(b.tokens), batch, batch.ids.clamp(min=0))


@pytest.mark.parametrize("whole", [False, True], ids=["several in a row", "one per row"])
def test_norms_over_positions_are_refused_by_name(whole: bool) -> None:
    batch = both(TWO_ROWS)[0]
    length = batch.tokens.shape[1]
    ids = torch.arange(2).unsqueeze(1).expand(2, length) if whole else batch.ids.clamp(min=0)
    with pytest.raises(CoverageError, match=rf"norm \(LayerNorm\) cannot be scored for packed documents.*the {length} positions"):
        one_step(Mixing("norm", length).double(), lambda m, b: m(b.tokens), batch, ids, check_rows=whole)


# Nobody


@pytest.mark.parametrize("make", [packed_gpt, WithScaled])
def test_positions_of_nobody_that_are_in_the_loss_are_refused(make) -> None:
    batch = both(TWO_ROWS)[0]
    batch.labels[batch.ids < 0] = 1
    with pytest.raises(ConservationError, match="nobody's, and gradient flows through them"):
        one_step(make(), gpt_logits, batch, batch.ids)


@pytest.mark.parametrize("credit", ["step", "whole"])
def test_documents_that_attend_to_nobody_are_refused(credit) -> None:
    batch = both(TWO_ROWS)[0]
    batch.ids[0, 0] = -1  # a first token that the rest of its document sees
    batch.labels[0, 0] = -100
    model = packed_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(gpt_logits(m, batch), batch.labels), credit=credit)
    with pytest.raises(ConservationError, match="documents attend to them"), accountant.step(batch.ids):
        loss_of(gpt_logits(model, batch), batch.labels).backward()
        optimizer.step()
    assert accountant.steps_done == 0


def test_padding_may_see_documents() -> None:
    """Padding at the end of a causal row sees what is before it; nothing is learned there, so nobody gets anything."""
    packed, plain, ids = both(((4,), (6,), (2,)))
    assert bool((packed.ids < 0).any())
    got = one_step(packed_gpt(), causal, packed, packed.ids).last
    expected = one_step(packed_gpt(), causal, plain, ids).last
    assert relative_error(got.contributions["validation"], expected.contributions["validation"]) < 1e-9


# Uses and books


def test_every_run_of_an_id_in_a_row_is_a_use(tmp_path) -> None:
    batch = both(TWO_ROWS)[0]
    batch.ids = torch.where(batch.documents == 2, 0, batch.ids)  # again after another document of the same row
    batch.ids = torch.where(batch.documents == 5, 0, batch.ids)  # and in another row
    accountant = one_step(packed_gpt(), gpt_logits, batch, batch.ids, ledger=str(tmp_path))
    assert accountant.last.sample_ids.tolist() == [0, 3, 0, 9, 12, 0]
    accountant.close()
    scores = inrun.Ledger.open(tmp_path).scores().to_pydict()
    found = dict(zip(scores["sample_id"], zip(scores["times_used"], scores["score"], strict=True), strict=True))
    assert {i: uses for i, (uses, _) in found.items()} == {0: 3, 3: 1, 9: 1, 12: 1}
    values = accountant.last.contributions["validation"]
    assert found[0][1] == pytest.approx(float(values[[0, 2, 5]].sum()), rel=1e-5)


def test_microbatches_of_both_kinds() -> None:
    """Packed and unpacked microbatches of one step give what one of each kind gives."""
    packed, plain, ids = both(TWO_ROWS)
    other, _, other_ids = both(ONE_ROW, 1)
    results = []
    for first, first_ids in ((packed, packed.ids), (plain, ids)):
        model = packed_gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(gpt_logits(m, other), other.labels), audit_every=1)
        for _ in range(2):
            with accountant.step() as step:
                for batch, given in ((first, first_ids), (other, other.ids)):
                    with step.microbatch(given):
                        loss_of(gpt_logits(model, batch), batch.labels).backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(accountant.last)
    assert results[0].sample_ids.tolist() == ids + other_ids
    assert relative_error(*(r.contributions["validation"] for r in results)) < 1e-9


@pytest.mark.parametrize("memory", ["exact", "sketch"])
def test_saved_windows_go_on(memory, cost) -> None:
    """Open windows of packed documents are saved and restored."""
    options = {"credit": "whole", "credit_memory": memory}
    whole = packed_gpt()
    accountant = train(whole, gpt_logits, "adamw", "packed", TWO_ROWS, 2, **options)[0]
    state = copy.deepcopy(accountant.state_dict())
    before = accountant.open_credits()
    accountant.load_state_dict(state)
    for a, b in zip(before, accountant.open_credits(), strict=True):
        assert (a.credits["validation"] == b.credits["validation"]).all()
    twin = copy.deepcopy(whole)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3)
    optimizer.load_state_dict(copy.deepcopy(accountant.optimizers[0].state_dict()))
    held_out = both(TWO_ROWS, 50)[1]
    resumed = inrun.Accountant(
        twin, optimizer, lambda m: loss_of(gpt_logits(m, held_out), held_out.labels), audit_every=1, **options
    )
    resumed.load_state_dict(state)
    batch = both(TWO_ROWS, 7)[0]
    for a, model in ((accountant, whole), (resumed, twin)):
        with a.step(batch.ids):
            loss_of(gpt_logits(model, batch), batch.labels).backward()
            a.optimizers[0].step()
    for a, b in zip(accountant.open_credits(), resumed.open_credits(), strict=True):
        assert (a.credits["validation"] == b.credits["validation"]).all()


# Conditions


def test_training_is_the_same_bit_for_bit() -> None:
    batch, model = both(TWO_ROWS)[0], packed_gpt()
    twin = copy.deepcopy(model)
    one_step(model, gpt_logits, batch, batch.ids, bitwise=True)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    loss_of(gpt_logits(twin, batch), batch.labels).backward()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


class SeparatedByTokens(nn.Module):
    """Documents end with token 0; the model makes its mask from that."""

    def __init__(self) -> None:
        super().__init__()
        self.body = packed_gpt()

    def forward(self, tokens: Tensor) -> Tensor:
        number = (tokens == 0).cumsum(1) - (tokens == 0).long()
        seen = (number.unsqueeze(2) == number.unsqueeze(1)) & torch.ones(tokens.shape[1], tokens.shape[1]).bool().tril()
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
        return self.body(tokens, torch.arange(tokens.shape[1]).unsqueeze(0), mask.unsqueeze(1))


def test_separators_stay_where_they_are() -> None:
    batch = both(((4, 3, 5), (5, 5, 2)))[0]
    last = torch.ones_like(batch.ids, dtype=torch.bool)
    last[:, :-1] = batch.ids[:, 1:] != batch.ids[:, :-1]
    batch.tokens[last] = 0
    one_step(SeparatedByTokens(), lambda m, b: m(b.tokens), batch, batch.ids)


class Numbered(nn.Module):
    """Gets the numbers of documents as an argument, and flat tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.body = packed_gpt()

    def forward(self, tokens: Tensor, numbers: Tensor, positions: Tensor) -> Tensor:
        seen = (numbers.unsqueeze(1) == numbers) & torch.ones(len(numbers), len(numbers)).bool().tril()
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)
        return self.body(tokens.unsqueeze(0), positions.unsqueeze(0), mask[None, None])


def test_flat_batches_with_numbers_of_documents() -> None:
    packed, plain, ids = both(ONE_ROW)
    flat = lambda m, b: m(b.tokens[0], b.documents[0], b.positions[0])  # noqa: E731
    got = one_step(Numbered(), flat, packed, packed.ids).last
    expected = one_step(packed_gpt(), gpt_logits, plain, ids).last
    # Validation is on the packed batch there and on rows here: the same loss.
    assert relative_error(got.contributions["validation"], expected.contributions["validation"]) < 1e-9


def test_single_precision_and_autocast() -> None:
    packed, plain, ids = both(TWO_ROWS)
    results = []
    for batch, given in ((packed, packed.ids), (plain, ids)):
        model = packed_gpt().float()

        def logits(m: nn.Module, b: Batch) -> Tensor:
            return m(b.tokens, b.positions, b.mask(torch.float32)).float()

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accountant = inrun.Accountant(model, optimizer, lambda m: loss_of(logits(m, plain), plain.labels), credit="step")
        with accountant.step(given):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(logits(model, batch), batch.labels)
            loss.backward()
            optimizer.step()
        results.append(accountant.last.contributions["validation"])
    assert relative_error(*results) < 2e-2


class ByLengths(nn.Module):
    """Padding-free: tokens ``[1, total]`` and where documents begin, as kernels for variable lengths take it."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.body, self.checkpointed = packed_gpt(), checkpointed

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        number = torch.bucketize(torch.arange(tokens.shape[1]), cu_seqlens[1:], right=True)
        seen = (number.unsqueeze(1) == number) & torch.ones(len(number), len(number)).bool().tril()
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf)[None, None]
        if self.checkpointed:
            return checkpoint(self.body, tokens, positions, mask, use_reentrant=False)
        return self.body(tokens, positions, mask)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("method", ["first", "midpoint"])
def test_rows_with_cumulative_lengths(checkpointed, method) -> None:
    packed, plain, ids = both(ONE_ROW)
    lengths = torch.tensor([0, *ONE_ROW[0]]).cumsum(0)
    got = one_step(ByLengths(checkpointed), lambda m, b: m(b.tokens, b.positions, lengths), packed, packed.ids, method=method).last
    expected = one_step(packed_gpt(), gpt_logits, plain, ids, method=method).last
    assert relative_error(got.contributions["validation"], expected.contributions["validation"]) < 1e-9
    with pytest.raises(RowOwnershipError, match="see each other"):
        one_step(ByLengths(), lambda m, b: m(b.tokens, b.positions, lengths[[0, -1]]), packed, packed.ids)

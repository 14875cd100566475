"""Packed documents: the numbers of one document per row, and refused by name where documents see each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from inrun.engine import Accountant
from inrun.errors import ConservationError, IdsError, RowOwnershipError
from loops import METHODS, distance, open_credits, scores_by_id
from packing import ONE_ROW, TWO_ROWS, Batch, both, gpt_logits, loss_of, packed_gpt

Logits = Callable[[Any, Batch], Tensor]
MEET = "mixes samples|samples meet"


def attach(model: nn.Module, logits: Logits, held: Batch, optimizer: Any = None, **options: Any) -> Accountant:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Accountant(model, optimizer, lambda m: loss_of(logits(m, held), held.labels), **({"audit_every": 1} | options))


def step(accountant: Accountant, logits: Logits, batch: Batch, ids: Any) -> Tensor:
    with accountant.step(ids):
        loss_of(logits(accountant.model, batch), batch.labels).backward()
        torch.nn.utils.clip_grad_norm_(accountant.model.parameters(), 1.0)
        accountant.optimizers[0].step()
        accountant.optimizers[0].zero_grad()
    return accountant.last.contributions["validation"].clone()


def one(model: nn.Module, logits: Logits, batch: Batch, ids: Any = None, held: Batch | None = None, **options: Any) -> Accountant:
    accountant = attach(model, logits, held or batch, **options)
    step(accountant, logits, batch, batch.ids if ids is None else ids)
    return accountant


def gpt2() -> nn.Module:
    import transformers as tr

    config = tr.GPT2Config(
        vocab_size=19, n_positions=16, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    return wide(tr.GPT2LMHeadModel(config))


def llama(name: str = "Llama", **more: Any) -> nn.Module:
    import transformers as tr

    sizes = {"vocab_size": 19, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(tr, f"{name}Config")(**sizes, max_position_embeddings=16, **more)
    return wide(getattr(tr, f"{name}ForCausalLM")(config))


def qwen3() -> nn.Module:
    """Its norms of queries and keys have heads behind the positions."""
    return llama("Qwen3", num_key_value_heads=1, head_dim=4)


def wide(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model.double()


class Scaled(nn.Module):
    """Raw parameters and a function of two tensors behind a GPT."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.out = packed_gpt(), nn.Linear(8, 19).double()
        self.body.head = nn.Identity()
        self.gate, self.shift = (nn.Parameter(torch.randn(8).double()) for _ in range(2))

    def forward(self, *inputs: Tensor) -> Tensor:
        x = self.body(*inputs)
        return self.out(torch.tanh(self.gate * x) * x.flip(-1) + self.shift)


def with_mask(model: Any, batch: Batch) -> Tensor:
    """Position ids that restart, and a block-diagonal mask."""
    return model(input_ids=batch.tokens, position_ids=batch.positions, attention_mask=batch.mask(), use_cache=False).logits


def by_positions(model: Any, batch: Batch) -> Tensor:
    """Position ids alone: transformers makes the mask from them where they restart."""
    return model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits


MODELS: dict[str, tuple[Callable[[], nn.Module], Logits, Any]] = {
    "gpt": (packed_gpt, gpt_logits, TWO_ROWS),
    "raw parameters": (Scaled, gpt_logits, TWO_ROWS),
    **{f"{f.__name__}, mask": (f, with_mask, TWO_ROWS) for f in (gpt2, llama, qwen3)},
    **{f"{f.__name__}, padding-free": (f, by_positions, ONE_ROW) for f in (gpt2, llama, qwen3)},
}
#: All methods on our own GPT, two on others.
RUNS = [("gpt", method) for method in METHODS] + [(name, method) for name in list(MODELS)[1:] for method in ("whole", "first")]


@pytest.mark.parametrize(("name", "method"), RUNS)
def test_packed_documents_score_like_documents_in_rows(name: str, method: str) -> None:
    build, logits, rows = MODELS[name]
    found = []
    for packed in (True, False):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        accountant = attach(model, logits, both(rows, 50)[1], optimizer, **METHODS[method])
        parts = []
        for seed in range(2):
            batch, single, ids = both(rows, seed)
            parts.append(step(accountant, logits, batch, batch.ids) if packed else step(accountant, logits, single, ids))
            assert accountant.last.sample_ids.tolist() == ids
        found.append((parts, [p.detach().clone() for p in model.parameters()], scores_by_id(accountant)))
    (got, weights, scores), (expected, true_weights, true_scores) = found
    assert distance(got, expected) < 1e-9 and distance(weights, true_weights) < 1e-9
    assert scores == pytest.approx(true_scores, rel=1e-4, abs=1e-5 * max(map(abs, true_scores.values())))
    assert distance(got, [x.roll(1) for x in expected]) > 1e-2  # the control


# What is refused


def causal(model: Any, batch: Batch) -> Tensor:
    n, t = batch.tokens.shape
    mask = torch.zeros(n, 1, t, t, dtype=torch.float64).masked_fill_(~torch.ones(t, t).bool().tril(), -torch.inf)
    return model(batch.tokens, batch.positions, mask)


def backward_looking(model: Any, batch: Batch) -> Tensor:
    """Only the last document of a row is seen by others."""
    seen = batch.mask()
    seen[:, :, 0, -1] = 0.0
    return model(batch.tokens, batch.positions, seen)


class Mixing(nn.Module):
    """Mixes positions in a way that does not change when tokens of a document change places."""

    def __init__(self, how: str, length: int = 12) -> None:
        super().__init__()
        self.how, self.words, self.head = how, nn.Embedding(19, 6), nn.Linear(6, 19)
        self.norm = nn.LayerNorm([length, 6] if how == "norm" else [6])
        self.attention = nn.Linear(6, 18)

    def forward(self, tokens: Tensor, *rest: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.how == "mean":
            x = x + x.mean(1, keepdim=True)
        elif self.how == "attention":
            x = x + F.scaled_dot_product_attention(*self.attention(x).chunk(3, -1))
        return self.head(self.norm(x))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.pooler = packed_gpt(), nn.Linear(19, 1).double()

    def forward(self, *inputs: Tensor) -> Tensor:
        logits = self.body(*inputs)
        return logits + self.pooler(logits.mean(1)).unsqueeze(1)


def mixing(how: str) -> tuple[Callable[[], nn.Module], Logits]:
    return lambda: Mixing(how).double(), gpt_logits


REFUSED: dict[str, tuple[Callable[[], nn.Module], Logits]] = {
    "causal": (packed_gpt, causal),
    "a look back": (packed_gpt, backward_looking),
    "a pooled head": (Pooled, gpt_logits),
    **{how: mixing(how) for how in ("mean", "attention", "norm")},
}


@pytest.mark.parametrize("check_rows", [True, False])
@pytest.mark.parametrize("rows", [TWO_ROWS, ONE_ROW], ids=["two rows", "one row"])
@pytest.mark.parametrize("name", REFUSED)
def test_documents_that_see_each_other(name: str, rows: Any, check_rows: bool) -> None:
    build, logits = REFUSED[name]
    batch = both(rows)[0]
    batch.ids = batch.ids.clamp(min=0) if name in ("mean", "attention", "norm") else batch.ids
    batch.ids[:, -1] = torch.where(batch.ids[:, -1] < 0, 1000, batch.ids[:, -1])
    model = Mixing(name, batch.tokens.shape[1]).double() if name == "norm" else build()
    with pytest.raises(RowOwnershipError, match=MEET):
        one(model, logits, batch, check_rows=check_rows, method="first")


def test_control_without_mixing_they_are_scored() -> None:
    one(Mixing("none").double(), gpt_logits, both(TWO_ROWS)[0], method="first")


def test_norms_over_positions_of_one_document_per_row() -> None:
    batch = both(TWO_ROWS)[0]
    with pytest.raises(RowOwnershipError, match="samples lie along the features"):
        one(Mixing("norm").double(), gpt_logits, batch, torch.arange(2).unsqueeze(1).expand(2, 12), method="first")


def test_positions_of_transformers_that_do_not_restart() -> None:
    batch = both(ONE_ROW)[0]
    batch.positions = torch.arange(batch.tokens.shape[1]).unsqueeze(0)
    with pytest.raises(RowOwnershipError, match=MEET):
        one(llama(), by_positions, batch, method="first")


def test_one_id_per_row_is_the_way_out() -> None:
    batch = both(TWO_ROWS)[0]
    accountant = one(packed_gpt(), causal, batch, [7, 8])
    assert accountant.last.sample_ids.tolist() == [7, 8]


def test_a_leak_that_comes_later_is_seen_where_rows_are_read_again() -> None:
    batch = both(TWO_ROWS)[0]
    leaks = [False]
    logits: Logits = lambda m, b: causal(m, b) if leaks[0] else gpt_logits(m, b)  # noqa: E731
    accountant = attach(packed_gpt(), logits, batch, audit_every=3, method="first")
    for number in range(6):
        step(accountant, logits, batch, batch.ids)
        leaks[0] = number == 5
    with pytest.raises(RowOwnershipError, match=MEET):
        step(accountant, logits, batch, batch.ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (lambda ids: ids[:, :-1], r"shape \(2, 11\).*none of which has these positions"),
        (lambda ids: ids[:1], "none of which has these positions"),
        (lambda ids: ids.t(), "none of which has these positions"),
        (lambda ids: ids.unsqueeze(0), r"got shape \(1, 2, 12\)"),
        (lambda ids: torch.where(ids < 0, -100, ids), "got -100"),
        (lambda ids: torch.full_like(ids, -1), "there is no document"),
        (lambda ids: ids[:, :0], "ids per position are empty"),
        (lambda ids: ids.double(), "must be integers"),
    ],
)
def test_ids_of_another_shape(ids: Any, message: str) -> None:
    batch = both(TWO_ROWS)[0]
    with pytest.raises(IdsError, match=message):
        one(packed_gpt(), gpt_logits, batch, ids(batch.ids))


# Nobody


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("build", [packed_gpt, Scaled])
def test_padding_that_is_in_the_loss(build: Callable[[], nn.Module], method: str) -> None:
    batch = both(TWO_ROWS)[0]
    batch.labels[batch.ids < 0] = 1
    with pytest.raises(ConservationError):
        one(build(), gpt_logits, batch, **METHODS[method])


def test_documents_that_attend_to_nobody() -> None:
    batch = both(TWO_ROWS)[0]
    batch.ids[0, 0] = -1  # a first token that the rest of its document sees
    batch.labels[0, 0] = -100
    with pytest.raises(RowOwnershipError, match=MEET):
        one(packed_gpt(), gpt_logits, batch, method="first")


def test_padding_may_see_documents() -> None:
    """Padding at the end of a causal row sees what is before it; nothing is learned there, so nobody gets anything."""
    packed, _, ids = both(((4,), (6,), (2,)))
    assert bool((packed.ids < 0).any())
    got, expected = (one(packed_gpt(), causal, packed, given, method="first").last for given in (packed.ids, ids))
    assert distance(got.contributions["validation"], expected.contributions["validation"]) < 1e-9


# Uses, microbatches, going on later


def test_every_part_of_a_row_is_a_use() -> None:
    batch = both(TWO_ROWS)[0]
    batch.ids = torch.where((batch.documents == 2) | (batch.documents == 5), 0, batch.ids)  # again, in the same row and another
    accountant = one(packed_gpt(), gpt_logits, batch, method="first")
    assert accountant.last.sample_ids.tolist() == [0, 3, 0, 9, 12, 0]
    values = accountant.last.contributions["validation"]
    accountant.close()
    rows = {r["sample_id"]: r for r in accountant.scores().to_pylist()}
    assert {i: r["times_used"] for i, r in rows.items()} == {0: 3, 3: 1, 9: 1, 12: 1}
    assert rows[0]["score"] == pytest.approx(float(values[[0, 2, 5]].sum()), rel=1e-5)


@pytest.mark.parametrize("method", ["whole", "first"])
def test_microbatches_of_both_kinds(method: str) -> None:
    """Packed and unpacked microbatches of one step give what one of each kind gives."""
    packed, plain, ids = both(TWO_ROWS)
    other, _, other_ids = both(ONE_ROW, 1)
    found = []
    for first, first_ids in ((packed, packed.ids), (plain, ids)):
        accountant = attach(packed_gpt(), gpt_logits, other, **METHODS[method])
        for _ in range(2):
            with accountant.step() as one_step:
                for batch, given in ((first, first_ids), (other, other.ids)):
                    with one_step.microbatch(given):
                        loss_of(gpt_logits(accountant.model, batch), batch.labels).backward()
                accountant.optimizers[0].step()
                accountant.optimizers[0].zero_grad()
        assert accountant.last.sample_ids.tolist() == ids + other_ids
        found.append(accountant.last.contributions["validation"])
    assert distance(*found) < 1e-9


@pytest.mark.parametrize("method", ["whole", "exact"])
def test_open_windows_go_on_in_another_accountant(method: str) -> None:
    model = packed_gpt()
    held, batch = both(TWO_ROWS, 50)[1], both(TWO_ROWS, 7)[0]
    accountant = attach(model, gpt_logits, held, **METHODS[method])
    for seed in range(2):
        step(accountant, gpt_logits, (b := both(TWO_ROWS, seed)[0]), b.ids)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(copy.deepcopy(accountant.optimizers[0].state_dict()))
    resumed = attach(twin, gpt_logits, held, optimizer, **METHODS[method])
    resumed.load_state_dict(copy.deepcopy(accountant.state_dict()))
    for a in (accountant, resumed):
        step(a, gpt_logits, batch, batch.ids)
    assert torch.equal(open_credits(accountant), open_credits(resumed))


# How models are told where documents begin


class Masked(nn.Module):
    """A GPT that makes its mask itself: from tokens that end documents, from numbers of documents, or from lengths."""

    def __init__(self, how: str, checkpointed: bool = False) -> None:
        super().__init__()
        self.body, self.how, self.checkpointed = packed_gpt(), how, checkpointed

    def forward(self, tokens: Tensor, given: Tensor, positions: Tensor) -> Tensor:
        if self.how == "tokens":
            number = (tokens == 0).cumsum(1) - (tokens == 0).long()
        elif self.how == "numbers":
            tokens, number, positions = tokens.unsqueeze(0), given.unsqueeze(0), positions.unsqueeze(0)
        else:
            number = torch.bucketize(torch.arange(tokens.shape[1]), given[1:], right=True).unsqueeze(0)
        t = number.shape[1]
        seen = (number.unsqueeze(2) == number.unsqueeze(1)) & torch.ones(t, t).bool().tril()
        mask = torch.zeros(seen.shape, dtype=torch.float64).masked_fill_(~seen, -torch.inf).unsqueeze(1)
        if self.checkpointed:
            return checkpoint(self.body, tokens, positions, mask, use_reentrant=False)
        return self.body(tokens, positions, mask)


LENGTHS = torch.tensor([0, *ONE_ROW[0]]).cumsum(0)
WAYS: dict[str, tuple[Callable[[], nn.Module], Logits]] = {
    "numbers, flat": (lambda: Masked("numbers"), lambda m, b: m(b.tokens[0], b.documents[0], b.positions[0])),
    "lengths": (lambda: Masked("lengths"), lambda m, b: m(b.tokens, LENGTHS, b.positions)),
    "lengths, checkpointed": (lambda: Masked("lengths", True), lambda m, b: m(b.tokens, LENGTHS, b.positions)),
}


@pytest.mark.parametrize("method", ["whole", "first"])
@pytest.mark.parametrize("name", WAYS)
def test_ways_to_say_where_documents_begin(name: str, method: str) -> None:
    build, logits = WAYS[name]
    packed, plain, ids = both(ONE_ROW)
    got = one(build(), logits, packed, **METHODS[method]).last.contributions["validation"]
    expected = one(packed_gpt(), gpt_logits, plain, ids, **METHODS[method]).last.contributions["validation"]
    assert distance(got, expected) < 1e-9  # the validation is on the packed batch there and on rows here: the same loss


def test_wrong_lengths() -> None:
    packed = both(ONE_ROW)[0]
    with pytest.raises(RowOwnershipError, match=MEET):
        one(Masked("lengths"), lambda m, b: m(b.tokens, LENGTHS[[0, -1]], b.positions), packed, method="first")


def test_tokens_that_end_documents() -> None:
    batch = both(((4, 3, 5), (5, 5, 2)))[0]
    last = torch.ones_like(batch.ids, dtype=torch.bool)
    last[:, :-1] = batch.ids[:, 1:] != batch.ids[:, :-1]
    batch.tokens[last] = 0
    batch.positions = torch.arange(12).expand(2, 12)
    one(Masked("tokens"), lambda m, b: m(b.tokens, b.ids, b.positions), batch, method="first")

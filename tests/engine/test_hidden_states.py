"""Models of transformers that are asked for hidden states, attentions and router logits: the same with and without scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inrun.engine import Accountant
from loops import METHODS

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
VOCAB, STEPS = 31, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CAUSAL = {"vocab_size": VOCAB, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "num_key_value_heads": 1}
ASKED = {"output_hidden_states": True, "output_attentions": True}


def rows_of(n: int, seed: int) -> dict[str, Tensor]:
    rows = torch.randint(3, VOCAB, (n, 7), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": rows, "labels": rows}


def words_of(n: int, seed: int) -> dict[str, Tensor]:
    return {**rows_of(n, seed), "attention_mask": torch.ones(n, 7, dtype=torch.int64)}


def images_of(n: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, 16, 16, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, 5, (n,), generator=generator)}


#: Name: class, configuration, batches, what else is asked for, and how many hidden states and attentions there are.
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int, int], dict[str, Tensor]], dict[str, Any]]] = {
    "GPT2": (
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 1},
        rows_of,
        {},
    ),
    "Bert": ("BertForMaskedLM", {**SIZES, "vocab_size": VOCAB, "max_position_embeddings": 32}, words_of, {}),
    "ViT": ("ViTForImageClassification", {**SIZES, "image_size": 16, "patch_size": 8, "num_labels": 5}, images_of, {}),
    "Llama": ("LlamaForCausalLM", {**SIZES, **CAUSAL}, rows_of, {}),
    "Mixtral": (
        "MixtralForCausalLM",
        {**SIZES, **CAUSAL, "num_local_experts": 3, "num_experts_per_tok": 2},
        rows_of,
        {"output_router_logits": True},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    class_name, options, *_ = MODELS[name]
    if name == "Mixtral" and dtype == torch.float64:
        options = {**options, "experts_implementation": "eager"}  # torch has no grouped products of float64
    config = getattr(transformers, f"{name}Config")(**options, attn_implementation="eager")
    torch.manual_seed(0)
    return getattr(transformers, class_name)(config).to(dtype)


def tensors_of(out: Any) -> dict[str, list[Tensor]]:
    """Return all tensors of an output by its fields."""
    found = {}
    for field, value in out.items():
        some = value if isinstance(value, (tuple, list)) else [value]
        found[field] = [x.detach().clone() for x in some if isinstance(x, Tensor)]
    return found


def same(a: dict[str, list[Tensor]], b: dict[str, list[Tensor]]) -> bool:
    return a.keys() == b.keys() and all(len(a[k]) == len(b[k]) and all(map(torch.equal, a[k], b[k])) for k in a)


def objective(out: Any) -> Tensor:
    """Return a loss that depends on all that was asked for."""
    extra = [x.square().mean() for x in (*out.hidden_states, *out.attentions)]
    return out.loss + 0.1 * torch.stack(extra).sum()


def train(
    name: str, options: dict[str, Any] | None, dtype: torch.dtype = torch.float32
) -> tuple[list[dict[str, list[Tensor]]], list[Tensor], nn.Module]:
    """Train with what was asked for in the loss; return the outputs of every step and of one after closing, and the weights."""
    _, _, batch, asked = MODELS[name]
    model = build(name, dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    accountant = None
    if options is not None:
        held = batch(2, 99)
        accountant = Accountant(model, optimizer, lambda m: objective(m(**held, **ASKED, **asked)), **options)
    torch.manual_seed(7)
    outputs = []
    for t in range(STEPS):
        with accountant.step(range(4)) if accountant is not None else contextlib.nullcontext():
            out = model(**batch(4, t), **ASKED, **asked)
            outputs.append(tensors_of(out))
            objective(out).backward()
            optimizer.step()
            optimizer.zero_grad()
    if accountant is not None:
        accountant.close()
        assert accountant.coverage.scored_share == 1.0
        assert accountant.last.skipped is None
    out = model(**batch(3, STEPS), **ASKED, **asked)
    outputs.append(tensors_of(out))
    out.loss.backward()
    optimizer.step()
    return outputs, [p.detach().clone() for p in model.parameters()], model


@pytest.mark.parametrize("method", ["whole", "first"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_returns_is_the_same_with_scores_and_after_them(name: str, method: str) -> None:
    plain, weights, _ = train(name, None)
    assert all({"loss", "logits", "hidden_states", "attentions"} <= set(out) for out in plain)
    assert all(len(out["hidden_states"]) == 3 and len(out["attentions"]) == 2 for out in plain)
    assert ("router_logits" in plain[0]) == (name == "Mixtral")
    scored, same_weights, model = train(name, {**METHODS[method], "bitwise": True})
    assert all(map(same, plain, scored))
    assert all(map(torch.equal, weights, same_weights))
    # The hooks of transformers are set once per model, with the first call that asks; none of ours is left among them.
    control = build(name).train()
    control(**MODELS[name][2](2, 0), **ASKED, **MODELS[name][3])
    for module, other in zip(model.modules(), control.modules(), strict=True):
        assert type(module) is type(other)
        assert len(module._forward_hooks) == len(other._forward_hooks)
        assert len(module._forward_pre_hooks) == len(other._forward_pre_hooks)
        assert ("forward" in vars(module)) == ("forward" in vars(other))


@pytest.mark.parametrize("name", MODELS)
def test_without_bitwise_they_are_the_same_to_rounding(name: str) -> None:
    """Sums over samples are rounded otherwise than sums over positions."""
    plain, weights, _ = train(name, None, torch.float64)
    scored, near, _ = train(name, {}, torch.float64)
    assert same(plain[0], scored[0])  # before the first step
    for a, b in zip(plain, scored, strict=True):
        assert a.keys() == b.keys() and all(len(a[k]) == len(b[k]) for k in a)
        assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for k in a for x, y in zip(a[k], b[k], strict=True))
    assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-9) for x, y in zip(weights, near, strict=True))


def test_an_accountant_before_the_first_call_that_asks_changes_nothing() -> None:
    """transformers wraps the forwards of modules when hidden states are first asked for, here while scoring, and keeps them."""
    plain = build("Llama").eval()
    rows = rows_of(3, 5)
    expected = tensors_of(plain(**rows, **ASKED))
    model = build("Llama").eval()
    accountant = Accountant(model, torch.optim.SGD(model.parameters(), lr=0.0), lambda m: m(**rows_of(2, 6)).loss)
    assert same(tensors_of(model(**rows, **ASKED)), expected)
    with accountant.step(range(3)):
        out = model(**rows, **ASKED)
        assert same(tensors_of(out), expected)
        out.loss.backward()
        accountant.optimizers[0].step()
    assert same(tensors_of(model(**rows, **ASKED)), expected)
    accountant.close()
    assert same(tensors_of(model(**rows, **ASKED)), expected)

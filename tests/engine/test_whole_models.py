"""Whole models of transformers and peft against one sample at a time: convolutions, experts, state spaces, tables, adapters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from torch import Tensor, nn
from torch.nn import functional as F

from inrun.engine import Accountant, quadrature
from inrun.errors import CoverageError
from loops import METHODS
from reference import gradients, relative_error, sample_gradients

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about what is not installed

#: A model, what draws inputs for it, and how it is run.
Made = tuple[nn.Module, Callable[[int, torch.Generator], tuple[Tensor, ...]], Callable[..., Tensor]]
SPECIAL = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, **SPECIAL}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {"num_attention_heads": 2, "num_labels": 3, **NO_DROPOUT}


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers and state spaces compute parts in single precision, whatever the weights: not here."""
    single = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


def tokens(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(3, 30, (n, 6), generator=g),)


def two_texts(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return torch.randint(1, 30, (n, 6), generator=g), torch.randint(1, 30, (n, 5), generator=g)


def images(size: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda n, g: (torch.randn(n, 3, size, size, generator=g, dtype=torch.float64),)


def decoder(name: str, experts: str | None = None, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        config = getattr(tr, f"{name}Config")(**options)
        if experts:
            config._experts_implementation = experts
        return getattr(tr, f"{name}ForCausalLM")(config), tokens, lambda m, x: m(input_ids=x, use_cache=False).logits

    return make


def padded(name: str, kind: str = "ForCausalLM", **options: Any) -> Callable[[], Made]:
    """Rows with padding behind them, and a mask that says so."""

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        rows = torch.randint(1, 30, (n, 8), generator=g)
        rows[torch.arange(8) >= torch.randint(4, 9, (n, 1), generator=g)] = 0
        return (rows,)

    def run(m: Any, x: Tensor) -> Tensor:
        return m(input_ids=x, attention_mask=(x != 0).long()).logits * (x != 0).unsqueeze(-1)

    return lambda: (getattr(tr, name + kind)(getattr(tr, f"{name}Config")(**options)), draw, run)


def pictures(name: str, kind: str, size: int, output: str = "logits", **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = getattr(tr, name + kind)(getattr(tr, f"{name}Config")(**options))
        return model, images(size), lambda m, x: getattr(m(pixel_values=x), output)

    return make


def both_ways(name: str, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = getattr(tr, f"{name}ForConditionalGeneration")(getattr(tr, f"{name}Config")(**options))
        return model, two_texts, lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False).logits

    return make


def whisper() -> Made:
    sizes = {f"{side}_{what}": number for side in ("encoder", "decoder") for what, number in
             {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}  # fmt: skip
    config = tr.WhisperConfig(
        **(SPECIAL | {"vocab_size": 40}), num_mel_bins=4, d_model=12, max_source_positions=8, max_target_positions=8, dropout=0.0,
        decoder_start_token_id=1, **sizes,
    )  # fmt: skip

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(n, 4, 16, generator=g, dtype=torch.float64), torch.randint(1, 40, (n, 5), generator=g)

    model = tr.WhisperForConditionalGeneration(config)
    return model, draw, lambda m, x, y: m(input_features=x, decoder_input_ids=y, use_cache=False).logits


def checkpointed(make: Callable[[], Made], reentrant: bool) -> Callable[[], Made]:
    def made() -> Made:
        model, draw, run = make()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        return model, draw, run

    return made


def group_norm() -> Made:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False)]
    model = nn.Sequential(*body, nn.GroupNorm(4, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return model, images(8), lambda m, x: m(x)


class Cells(nn.Module):
    """A loop over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(30, 6), nn.LSTMCell(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(len(x), 5).double(), torch.ones(len(x), 5).double())
        for word in self.embed(x).unbind(1):
            state = self.cell(word, state)
        return state[0]


def adapted(name: str, **options: Any) -> Callable[[], Made]:
    """A small Llama with an adapter of peft; what peft froze stays frozen."""

    def make() -> Made:
        peft = pytest.importorskip("peft")
        base = tr.LlamaForCausalLM(tr.LlamaConfig(hidden_size=12, intermediate_size=16, **DECODER))
        return peft.get_peft_model(base, getattr(peft, name)(**options)), tokens, lambda m, x: m(input_ids=x).logits

    return make


T5 = {"vocab_size": 30, "d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {"vocab_size": 30, "d_model": 12, "max_position_embeddings": 8, "dropout": 0.0, "scale_embedding": True,
        **{f"{side}_{what}": n for side in ("encoder", "decoder")
           for what, n in {"layers": 1, "attention_heads": 2, "ffn_dim": 16}.items()}}  # fmt: skip
GPT2 = {"vocab_size": 30, "n_positions": 12, "n_embd": 12, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}  # fmt: skip
EXPERTS = {"hidden_size": 12, "intermediate_size": 8, "num_experts_per_tok": 2, **DECODER}
BOTH, ONE = {"target_modules": ["q_proj", "down_proj"]}, {"target_modules": ["q_proj"]}
MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": padded("GPT2", "LMHeadModel", **GPT2),
    "neox": padded("GPTNeoX", vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                   max_position_embeddings=16),
    "llama, tied": padded("Llama", hidden_size=16, intermediate_size=24, tie_word_embeddings=True, **DECODER),
    "bert": padded("Bert", "ForMaskedLM", vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
                   intermediate_size=20, max_position_embeddings=16, **NO_DROPOUT),
    "vit": pictures("ViT", "ForImageClassification", 8, hidden_size=12, num_hidden_layers=2, intermediate_size=20, image_size=8,
                    patch_size=4, **VISION),
    "swin": pictures("Swin", "ForImageClassification", 16, image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], window_size=2,
                     drop_path_rate=0.0, num_heads=[2, 2], num_labels=3, **NO_DROPOUT),
    "clip": pictures("CLIPVision", "Model", 8, "pooler_output", hidden_size=12, intermediate_size=16, num_hidden_layers=2,
                     num_attention_heads=2, image_size=8, patch_size=4),
    "resnet": pictures("ResNet", "ForImageClassification", 16, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1],
                       layer_type="basic", num_labels=3),
    "group norm": group_norm,
    "whisper": whisper,
    "bart": both_ways("Bart", **BART),
    "t5": both_ways("T5", **T5),
    "t5, checkpointed": checkpointed(both_ways("T5", **T5), False),
    "t5, reentrant checkpoints": checkpointed(both_ways("T5", **T5), True),
    "mixtral": decoder("Mixtral", "eager", num_local_experts=4, **EXPERTS),
    "mixtral, batched": decoder("Mixtral", "batched_mm", num_local_experts=4, **EXPERTS),
    "olmoe": decoder("Olmoe", "batched_mm", num_experts=4, **EXPERTS),
    "mamba": decoder("Mamba", hidden_size=8, state_size=4, expand=2, time_step_rank=3, num_hidden_layers=2, **SPECIAL),
    "mamba2": decoder("Mamba2", hidden_size=8, state_size=4, expand=2, num_heads=4, head_dim=4, n_groups=2, chunk_size=4,
                      num_hidden_layers=2, **SPECIAL),
    "cells": lambda: (Cells(), tokens, lambda m, x: m(x)),
    "LoRA": adapted("LoraConfig", r=2, lora_alpha=4, **BOTH),
    "DoRA": adapted("LoraConfig", r=2, lora_alpha=4, use_dora=True, **BOTH),
    "prompt tuning": adapted("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt encoder": adapted("PromptEncoderConfig", task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "LoHa": adapted("LoHaConfig", r=2, alpha=4, **BOTH),
    "LoKr": adapted("LoKrConfig", r=2, alpha=4, **BOTH),
    "HRA": adapted("HRAConfig", r=2, **BOTH),
    "Shira": adapted("ShiraConfig", r=2, **ONE),
    "OFT": adapted("OFTConfig", r=0, oft_block_size=4, **BOTH),
    "BOFT": adapted("BOFTConfig", boft_block_size=4, **ONE),
    "RandLora": adapted("RandLoraConfig", r=2, **BOTH),
    "WaveFT": adapted("WaveFTConfig", n_frequency=20, **ONE),
    "GraLoRA": adapted("GraloraConfig", r=4, gralora_k=2, **ONE),
    "VBLoRA": adapted("VBLoRAConfig", r=2, num_vectors=8, vector_length=4, **ONE),
    "Road": adapted("RoadConfig", group_size=4, **ONE),
}  # fmt: skip


def loss_of(run: Callable[..., Tensor], model: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
    return run(model, *rows).square().sum()


def made(name: str) -> Made:
    torch.manual_seed(0)
    model, draw, run = MODELS[name]()
    model = model.double().train(name != "resnet")  # batch norm with known statistics
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model, draw, run


def scores(name: str, method: str, lr: float, n: int = 5) -> tuple[Tensor, Tensor]:
    """One step of SGD: what the engine says, and what one sample at a time says."""
    model, draw, run = made(name)
    twin, g = copy.deepcopy(model), torch.Generator().manual_seed(1)
    if hasattr(twin, "gradient_checkpointing_disable"):
        twin.gradient_checkpointing_disable()
    x, held = draw(n, g), draw(2, g)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    options = METHODS[method] | ({"sketch": 10**6} if method == "whole" else {})
    with Accountant(model, optimizer, lambda m: loss_of(run, m, held), audit_every=1, **options) as accountant:
        with accountant.step(range(n)):
            loss_of(run, model, x).backward()
            optimizer.step()
        got = accountant.last.contributions["validation"]
        assert accountant.coverage.scored_share == 1.0
    params = [p for p in twin.parameters() if p.requires_grad]
    each = sample_gradients(lambda j: loss_of(run, twin, tuple(z[j : j + 1] for z in x)), n, params)
    moves = [-lr * torch.stack(gs).sum(0) for gs in zip(*each, strict=True)]
    twin.eval()
    if method == "second":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            slopes = torch.autograd.grad(loss_of(run, twin, held), params, create_graph=True, allow_unused=True)
            along = sum((s * d).sum() for s, d in zip(slopes, moves, strict=True) if s is not None)
            bent = gradients(along, params) if along.requires_grad else [torch.zeros_like(p) for p in params]
            pairs = zip(slopes, bent, strict=True)
            at = [h / 2 if s is None else s.detach() + h / 2 for s, h in pairs]
    else:
        with torch.no_grad():
            for p, d in zip(params, moves, strict=True):
                p.add_(d, alpha=0.0 if method == "first" else 0.5)
        at = gradients(loss_of(run, twin, held), params)
    return got, lr * torch.stack([sum((a * b).sum() for a, b in zip(gs, at, strict=True)) for gs in each])


QUICK = ("gpt2", "bert", "vit", "swin", "t5", "t5, reentrant checkpoints", "mixtral", "mamba2", "cells", "DoRA", "prompt encoder",
         "HRA", "VBLoRA")  # fmt: skip
#: One quick model and method each; all pairs where slow tests run.
PAIRS = {("gpt2", "exact"), ("t5", "whole"), ("mixtral", "exact"), ("mamba2", "step"), ("DoRA", "second"), ("HRA", "whole")}


@pytest.mark.parametrize("name", [pytest.param(k, marks=[] if k in QUICK else [pytest.mark.slow]) for k in MODELS])
def test_first_order_scores_are_those_of_one_sample_at_a_time(name: str) -> None:
    got, truth = scores(name, "first", 0.1)
    assert relative_error(got, truth) < 1e-9
    assert relative_error(got.roll(1), truth) > 1e-3  # the control


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[] if (name, method) in PAIRS else [pytest.mark.slow])
        for name in MODELS
        for method in METHODS
        if method != "first"
    ],
)
def test_every_method(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation gradient is that of the middle of the move, or bent along it, which shows."""
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))
    got, truth = scores(name, method, 1e-5)
    assert relative_error(got, truth) < 1e-8
    bent = (name, method) != ("Shira", "second")  # by queries alone attention is nearly linear
    assert not bent or relative_error(scores(name, "first", 1e-5)[1], truth) > 1e-7  # the control


def test_custom_functions_of_data_and_parameters_are_refused_by_name() -> None:
    """They are not seen when they are called; those of parameters alone (LoHa, RandLora) are found where they meet data."""
    MODELS["C3A"] = adapted("C3AConfig", block_size=4, **ONE)
    try:
        with pytest.raises(CoverageError, match=r"q_proj\.c3a_kernel.*custom autograd function"):
            scores("C3A", "first", 0.1)
    finally:
        del MODELS["C3A"]


@pytest.mark.parametrize("name", ["LoHa", pytest.param("mamba", marks=pytest.mark.slow)])
def test_training_is_the_same_bit_for_bit(name: str) -> None:
    weights = []
    for attached in (False, True):
        model, draw, run = made(name)
        x, held = (draw(5, torch.Generator().manual_seed(k)) for k in (1, 2))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        value = lambda m: loss_of(run, m, held)  # noqa: B023, E731
        accountant = Accountant(model, optimizer, value, bitwise=True) if attached else None
        for _ in range(3):
            with accountant.step(range(5)) if accountant else contextlib.nullcontext():
                loss_of(run, model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append([p.detach().clone() for p in trained])
    assert all(map(torch.equal, *weights))


class Towers(nn.Module):
    """Two views of every sample, and their similarities, which are what in-batch negatives are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(self.last(torch.tanh(self.first(x[:, i]))) for i in (0, 1))  # type: ignore[return-value]


def contrastive(out: Any) -> Tensor:
    return F.cross_entropy(out[0] @ out[1].t(), torch.arange(len(out[0])))


@pytest.mark.parametrize("method", ["first", "exact"])
def test_a_loss_that_couples_rows_scores_the_share_through_each_row(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What row n's copy of every parameter would get."""
    monkeypatch.setattr(quadrature, "RESIDUAL", float("inf"))
    torch.manual_seed(0)
    model = Towers().double()
    x, held = torch.randn(2, 5, 2, 4, dtype=torch.float64)
    copies = {k: p.detach().expand(5, *p.shape).clone().requires_grad_() for k, p in model.named_parameters()}
    linear = lambda name, z: torch.einsum("noi,ni->no", copies[f"{name}.weight"], z) + copies[f"{name}.bias"]  # noqa: E731
    loss = contrastive([linear("last", torch.tanh(linear("first", x[:, i]))) for i in (0, 1)])
    shares = torch.autograd.grad(loss, list(copies.values()))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with Accountant(model, optimizer, lambda m: contrastive(m(held)), audit_every=1, **METHODS[method]) as accountant:
        slopes = torch.autograd.grad(contrastive(model(held)), list(model.parameters()))
        with accountant.step(range(5)):
            contrastive(model(x)).backward()
            optimizer.step()
    want = 1e-6 * sum((g * v).reshape(5, -1).sum(1) for g, v in zip(shares, slopes, strict=True))
    assert relative_error(accountant.last.contributions["validation"], want) < (1e-9 if method == "first" else 1e-5)
    assert relative_error(want.roll(1), want) > 1e-2

"""Whole models with convolutions, raw parameters, experts, state spaces and adapters, against one sample at a time."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tr
from torch import Tensor, nn

import inrun
from inrun.errors import StepError
from reference import contributions, gradients, relative_error, sample_gradients

Made = tuple[nn.Module, Callable[[int, torch.Generator], tuple[Tensor, ...]], Callable[..., Tensor]]
ATTENTION = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}

SPECIAL = {"vocab_size": 30, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, **SPECIAL}


def logits(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, use_cache=False).logits


@pytest.fixture(autouse=True)
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers and state spaces compute parts in single precision, whatever the weights: not here."""
    single = Tensor.float
    monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))


def tokens(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(3, 30, (n, 6), generator=g),)


def images(size: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda n, g: (torch.randn(n, 3, size, size, generator=g, dtype=torch.float64),)


def vit() -> Made:
    config = tr.ViTConfig(hidden_size=12, num_hidden_layers=2, intermediate_size=20, image_size=8, patch_size=4, **ATTENTION)
    return tr.ViTForImageClassification(config), images(8), lambda m, x: m(pixel_values=x).logits


def swin() -> Made:
    heads = ATTENTION | {"num_heads": [2, 2]}
    del heads["num_attention_heads"]
    config = tr.SwinConfig(image_size=16, patch_size=2, embed_dim=8, depths=[1, 2], window_size=2, drop_path_rate=0.0, **heads)
    return tr.SwinForImageClassification(config), images(16), lambda m, x: m(pixel_values=x).logits


def clip() -> Made:
    config = tr.CLIPVisionConfig(
        hidden_size=12, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    return tr.CLIPVisionModel(config), images(8), lambda m, x: m(pixel_values=x).pooler_output


def resnet() -> Made:
    """In eval mode: batch norm with known statistics."""
    config = tr.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3)
    return tr.ResNetForImageClassification(config), images(16), lambda m, x: m(pixel_values=x).logits


def whisper() -> Made:
    config = tr.WhisperConfig(
        vocab_size=40,
        num_mel_bins=4,
        d_model=12,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_source_positions=8,
        max_target_positions=8,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(n, 4, 16, generator=g, dtype=torch.float64), torch.randint(1, 40, (n, 5), generator=g)

    model = tr.WhisperForConditionalGeneration(config)
    return model, draw, lambda m, x, y: m(input_features=x, decoder_input_ids=y, use_cache=False).logits


def bart() -> Made:
    """Classes of their own for embeddings: positions that are counted for every row, words that are scaled and padded."""
    config = tr.BartConfig(
        vocab_size=30,
        d_model=12,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=8,
        dropout=0.0,
        scale_embedding=True,
    )

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randint(1, 6, (n, 6), generator=g), torch.randint(1, 6, (n, 5), generator=g)

    model = tr.BartForConditionalGeneration(config)
    return model, draw, lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False).logits


def t5() -> Made:
    """Tables of relative positions that run once, are permuted, and serve all layers."""
    config = tr.T5Config(
        vocab_size=30, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3, dropout_rate=0.0, decoder_start_token_id=0
    )

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randint(1, 30, (n, 6), generator=g), torch.randint(1, 30, (n, 5), generator=g)

    model = tr.T5ForConditionalGeneration(config)
    return model, draw, lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False).logits


def mixtral(implementation: str = "eager") -> Made:
    config = tr.MixtralConfig(hidden_size=12, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2, **DECODER)
    config._experts_implementation = implementation
    return tr.MixtralForCausalLM(config), tokens, logits


def mixtral_batched() -> Made:
    return mixtral("batched_mm")


def olmoe() -> Made:
    config = tr.OlmoeConfig(hidden_size=12, intermediate_size=8, num_experts=4, num_experts_per_tok=2, **DECODER)
    config._experts_implementation = "batched_mm"
    return tr.OlmoeForCausalLM(config), tokens, logits


def mamba() -> Made:
    """The mixer reads the weights of its convolution and of dt_proj instead of calling them."""
    config = tr.MambaConfig(hidden_size=8, state_size=4, expand=2, time_step_rank=3, num_hidden_layers=2, **SPECIAL)
    return tr.MambaForCausalLM(config), tokens, logits


def mamba2() -> Made:
    """With a gated norm."""
    config = tr.Mamba2Config(
        hidden_size=8, state_size=4, expand=2, num_heads=4, head_dim=4, n_groups=2, chunk_size=4, num_hidden_layers=2, **SPECIAL
    )
    return tr.Mamba2ForCausalLM(config), tokens, logits


def group_norm() -> Made:
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, bias=False)]
    model = nn.Sequential(*body, nn.GroupNorm(4, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return model, images(8), lambda m, x: m(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(30, 6), nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x))[0])


class Cells(nn.Module):
    """``nn.LSTMCell`` has no rule, and no way to run many samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(30, 6), nn.LSTMCell(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        state = (torch.zeros(len(x), 5).double(), torch.ones(len(x), 5).double())
        for word in self.embed(x).unbind(1):
            state = self.cell(word, state)
        return state[0]


def cells() -> Made:
    return Cells(), tokens, lambda m, x: m(x)


def lstm() -> Made:
    return Recurrent(), tokens, lambda m, x: m(x)


def adapted(name: str, **options: Any) -> Made:
    """A small Llama with an adapter of peft; what peft froze stays frozen."""
    peft = pytest.importorskip("peft")
    base = tr.LlamaForCausalLM(tr.LlamaConfig(hidden_size=12, intermediate_size=16, **DECODER))
    model = peft.get_peft_model(base, getattr(peft, name)(**options))
    return model, tokens, lambda m, x: m(input_ids=x).logits


def lora() -> Made:
    return adapted("LoraConfig", r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"])


def dora() -> Made:
    return adapted("LoraConfig", r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], use_dora=True)


def prompt_tuning() -> Made:
    return adapted("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3)


def prompt_encoder() -> Made:
    """Layers that run on what a table of prompts gives, once for the whole batch."""
    return adapted("PromptEncoderConfig", task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8)


VISION = [vit, swin, clip, resnet, group_norm]
SEQUENCES = [whisper, bart, t5, mixtral, mixtral_batched, olmoe, mamba, mamba2, lstm]
ADAPTERS = [lora, dora, prompt_tuning, prompt_encoder]
#: By method: options, and the points of the move at which the validation gradient is taken ("hessian" for its derivative).
METHODS: dict[str, tuple[dict[str, Any], float | str]] = {
    "lookahead": ({"credit": "step", "method": "lookahead"}, 0.0),
    "second": ({"credit": "step", "method": "second"}, "hessian"),
    "midpoint": ({"credit": "step", "method": "midpoint", "quadrature": "midpoint"}, 0.5),
    "whole, exact": ({"credit": "whole", "credit_memory": "exact", "quadrature": "gauss1"}, 0.5),
    "whole, sketch": ({"credit": "whole", "credit_memory": "sketch", "sketch": 10**6, "quadrature": "gauss1"}, 0.5),
}


def scores(build: Callable[[], Made], options: dict[str, Any], point: float | str, lr: float) -> tuple[Tensor, Tensor, set[str]]:
    """One step of SGD: what the engine says, what one sample at a time says, and the rules that were used."""
    torch.manual_seed(0)
    model, draw, run = build()
    model = model.double().train(build is not resnet)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    twin, n = copy.deepcopy(model), 5
    g = torch.Generator().manual_seed(1)
    x, held = draw(n, g), draw(2, g)

    def loss(net: nn.Module, rows: tuple[Tensor, ...]) -> Tensor:
        return run(net, *rows).square().sum()

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    with inrun.Accountant(model, optimizer, lambda net: loss(net, held), audit_every=1, **options) as accountant:
        with accountant.step(range(n)):
            loss(model, x).backward()
            optimizer.step()
    params = [p for p in twin.parameters() if p.requires_grad]
    g_n = sample_gradients(lambda j: loss(twin, tuple(z[j : j + 1] for z in x)), n, params)
    moves = [-lr * torch.stack(gs).sum(0) for gs in zip(*g_n, strict=True)]
    if point == "hessian":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            slopes = torch.autograd.grad(loss(twin, held), params, create_graph=True, allow_unused=True)
            along = sum((s * d).sum() for s, d in zip(slopes, moves, strict=True) if s is not None)
            pairs = zip(slopes, gradients(along, params), strict=True)
            at = [h / 2 if s is None else s.detach() + h / 2 for s, h in pairs]
    else:
        with torch.no_grad():
            for p, d in zip(params, moves, strict=True):
                p.add_(d, alpha=float(point))
        at = gradients(loss(twin, held), params)
    truth = contributions(g_n, [torch.full_like(p, lr) for p in params], at)
    return accountant.last.contributions["validation"], truth, {row.rule for row in accountant.coverage}


@pytest.mark.parametrize("build", [*VISION, *SEQUENCES, *ADAPTERS], ids=lambda f: f.__name__)
def test_against_one_sample_at_a_time(build: Callable[[], Made]) -> None:
    got, truth, rules = scores(build, {"credit": "step", "method": "first"}, 0.0, 0.1)
    assert "fallback" not in rules
    assert relative_error(got, truth) < 1e-9


BOTH, ONE = {"target_modules": ["q_proj", "down_proj"]}, {"target_modules": ["q_proj"]}
#: Adapters that hold their parameters in a ParameterDict and work on the whole weight: their options.
WHOLE_WEIGHT: dict[str, dict[str, Any]] = {
    "LoHaConfig": {"r": 2, "alpha": 4, **BOTH},
    "LoKrConfig": {"r": 2, "alpha": 4, **BOTH},
    "HRAConfig": {"r": 2, **BOTH},
    "ShiraConfig": {"r": 2, **ONE},
    "OFTConfig": {"r": 0, "oft_block_size": 4, **BOTH},
    "BOFTConfig": {"boft_block_size": 4, **ONE},
    "RandLoraConfig": {"r": 2, **BOTH},
    "C3AConfig": {"block_size": 4, **ONE},
    "WaveFTConfig": {"n_frequency": 20, **ONE},
    "GraloraConfig": {"r": 4, "gralora_k": 2, **ONE},
    "VBLoRAConfig": {"r": 2, "num_vectors": 8, "vector_length": 4, **ONE},
    "RoadConfig": {"group_size": 4, **ONE},
}
QUICK = ["LoHaConfig", "HRAConfig", "ShiraConfig", "VBLoRAConfig"]


@pytest.mark.filterwarnings("ignore")  # of peft, about what is not installed
@pytest.mark.parametrize("name", [pytest.param(k, marks=[] if k in QUICK else [pytest.mark.slow]) for k in WHOLE_WEIGHT])
def test_adapters_that_work_on_the_whole_weight(name: str) -> None:
    """Where what is read cannot be followed, the module around the ParameterDict runs again: the dictionary itself cannot."""
    got, truth, _ = scores(lambda: adapted(name, **WHOLE_WEIGHT[name]), {"credit": "step", "method": "first"}, 0.0, 0.1)
    assert relative_error(got, truth) < 1e-9
    options, point = METHODS["midpoint"]
    got, truth, _ = scores(lambda: adapted(name, **WHOLE_WEIGHT[name]), options, point, 1e-5)
    assert relative_error(got, truth) < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_adapters_train_as_without_scores() -> None:
    weights = []
    for attached in (False, True):
        torch.manual_seed(0)
        model, draw, run = adapted("LoHaConfig", **WHOLE_WEIGHT["LoHaConfig"])
        x, held = (draw(5, torch.Generator().manual_seed(k)) for k in (1, 2))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        value = lambda m: run(m, *held).square().sum()  # noqa: B023, E731
        accountant = inrun.Accountant(model, optimizer, value, bitwise=True) if attached else None
        for _ in range(3):
            with contextlib.nullcontext() if accountant is None else accountant.step(range(5)):
                run(model, *x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append([p.detach().clone() for p in trained])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def t5_checkpointed(reentrant: bool) -> Made:
    model, draw, run = t5()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model, draw, run


def test_t5_under_checkpoints() -> None:
    """Its first block returns the biases that all others use: gradient of all samples in one, where checkpoints are reentrant."""
    first = {"credit": "step", "method": "first"}
    got, truth, _ = scores(lambda: t5_checkpointed(False), first, 0.0, 0.1)
    assert relative_error(got, truth) < 1e-9
    with pytest.raises(StepError, match=r"relative_attention_bias.*leaves a segment.*use_reentrant"):
        scores(lambda: t5_checkpointed(True), first, 0.0, 0.1)


FEW = [(t5, "whole, sketch"), (mixtral, "whole, exact"), (mamba, "midpoint"), (dora, "second"), (cells, "whole, exact")]
FEW += [(bart, "whole, sketch")]
ALL = [(build, method) for build in [*VISION, *SEQUENCES, *ADAPTERS, cells] for method in METHODS]


@pytest.mark.parametrize(
    ("build", "method"),
    [pytest.param(*pair, id=f"{pair[0].__name__}-{pair[1]}", marks=[] if pair in FEW else [pytest.mark.slow]) for pair in ALL],
)
def test_every_method(build: Callable[[], Made], method: str) -> None:
    """Norms compute in single precision at the most, which moved weights show."""
    options, point = METHODS[method]
    got, truth, _ = scores(build, options, point, 1e-5)
    assert relative_error(got, truth) < 1e-6
    if point:
        plain = scores(build, {"credit": "step", "method": "first"}, 0.0, 1e-5)[1]
        assert relative_error(plain, truth) > 1e-6  # the control: where the gradient is taken shows

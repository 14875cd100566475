"""Whole models of transformers with convolutions, raw parameters and sequence-first parts, against one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import transformers as tr
from torch import Tensor, nn

import inrun
from reference import contributions, gradients, relative_error, sample_gradients

Made = tuple[nn.Module, Callable[[int, torch.Generator], tuple[Tensor, ...]], Callable[..., Tensor]]
ATTENTION = {"num_attention_heads": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}


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


def t5() -> Made:
    """Tables of relative positions that run once, are permuted, and serve all layers."""
    config = tr.T5Config(
        vocab_size=30, d_model=12, d_kv=4, d_ff=16, num_layers=2, num_heads=3, dropout_rate=0.0, decoder_start_token_id=0
    )

    def draw(n: int, g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randint(1, 30, (n, 6), generator=g), torch.randint(1, 30, (n, 5), generator=g)

    model = tr.T5ForConditionalGeneration(config)
    return model, draw, lambda m, x, y: m(input_ids=x, decoder_input_ids=y, use_cache=False).logits


@pytest.mark.parametrize("build", [vit, swin, clip, resnet, whisper, t5], ids=lambda f: f.__name__)
def test_against_one_sample_at_a_time(build: Callable[[], Made]) -> None:
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

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with inrun.Accountant(
        model, optimizer, lambda net: loss(net, held), credit="step", method="first", audit_every=1
    ) as accountant:
        with accountant.step(range(n)):
            loss(model, x).backward()
            optimizer.step()
    assert "fallback" not in {row.rule for row in accountant.coverage}
    params = [p for p in twin.parameters() if p.requires_grad]
    g_n = sample_gradients(lambda j: loss(twin, tuple(z[j : j + 1] for z in x)), n, params)
    truth = contributions(g_n, [torch.full_like(p, 0.1) for p in params], gradients(loss(twin, held), params))
    assert relative_error(accountant.last.contributions["validation"], truth) < 1e-9

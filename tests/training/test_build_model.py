"""The one model builder, as training, bench and fidelity use it."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from inrun.bench.shape import Shape
from inrun.errors import ConfigurationError
from inrun.training.config import Model
from inrun.training.gpt import GPT, GPTConfig
from inrun.training.models import build_model

SIZES = {"context": 8, "width": 16, "layers": 1, "heads": 2}


def shares_its_table(model) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize(("tied", "shared"), [(True, True), (False, False), (None, False)])
def test_tied_or_as_the_type_has_it(tied, shared):
    assert shares_its_table(build_model(Model(type="llama", tied=tied, **SIZES), 50)) is shared


@pytest.mark.parametrize("tied", [True, None])
def test_the_gpt_is_tied_unless_told_otherwise(tied):
    assert build_model(Model(tied=tied, **SIZES), 50).config.tied


@pytest.mark.parametrize("given", ["folder", "file"])
def test_bench_builds_from_a_config(tmp_path, given):
    LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=8
    ).save_pretrained(tmp_path)
    path = str(tmp_path if given == "folder" else tmp_path / "config.json")
    model = Shape(model=path, vocab=50, context=8).build()
    assert model.config.intermediate_size == 24 and not shares_its_table(model)
    with pytest.raises(ConfigurationError, match="vocab_size 50"):
        Shape(model=path, vocab=40, context=8).build()
    with pytest.raises(ConfigurationError, match="has 8 positions"):
        Shape(model=path, vocab=50, context=9).build()


def test_bench_measures_without_dropout_and_few_positions(tmp_path):
    GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=8).save_pretrained(tmp_path)
    assert Shape(model=str(tmp_path), vocab=50, context=8).build().config.resid_pdrop == 0.0
    assert Shape(model="gpt2", vocab=50, width=16, layers=1, heads=2, context=2).build().config.n_positions == 2


def test_bench_and_training_begin_with_the_same_weights():
    one = Shape(width=16, layers=1, heads=2, context=8, vocab=50, seed=3).build()
    torch.manual_seed(3)
    other = GPT(GPTConfig(50, 8, 16, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))

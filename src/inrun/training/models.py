"""The model of a run: the reference GPT, or a causal language model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from inrun.errors import ConfigurationError
from inrun.training.checkpoint import read_checkpoint
from inrun.training.config import Model
from inrun.training.gpt import GPT, GPTConfig
from inrun.training.loss import logits_of

_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "hidden_dropout", "dropout")


def build_model(config: Model, vocab: int) -> nn.Module:
    """Make the model that a configuration names, for a tokenizer with ``vocab`` ids."""
    return _gpt(config, vocab) if config.type == "gpt" else _from_transformers(config, vocab)


def _gpt(config: Model, vocab: int) -> nn.Module:
    if config.width % config.heads:
        raise ConfigurationError(f"model.width {config.width} is not a multiple of model.heads {config.heads}")
    if config.options or bool(config.path) != config.pretrained:
        raise ConfigurationError(
            "model.type is gpt: model.options belong to models of transformers, and model.path, a checkpoint of such a run, goes "
            "with model.pretrained=true"
        )
    shape = GPTConfig(vocab, config.context, config.width, config.layers, config.heads, config.dropout, config.tied is not False)
    model = GPT(shape)
    if config.path is not None:
        read_checkpoint(Path(config.path)).load_model(model)
    return model


def _from_transformers(config: Model, vocab: int) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigurationError(f"model.type {config.type!r} needs transformers: pip install 'inrun[hf]'") from error
    disable_progress_bar()
    described = _transformers_config(config, vocab)
    described.use_cache = False
    try:
        if config.pretrained and config.path is not None:
            # Local files in safetensors only: neither a download nor a pickle.
            model = AutoModelForCausalLM.from_pretrained(
                config.path, config=described, local_files_only=True, use_safetensors=True, dtype=torch.float32
            )
        else:
            model = AutoModelForCausalLM.from_config(described)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the model cannot be made: {' '.join(str(error).split())[:400]}") from error
    made: nn.Module = model
    size = made.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if size < vocab:
        raise ConfigurationError(f"the tokenizer has {vocab} ids and the model a vocabulary of {size}; they do not fit together")
    _check_causal(made, config)
    return made


def _transformers_config(config: Model, vocab: int) -> Any:
    from transformers import AutoConfig

    if config.path is not None:
        path = Path(config.path)
        if not (path / "config.json").is_file() and not (path.is_file() and not config.pretrained):
            raise ConfigurationError(f"model.path {config.path!r} is not a folder with a config.json")
        try:
            found = AutoConfig.from_pretrained(config.path, local_files_only=True, trust_remote_code=False, **config.options)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"model.path {config.path!r} cannot be read: {' '.join(str(error).split())[:400]}") from error
        most = getattr(found, "max_position_embeddings", None)
        if isinstance(most, int) and most < config.context:
            raise ConfigurationError(f"model.context is {config.context}, the model in {config.path!r} has {most} positions")
        _set_dropout(found, config)
        return found
    if config.pretrained:
        raise ConfigurationError("model.pretrained needs model.path, a local folder with config.json and model.safetensors")
    sizes = {
        "vocab_size": vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "max_position_embeddings": config.context,
    }
    if config.tied is not None:
        sizes["tie_word_embeddings"] = config.tied
    try:
        found = AutoConfig.for_model(config.type, **{**sizes, **config.options})
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"model.type {config.type!r} cannot be made ({' '.join(str(error).split())[:200]}); accepted are gpt, and the causal "
            "language models of transformers such as gpt2, gpt_neox, llama"
        ) from error
    _set_dropout(found, config)
    # A text-only vocabulary: ids that some configs name by default may lie outside of it.
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        value = getattr(found, name, None)
        if isinstance(value, int) and value >= vocab:
            setattr(found, name, None)
    return found


def _set_dropout(found: Any, config: Model) -> None:
    for name in _DROPOUTS:
        if isinstance(getattr(found, name, None), int | float) and name not in config.options:
            setattr(found, name, config.dropout)


@torch.no_grad()
def _check_causal(model: nn.Module, config: Model) -> None:
    """Refuse a model whose first positions see the last: its loss would read the answer, and padding."""
    one = torch.zeros(1, min(4, config.context), dtype=torch.long)
    other = one.clone()
    other[0, -1] = 1
    model.eval()
    same = torch.allclose(logits_of(model, one)[:, :-1], logits_of(model, other)[:, :-1], atol=1e-5)
    model.train()
    if not same:
        raise ConfigurationError(
            f"model.type {config.type!r} is not causal: positions see those behind them. Some such models have an option for it: "
            "model.options.is_decoder=true"
        )


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters into those that decay (matrices and tables) and those that do not (norms and biases)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint says of the model's shape, as plain data."""
    config = getattr(model, "config", None)
    if isinstance(config, GPTConfig):
        return {"type": "gpt", **vars(config)}
    if config is None or not hasattr(config, "to_json_string"):
        return {}
    described: dict[str, Any] = json.loads(config.to_json_string())
    return described

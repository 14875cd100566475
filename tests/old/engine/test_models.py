"""Whole models from their transformers configs, over several steps of real training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import inrun
from inrun.training.gpt import GPT, GPTConfig
from reference import (
    contributions,
    frozen_gain,
    gradients,
    relative_error,
    row_corrected_gain,
    sample_gradients,
    secant_gain,
    sgd_gain,
)

VOCAB = 83
IGNORE = -100


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=16,
            n_embd=12,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def neox() -> nn.Module:
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=16,
        )
    )


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            tie_word_embeddings=True,
            pad_token_id=0,
        )
    )


def bert() -> nn.Module:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCAB,
            hidden_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=20,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def own_gpt() -> nn.Module:
    return GPT(GPTConfig(vocab=VOCAB, context=16, width=12, layers=2, heads=2))


# The models of transformers with RMS norms or rotary tables compute part of their forward in float32.
MODELS = {
    "gpt2": (gpt2, 1e-9),
    "neox": (neox, 1e-6),
    "llama": (llama, 1e-6),
    "bert": (bert, 1e-9),
    "own": (own_gpt, 1e-9),
}


def logits_of(model: nn.Module, rows: Tensor) -> Tensor:
    if isinstance(model, GPT):
        return model(rows)
    extra = {} if isinstance(model, BertForMaskedLM) else {"use_cache": False}
    return model(input_ids=rows, attention_mask=(rows != 0).long(), **extra).logits


def token_loss(model: nn.Module, rows: Tensor, labels: Tensor, denominator: Tensor | float) -> Tensor:
    logits = logits_of(model, rows)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / denominator


def draw(n: int, t: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows with padding (token 0) at the end, labels that ignore it."""
    rows = torch.randint(1, VOCAB, (n, t), generator=g)
    lengths = torch.randint(t // 2, t + 1, (n,), generator=g)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    labels = torch.randint(1, VOCAB, (n, t), generator=g)
    return rows, torch.where(rows == 0, torch.full_like(labels, IGNORE), labels)


def untied(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Copy a model with look-up and head as separate parameters; names of the heads and what they were tied to."""
    twin = copy.deepcopy(model)
    names = {id(p): name for name, p in twin.named_parameters()}
    tied = {}
    for name, module in twin.named_modules():
        if isinstance(module, nn.Linear):
            own = names[id(module.weight)]
            if own != f"{name}.weight":
                module.weight = nn.Parameter(module.weight.detach().clone())
                tied[f"{name}.weight"] = own
    return twin, tied


def embedding_names(model: nn.Module) -> set[str]:
    return {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.003}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True)
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def expected_contributions(model, optimizer, update, windows, validation, denominator, factor):
    """The reference: untied copy, one sample at a time, the real optimizer's gains."""
    twin, tied = untied(model)
    names = [n for n, _ in twin.named_parameters()]
    params = [p for _, p in twin.named_parameters()]
    real = dict(model.named_parameters())
    owner = [real[tied.get(n, n)] for n in names]
    g_n = []
    for rows, labels in windows:
        share = lambda j, rows=rows, labels=labels: token_loss(twin, rows[j : j + 1], labels[j : j + 1], denominator)  # noqa: E731
        g_n += sample_gradients(share, len(rows), params)
    whole = {id(p): torch.zeros_like(p) for p in real.values()}
    for grads in g_n:
        for p, g in zip(owner, grads, strict=True):
            whole[id(p)] += factor * g
    sparse = embedding_names(twin)
    gains = []
    for name, p in zip(names, owner, strict=True):
        used = whole[id(p)]
        if update == "sgd":
            gains.append(sgd_gain(optimizer, p, used))
        elif name in sparse and not isinstance(optimizer, torch.optim.SGD):
            gains.append(secant_gain(optimizer, p, used))
        elif p.dim() == 2 and name not in sparse and "c_" not in name and p.shape[0] > 4 * p.shape[1] and optimizer.state[p]:
            gains.append(row_corrected_gain(optimizer, p, used))
        else:
            gains.append(frozen_gain(optimizer, p, used))
    result = {}
    for key, (rows, labels) in validation.items():
        loss = token_loss(twin, rows, labels, float((labels != IGNORE).sum()))
        by_name = dict(zip(names, gradients(loss, params), strict=True))
        for head, table in tied.items():
            by_name[head] = by_name[table] = by_name[head] + by_name[table]
        result[key] = contributions(g_n, gains, [by_name[n] for n in names], factor)
    return result


@pytest.mark.parametrize("form", ["shared", "project"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_over_several_steps(name: str, kind: str, form: str) -> None:
    build, accuracy = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, mean=float(p.detach().mean()), std=0.1)
    optimizer = make_optimizer(kind, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
    g = torch.Generator().manual_seed(1)
    validation = {"one": draw(1, 9, g), "several": draw(3, 7, g)}
    callables = {
        k: (lambda m, rows=rows, labels=labels: token_loss(m, rows, labels, float((labels != IGNORE).sum())))
        for k, (rows, labels) in validation.items()
    }
    update = "frozen"
    accountant = inrun.Accountant(model, optimizer, callables, update=update, form=form, audit_every=1)
    for step in range(3):
        windows = [draw(3, 8, g), draw(2, 6, g)] if step else [draw(4, 8, g)]
        denominator = float(sum((labels != IGNORE).sum() for _, labels in windows))
        before = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        if step:
            with accountant.step() as window:
                for rows, labels in windows:
                    with window.microbatch(torch.arange(len(rows))):
                        token_loss(model, rows, labels, denominator).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        else:
            rows, labels = windows[0]
            with accountant.step(list(range(len(rows)))):
                token_loss(model, rows, labels, denominator).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()
        got, factor = accountant.last.contributions, accountant.last.clip[0]
        assert factor < 1
        twin = build().double()
        twin.load_state_dict(before)
        twin.eval()
        twin_optimizer = make_optimizer(kind, twin)
        twin_optimizer.load_state_dict(state)
        expected = expected_contributions(twin, twin_optimizer, update, windows, validation, denominator, factor)
        for key, values in expected.items():
            assert relative_error(got[key], values) < accuracy, (step, key)
        schedule.step()
    assert accountant.coverage.scored_share == 1.0
    assert not any(row.rule == "fallback" for row in accountant.coverage), str(accountant.coverage)
    accountant.close()


def test_paper_proxy_on_an_adamw_run() -> None:
    """update="sgd" scores lr · clip · ⟨g_n, ∇ℓ⟩ whatever the optimizer."""
    model = own_gpt().double()
    optimizer = make_optimizer("adamw", model)
    g = torch.Generator().manual_seed(1)
    rows, labels = draw(4, 8, g)
    validation = {"one": draw(1, 9, g)}
    call = lambda m: token_loss(m, *validation["one"], float((validation["one"][1] != IGNORE).sum()))  # noqa: E731
    accountant = inrun.Accountant(model, optimizer, {"one": call}, update="sgd", audit_every=1)
    twin = copy.deepcopy(model)
    twin.forward = type(twin).forward.__get__(twin)
    with accountant.step(range(4)):
        token_loss(model, rows, labels, 20.0).backward()
        optimizer.step()
    fresh = own_gpt().double()
    fresh.load_state_dict(twin.state_dict())
    expected = expected_contributions(fresh, make_optimizer("adamw", fresh), "sgd", [(rows, labels)], validation, 20.0, 1.0)
    assert relative_error(accountant.last.contributions["one"], expected["one"]) < 1e-9

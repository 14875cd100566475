"""The golden runs: nine short trainings on CPU in float64, each a model, an optimizer and data.

Nothing here imports inrun. A builder returns model, optimizer and data, and :func:`train` trains
them with or without an accountant.

Do not change a run, here or in ``models.py``: the stored numbers were measured with the engine
before issue 36, which judges its replacement and cannot measure a changed run once it is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from golden.models import (
    GPT,
    BatchNormCNN,
    GroupNormResNet,
    LSTMClassifier,
    initialise,
    uniform,
)

VOCAB, CONTEXT, CLASSES = 23, 8, 4
#: Lengths of the documents of every packed row; a negative length is padding.
PACKED_ROWS = ((3, 4, -1), (5, 2, 1), (1, 4, -3))

Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


@dataclass(frozen=True)
class Microbatch:
    """What one backward sees: sample ids ``[n]`` (``[n, t]`` where rows are packed) and inputs."""

    ids: Tensor
    inputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Training:
    """A freshly built training run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: The microbatches of every step.
    steps: list[list[Microbatch]]
    #: By name; each takes the model and returns a mean loss.
    validation: dict[str, Callable[[nn.Module], Tensor]]
    #: Mean loss of a microbatch's inputs.
    loss: Loss


@dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
        build: Makes model, optimizer and data.
        clip: Largest norm of the gradient; None where it is not clipped.
        schedule: Factors of the learning rate, repeated over the steps.
    """

    build: Callable[[], Training]
    clip: float | None = None
    schedule: tuple[float, ...] = (1.0,)


def train(run: Run, training: Training, accountant: Any = None) -> list[Any]:
    """Train, and return what the accountant says of every step (``last``), if there is one."""
    model, optimizer = training.model, training.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for p in model.parameters() if p.requires_grad]
    results = []
    torch.manual_seed(0)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for t, microbatches in enumerate(training.steps):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * run.schedule[t % len(run.schedule)]
            with _observed(accountant, microbatches) as step:
                rows = sum(len(m.ids) for m in microbatches)
                for m in microbatches:
                    with contextlib.nullcontext() if step is None else step.microbatch(m.ids):
                        (training.loss(model, m.inputs) * (len(m.ids) / rows)).backward()
                if run.clip is not None:
                    torch.nn.utils.clip_grad_norm_(parameters, run.clip)
                optimizer.step()
                optimizer.zero_grad()
            if accountant is not None:
                results.append(accountant.last)
    return results


@contextlib.contextmanager
def _observed(accountant: Any, microbatches: list[Microbatch]) -> Any:
    """Open a step; yield it where it takes several microbatches."""
    if accountant is None:
        yield None
    elif len(microbatches) == 1:
        with accountant.step(microbatches[0].ids):
            yield None
    else:
        with accountant.step() as step:
            yield step


# Data


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting every next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def texts(n: int, seed: int) -> tuple[Tensor]:
    """Return token sequences ``[n, t]`` in which the next token often follows from the last."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(VOCAB, (n, CONTEXT), generator=generator)
    keeps = torch.randint(4, (n, CONTEXT), generator=generator) > 0
    columns = [noise[:, 0]]
    for i in range(1, CONTEXT):
        columns.append(torch.where(keeps[:, i], (3 * columns[-1] + 1) % VOCAB, noise[:, i]))
    return (torch.stack(columns, 1),)


def images(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images ``[n, 3, 8, 8]`` whose brightness depends on the class, and classes ``[n]``."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (n,), generator=generator)
    bright = (classes.double() / CLASSES).view(n, 1, 1, 1)
    return uniform((n, 3, 8, 8), generator) + bright, classes


def labelled_texts(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return token sequences ``[n, t]``, and classes ``[n]`` that follow from the first token."""
    (tokens,) = texts(n, seed)
    return tokens, tokens[:, 0] % CLASSES


def drawn(
    data: tuple[Tensor, ...],
    steps: int,
    sizes: Sequence[int],
    seed: int,
) -> list[list[Microbatch]]:
    """Return steps of microbatches of the given sizes, drawn with replacement.

    A sample may occur in several steps, and several times in one.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        picks = [torch.randint(len(data[0]), (size,), generator=generator) for size in sizes]
        found.append([Microbatch(100 + 7 * p, tuple(x[p] for x in data)) for p in picks])
    return found


def packed(seed: int) -> tuple[Tensor, ...]:
    """Return tokens, positions, sample ids of the documents (-1 is padding), labels: ``[n, t]``."""
    shape = (len(PACKED_ROWS), CONTEXT)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, shape, generator=generator)
    positions, labels = torch.zeros(shape, dtype=torch.long), torch.full(shape, -100)
    documents = torch.full(shape, -1)
    number = 10 * (seed % 3)
    for row, lengths in enumerate(PACKED_ROWS):
        start = 0
        for length in lengths:
            end = start + abs(length)
            if length > 0:
                documents[row, start:end] = number
                positions[row, start:end] = torch.arange(length)
                labels[row, start : end - 1] = tokens[row, start + 1 : end]
                number += 1
            start = end
    return tokens, positions, documents, labels


# Builders


def language_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean loss of a language model of this package."""
    return next_token(model(*inputs), inputs[0])


def published_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean loss of a language model of transformers."""
    return next_token(model(input_ids=inputs[0], use_cache=False).logits, inputs[0])


def class_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean cross entropy of a classifier; inputs and classes."""
    return F.cross_entropy(model(inputs[0]), inputs[1])


def packed_loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """Return the mean loss over all tokens that have a label."""
    tokens, positions, documents, labels = inputs
    logits = model(tokens, positions, documents)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def held_out(loss: Loss, **sets: tuple[Tensor, ...]) -> dict[str, Callable[[nn.Module], Tensor]]:
    """Return a validation callable for every set of inputs."""
    return {name: lambda model, rows=rows: loss(model, rows) for name, rows in sets.items()}


def decayed(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Return two groups of parameters: matrices with weight decay, vectors without."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    return [
        {"params": matrices, "weight_decay": decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def tied_gpt() -> Training:
    """Two microbatches of different sizes; some steps are rough, so that they take more points."""
    model = initialise(GPT(VOCAB, CONTEXT, 12, tied=True), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    steps = drawn(texts(14, 1), 8, (3, 2), 1)
    sets = held_out(language_loss, main=texts(4, 2))
    return Training(model, optimizer, steps, sets, language_loss)


def untied_gpt() -> Training:
    """Two validation sets, two groups, and three microbatches."""
    model = initialise(GPT(VOCAB, CONTEXT, 12, tied=False), 2)
    optimizer = torch.optim.AdamW(decayed(model, 0.1), lr=1e-3, betas=(0.8, 0.9))
    steps = drawn(texts(14, 3), 10, (2, 2, 1), 3)
    sets = held_out(language_loss, near=texts(3, 3), far=texts(4, 4))
    return Training(model, optimizer, steps, sets, language_loss)


def llama_lora() -> Training:
    """LoRA on a frozen Llama; the B matrices begin at zero, so the A matrices at rest."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        attn_implementation="sdpa",
    )
    targets = ["q_proj", "v_proj", "down_proj"]
    adapter = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, lora_dropout=0.0)
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), adapter)
    model = initialise(model, 3)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    steps = drawn(texts(12, 5), 8, (4,), 5)
    sets = held_out(published_loss, main=texts(3, 6))
    return Training(model, optimizer, steps, sets, published_loss)


def vit() -> Training:
    """A memory so short that windows end during the run: 1 - 0.5^7 is more than 99 %."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=CLASSES,
        attn_implementation="sdpa",
    )
    model = initialise(transformers.ViTForImageClassification(config), 4)

    def loss(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return F.cross_entropy(model(pixel_values=inputs[0]).logits, inputs[1])

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.5, 0.95))
    steps = drawn(images(12, 7), 11, (5,), 7)
    return Training(model, optimizer, steps, held_out(loss, main=images(4, 8)), loss)


def mixtral() -> Training:
    """Four experts, two per token."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=12,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=CONTEXT,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    model = initialise(transformers.MixtralForCausalLM(config), 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    steps = drawn(texts(12, 9), 6, (4,), 9)
    sets = held_out(published_loss, main=texts(3, 10))
    return Training(model, optimizer, steps, sets, published_loss)


def resnet() -> Training:
    """SGD with momentum and coupled weight decay."""
    model = initialise(GroupNormResNet(), 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=0.01)
    steps = drawn(images(12, 11), 8, (5,), 11)
    return Training(model, optimizer, steps, held_out(class_loss, main=images(4, 12)), class_loss)


def batch_norm_cnn() -> Training:
    """Adam with coupled weight decay; BatchNorm validates with its running statistics."""
    model = initialise(BatchNormCNN(), 7)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.01)
    steps = drawn(images(12, 13), 10, (6,), 13)
    return Training(model, optimizer, steps, held_out(class_loss, main=images(4, 14)), class_loss)


def lstm() -> Training:
    """RMSprop, which remembers no gradients; dropout must draw what it draws without inrun."""
    model = initialise(LSTMClassifier(VOCAB), 8)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    steps = drawn(labelled_texts(12, 15), 8, (5,), 15)
    sets = held_out(class_loss, main=labelled_texts(4, 16))
    return Training(model, optimizer, steps, sets, class_loss)


def packed_gpt() -> Training:
    """Several documents per row, with ids per position and padding; NAdam, which looks ahead."""
    model = initialise(GPT(VOCAB, CONTEXT, 12, tied=True), 9)
    optimizer = torch.optim.NAdam(model.parameters(), lr=3e-4)
    batches = [packed(t) for t in range(6)]
    steps = [[Microbatch(inputs[2], inputs)] for inputs in batches]
    return Training(model, optimizer, steps, held_out(packed_loss, main=packed(50)), packed_loss)


RUNS: dict[str, Run] = {
    "tied_gpt": Run(tied_gpt, clip=1.0, schedule=(0.5, 1.0, 1.5)),
    "untied_gpt": Run(untied_gpt, clip=0.5, schedule=(1.0, 0.5)),
    "llama_lora": Run(llama_lora),
    "vit": Run(vit),
    "mixtral": Run(mixtral, clip=1.0),
    "resnet": Run(resnet),
    "batch_norm_cnn": Run(batch_norm_cnn),
    "lstm": Run(lstm),
    "packed_gpt": Run(packed_gpt, clip=1.0),
}

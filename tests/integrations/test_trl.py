"""TRL's trainers: the head, packed documents, pairs and adapters, against plain loops."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from inrun.errors import ConfigurationError, ConservationError, CoverageError, IdsError
from integrations.tiny_text import VOCAB, Recorder, difference, in_parts, llama, plain_loop, rows_of, same_books, weights

pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
from inrun.integrations import heads  # noqa: E402
from inrun.integrations.transformers import TrainerScores  # noqa: E402
from inrun.integrations.transformers import attach as attach_plainly  # noqa: E402
from inrun.integrations.trl import attach  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
HELD, LR, STEPS = rows_of(2, 2), 0.1, 2
WORDS = ["<s>", "</s>", "<pad>", *(f"w{i}" for i in range(3, VOCAB))]
LENGTHS = (5, 3, 6, 4, 2, 7, 3, 5)
DOCUMENTS = [rows_of(1, 30 + i, length)[0].tolist() for i, length in enumerate(LENGTHS)]
QUIET = {
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "dataloader_pin_memory": False,
    "use_cpu": True,
    "bf16": False,
}
COMMON = {"max_steps": STEPS, "learning_rate": LR, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.5}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def texts() -> Any:
    """Documents as text; TRL adds the end of a text, which here is the token 1."""
    return datasets.Dataset.from_list([{"text": " ".join(WORDS[t] for t in d) + " </s>"} for d in DOCUMENTS])


def tokens_of(document: int) -> Tensor:
    return torch.tensor([*DOCUMENTS[document], 1])


def log_probs(model: Any, rows: Tensor) -> Tensor:
    """Return the log-probability of every next token, ``[n, t − 1]``."""
    logits = model(input_ids=rows).logits[:, :-1]
    return F.log_softmax(logits, -1).gather(-1, rows[:, 1:].unsqueeze(-1)).squeeze(-1)


def validation(model: Any) -> Tensor:
    return -log_probs(model, HELD).mean()


def sft(folder: Path, model: Any, dataset: Any = None, **options: Any) -> Any:
    common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 16}
    args = trl.SFTConfig(str(folder), **{**QUIET, **COMMON, **common, **options})
    return trl.SFTTrainer(model, args, train_dataset=texts() if dataset is None else dataset, processing_class=tokenizer())


def sft_reference(model: Any, ids: list[list[int]], size: int, **options: Any) -> Recorder:
    """One document per row, padded at its end; the loss is over all tokens of the step."""

    def loss(m: Any, mine: list[int], of_step: list[list[int]]) -> Tensor:
        documents = [tokens_of(i) for i in mine]
        rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True, padding_value=2)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(d) - 1) for d in documents], batch_first=True)
        return -(log_probs(m, rows) * real).sum() / sum(len(tokens_of(i)) - 1 for part in of_step for i in part)

    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    return plain_loop(model, optimizer, in_parts(ids, size), loss, validation, [LR] * len(ids), clip=0.5, **options)


def lora(model: Any) -> Any:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.mark.parametrize(
    "kind", [pytest.param("tied", marks=pytest.mark.slow), "untied", "lora", "no checkpointing", "step", "tiles"]
)
def test_sft_equals_a_plain_loop_and_the_trainer_without_us(kind: str, tmp_path: Path, monkeypatch: Any) -> None:
    def build() -> Any:
        model = llama(tied=kind != "untied")
        return lora(model) if kind == "lora" else model

    if kind == "tiles":
        monkeypatch.setattr(heads, "HELD", 3 * 2 * VOCAB)
    options = {"gradient_checkpointing": kind != "no checkpointing"}
    scoring = {"method": "step"} if kind == "step" else {}
    alone = build()
    sft(tmp_path, alone, **options).train()
    model, books = build(), Recorder()
    trainer = sft(tmp_path, model, **options)
    scores = attach(trainer, validation, ledger=books, **scoring)
    trainer.train()
    assert difference(weights(model), weights(alone)) < 1e-6
    assert scores.accountant.coverage.scored_share == 1.0
    assert any("lm_head" in row.parameter for row in scores.accountant.coverage) == (kind == "untied")
    # Ids are positions in what TRL prepared, which here has the order of the documents.
    same_books(books, sft_reference(build(), books.ids(), 2, **scoring))


@pytest.mark.parametrize(("tied", "error"), [(False, CoverageError), (True, ConservationError)])
def test_a_head_that_is_not_called_is_an_error(tied: bool, error: type[Exception], tmp_path: Path) -> None:
    """The control: TRL's own forward, without ours."""
    trainer = sft(tmp_path, llama(tied=tied))
    with pytest.raises(ConfigurationError, match="inrun.integrations.trl.attach"):
        attach_plainly(trainer, validation)
    TrainerScores(trainer, validation, "sample_id", {})
    with pytest.raises(error, match="embed_tokens.weight" if tied else "lm_head"):
        trainer.train()


def test_resumed_equals_unbroken(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "packing": True, "max_length": 12, "optim": "adamw_torch"}

    def run(checkpoint: Any) -> tuple[Any, list[Tensor]]:
        model = llama()
        trainer = sft(tmp_path / "run", model, **saving)
        scores = attach(trainer, validation, documents=texts(), ledger=tmp_path / "books")
        trainer.train(resume_from_checkpoint=checkpoint)
        return scores.scores(), weights(model)

    unbroken, final = run(None)
    again, resumed = run(str(tmp_path / "run" / "checkpoint-1"))
    assert again.equals(unbroken)
    assert difference(final, resumed) == 0


@pytest.mark.parametrize("how", [pytest.param("bfd", marks=pytest.mark.slow), "padding-free", "bfd, own ids, shuffled"])
def test_packed_documents_are_scored_one_by_one(how: str, tmp_path: Path) -> None:
    dataset, first = texts(), 0
    packed = {"packing": True, "max_length": 12, "per_device_train_batch_size": 1}
    options = {"padding_free": True, "max_length": None} if how == "padding-free" else packed
    if "own ids" in how:
        first = 100
        dataset = dataset.add_column("sample_id", [first + i for i in range(len(DOCUMENTS))])
        options = {**options, "shuffle_dataset": True}
    alone = llama()
    sft(tmp_path, alone, dataset, **options).train()
    model, books = llama(), Recorder()
    trainer = sft(tmp_path, model, dataset, **options)
    scores = attach(trainer, validation, documents=None if how == "padding-free" else dataset, ledger=books)
    trainer.train()
    assert difference(weights(model), weights(alone)) < 1e-6
    assert scores.accountant.coverage.scored_share == 1.0
    ids = [[i - first for i in step] for step in books.ids()]
    assert all(len(step) > 2 for step in ids)
    expected = sft_reference(llama(), ids, len(DOCUMENTS))  # all documents of a step in one microbatch: sums do not mind
    for record, plain in zip(books.contributions(), expected.contributions(), strict=True):
        assert float((record - plain).abs().max()) <= 1e-5 * float(plain.abs().max())


def test_scores_of_packed_documents_on_their_dataset(tmp_path: Path) -> None:
    trainer = sft(tmp_path, llama(), packing=True, max_length=12)
    scores = attach(trainer, validation, documents=texts())
    trainer.train()
    found = scores.scored()
    assert found["text"][:] == texts()["text"][:]
    assert sum(found["times_used"]) == sum(scores.scores()["times_used"].to_pylist()) > 4


def test_what_packing_loses_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match='packing_strategy="wrapped" packs documents into rows without positions.*"bfd"'):
        attach(sft(tmp_path, llama(), packing=True, packing_strategy="wrapped", max_length=12), validation, documents=texts())
    with pytest.raises(ConfigurationError, match=r"packing=True. drops the ids.*documents="):
        attach(sft(tmp_path, llama(), packing=True, max_length=12), validation)
    trainer = sft(tmp_path, llama(), packing=True, max_length=12)
    attach(trainer, validation, documents=texts().select([1, 0, 2, 3]))
    with pytest.raises(IdsError, match="not what the trainer packed"):
        trainer.train()
    trainer = sft(tmp_path, llama(), packing=True, max_length=12)
    attach(trainer, validation, documents=texts())
    collate = trainer.data_collator
    trainer.data_collator = lambda items: {k: v for k, v in collate(items).items() if k != "position_ids"}
    with pytest.raises(ConfigurationError, match="without position_ids"):
        trainer.train()
    with pytest.raises(ConfigurationError, match="SimpleNamespace is not supported; trl.SFTTrainer and trl.DPOTrainer are"):
        attach(types.SimpleNamespace(), validation)


@pytest.mark.parametrize("strategy", ["wrapped", "bfd"])
def test_packed_rows_as_samples(strategy: str, tmp_path: Path) -> None:
    books = Recorder()
    trainer = sft(tmp_path, llama(), packing=True, packing_strategy=strategy, max_length=8)
    attach(trainer, validation, samples="rows", ledger=books)
    trainer.train()
    assert sorted(i for ids in books.ids() for i in ids) == list(range(len(trainer.train_dataset)))


def test_rows_as_validation_leave_metrics_alone(tmp_path: Path) -> None:
    def logs(score: bool) -> list[dict[str, Any]]:
        trainer = sft(tmp_path, llama(), logging_steps=1)
        if score:
            attach(trainer, trainer.train_dataset.select([0]))
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    for plain, scored in zip(logs(False), logs(True), strict=True):
        for name in ("loss", "mean_token_accuracy", "entropy", "num_tokens"):
            assert scored[name] == pytest.approx(plain[name], rel=1e-5)
        assert scored["inrun/validation/loss"] > 0


# Pairs

PAIRS = [
    (rows_of(1, 60 + i, 3)[0].tolist(), rows_of(1, 70 + i, 4)[0].tolist(), rows_of(1, 80 + i, 5)[0].tolist()) for i in range(6)
]
BETA = 0.5


def pairs() -> Any:
    def text(tokens: list[int]) -> str:
        return " ".join(WORDS[t] for t in tokens)

    rows = [{"prompt": text(p), "chosen": " " + text(c) + " </s>", "rejected": " " + text(r) + " </s>"} for p, c, r in PAIRS]
    return datasets.Dataset.from_list(rows)


def dpo(folder: Path, model: Any, reference: Any) -> Any:
    common = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "beta": BETA}
    args = trl.DPOConfig(str(folder), **{**QUIET, **COMMON, **common})
    return trl.DPOTrainer(model, reference, args, train_dataset=pairs(), processing_class=tokenizer())


def completion(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    rows = torch.tensor([[*prompt, *answer, 1]])
    return log_probs(model, rows)[:, len(prompt) - 1 :].sum()


@pytest.mark.parametrize("kind", ["whole model", pytest.param("lora", marks=pytest.mark.slow)])
def test_dpo_equals_a_plain_loop_and_the_trainer_without_us(kind: str, tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        return (lora(llama()), None) if kind == "lora" else (llama(), llama())

    alone, frozen = build()
    dpo(tmp_path, alone, frozen).train()
    model, frozen = build()
    books = Recorder()
    trainer = dpo(tmp_path, model, frozen)
    scores = attach(trainer, validation, ledger=books)
    trainer.train()
    assert difference(weights(model), weights(alone)) < 1e-6
    assert scores.accountant.coverage.scored_share == 1.0
    assert all(record.sample_ids.tolist()[:2] == record.sample_ids.tolist()[2:4] for record in books.records)

    # Every sample's two rows by themselves: the loss of a pair is one number, and half of the microbatches' rows are rejected.
    base = build()[0]  # of an adapter that was there before, TRL keeps a copy as the reference

    def loss(m: Any, mine: list[int], of_step: list[list[int]]) -> Tensor:
        half = mine[: len(mine) // 2]
        width = max(len(p) + max(len(c), len(r)) + 1 for p, c, r in (PAIRS[i] for i in half))
        rows = torch.full((len(mine), width), 2)
        where = torch.zeros(len(mine), width - 1)
        for j, i in enumerate(mine):
            answer = PAIRS[i][1] if j < len(half) else PAIRS[i][2]
            tokens = [*PAIRS[i][0], *answer, 1]
            rows[j, : len(tokens)] = torch.tensor(tokens)
            where[j, len(PAIRS[i][0]) - 1 : len(tokens) - 1] = 1
        chosen, rejected = (log_probs(m, rows) * where).sum(1).chunk(2)
        with torch.no_grad():
            known = [completion(base, PAIRS[i][0], PAIRS[i][1]) - completion(base, PAIRS[i][0], PAIRS[i][2]) for i in half]
        return -F.logsigmoid(BETA * (chosen - rejected - torch.stack(known))).mean() / len(of_step)

    plain, _ = build()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=LR)
    parts = in_parts(books.ids(), 4)
    expected = plain_loop(plain, optimizer, parts, loss, validation, [LR] * STEPS, clip=0.5)
    same_books(books, expected)

"""TRL's SFTTrainer with packing: several documents share a row, and each has a score of its own."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from inrun.integrations.trl import attach

WORDS = ["<pad>", "</s>", *["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue"]]


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few words."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=WORDS[1], pad_token=WORDS[0])


def main() -> Dataset:
    """Train, and return the documents with their scores."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    counted = [" ".join(WORDS[2 + i : 2 + i + 4]) + " </s>" for i in range(7)] * 4
    noise = [" ".join(WORDS[2 + int(i)] for i in torch.randint(0, 13, (4,), generator=generator)) + " </s>" for _ in range(12)]
    documents = Dataset.from_dict({"text": counted + noise})

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, bos_token_id=1, eos_token_id=1, **sizes)
    model = LlamaForCausalLM(config)
    args = SFTConfig(
        tempfile.mkdtemp(),
        packing=True,
        max_length=16,
        per_device_train_batch_size=2,
        num_train_epochs=3,
        learning_rate=5e-3,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = SFTTrainer(model, args, train_dataset=documents, processing_class=tokenizer())
    held_out = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])

    def validation(m: LlamaForCausalLM) -> torch.Tensor:
        logits = m(input_ids=held_out).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, held_out[0, 1:])

    scores = attach(trainer, validation, documents=documents)  # packing dropped their ids: they are packed once more, with them
    trainer.train()
    scored = scores.scored()  # the documents, with columns score and times_used
    values = scored.with_format("numpy")["score"][:]
    print(f"mean credit of a document that counts {values[:28].mean():+.4f}, of noise {values[28:].mean():+.4f}")
    return scored


if __name__ == "__main__":
    main()

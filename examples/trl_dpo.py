"""TRL's DPOTrainer with LoRA: pairs whose sides were swapped have low scores."""

from __future__ import annotations

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from inrun.integrations.trl import attach

WORDS = ["<pad>", "</s>", "say", *["one", "two", "three", "four", "yes", "no"]]


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few words."""
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=WORDS[1], pad_token=WORDS[0])


def main() -> Dataset:
    """Train, and return the pairs with their scores."""
    torch.manual_seed(0)
    prompts = [f"say {word}" for word in ("one", "two", "three", "four")] * 6
    swapped = set(range(0, 24, 6))
    answers = [(" no </s>", " yes </s>") if i in swapped else (" yes </s>", " no </s>") for i in range(24)]
    pairs = Dataset.from_list([{"prompt": p, "chosen": c, "rejected": r} for p, (c, r) in zip(prompts, answers, strict=True)])

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, bos_token_id=1, eos_token_id=1, **sizes))
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"))
    args = DPOConfig(
        tempfile.mkdtemp(),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = DPOTrainer(model, None, args, train_dataset=pairs, processing_class=tokenizer())
    held_out = torch.tensor([[2, 3, 7], [2, 6, 7]])  # say one yes, say four yes

    def validation(m: torch.nn.Module) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(m(input_ids=held_out).logits[:, 1], held_out[:, 2])

    scores = attach(trainer, validation)  # both rows of a pair have its id; the reference model is not scored
    trainer.train()
    scored = scores.scored(pairs)
    values = scored.with_format("numpy")["score"][:]
    usual = [v for i, v in enumerate(values) if i not in swapped]
    wrong = [v for i, v in enumerate(values) if i in swapped]
    print(f"mean credit of a pair {sum(usual) / len(usual):+.5f}, of one that was swapped {sum(wrong) / len(wrong):+.5f}")
    return scored


if __name__ == "__main__":
    main()

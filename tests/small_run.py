"""A run of `inrun train` that takes a second: its documents and its configuration, for the tests of training and replay."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [
    "the",
    "of",
    "a",
    "to",
    "and",
    "in",
    "is",
    "it",
    "for",
    "loop",
    "return",
    "if",
    "print",
    "list",
    "value",
    "name",
    "sum",
    "next",
]


def corpus(folder: Path, documents: int = 60) -> Path:
    """Write documents of two domains, some short, some of several chunks."""
    generator = random.Random(0)
    file = folder / "corpus.jsonl"
    with file.open("w") as out:
        for i in range(documents):
            text = " ".join(generator.choice(WORDS[: 9 + 9 * (i % 2)]) for _ in range(generator.randint(3, 30)))
            split = "val" if i % 6 == 5 else "train"
            row = {"id": f"doc-{i}", "text": text, "domain": "code" if i % 2 else "prose", "split": split}
            out.write(json.dumps(row) + "\n")
    return file


def settings(folder: Path, name: str = "run", **more: object) -> dict[str, object]:
    base = {
        "run": str(folder / name),
        "steps": 12,
        "data": {"paths": [str(folder / "corpus.jsonl")]},
        "tokenizer": {"kind": "bytes"},
        "model": {"context": 24, "width": 16, "layers": 1, "heads": 2, "dropout": 0.1},
        "optimizer": {"lr": 3e-3, "final_lr": 3e-4, "warmup": 4},
        "batch": {"size": 4},
        "validation": {
            "code": {"split": "val", "where": {"domain": "code"}, "rows": 2},
            "all": {"split": "val", "rows": 4, "folds": 2},
        },
        "scoring": {"audit_every": 5},
        "checkpoints": {"every": 5},
        "logging": {"every": 1, "evaluate_every": 6, "evaluate_rows": 4},
    }
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) and key in base else value
    return base

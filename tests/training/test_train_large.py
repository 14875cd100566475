"""A corpus of a gigabyte: tokenised and trained on within 1.5 GB of memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import resource, sys
import torch, inrun
from inrun.cli.main import cli
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cli.main(sys.argv[1:], standalone_mode=False)
print("PEAK", before // 1024, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def write_corpus(file: Path, megabytes: int) -> None:
    generator = random.Random(0)
    words = ["".join(generator.choices("abcdefghijklmnopqrstuvwxyz", k=generator.randint(2, 9))) for _ in range(5000)]
    pages = [" ".join(generator.choices(words, k=600)) for _ in range(200)]
    size = number = 0
    with file.open("w") as out:
        while size < megabytes * 1_000_000:
            text = f"{number} " + pages[number % 200] + " " + pages[(number * 7) % 199]
            split = "val" if number % 5000 == 0 else "train"
            out.write(json.dumps({"id": f"d{number}", "text": text, "domain": f"domain {number % 12}", "split": split}) + "\n")
            size, number = size + len(text), number + 1


@pytest.mark.slow
def test_a_gigabyte_of_text(tmp_path):
    write_corpus(tmp_path / "corpus.jsonl", 1000)
    options = [
        f"run={tmp_path / 'run'}",
        f"data.paths=[{tmp_path / 'corpus.jsonl'}]",
        "tokenizer.kind=bytes",
        "steps=6",
        "model.context=1024",
        "model.width=64",
        "model.layers=1",
        "model.heads=2",
        "batch.size=4",
        "validation.all.split=val",
        "optimizer.warmup=2",
    ]
    call = [sys.executable, "-c", MEASURE, "train", "--quiet", *options]
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    before, peak = (int(x) for x in done.stdout.split("PEAK")[1].split())
    print(f"imports {before} MB, peak {peak} MB")
    assert peak - before < 1500, (before, peak)

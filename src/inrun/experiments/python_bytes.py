"""Text that every Python installation carries, in domains, cut into samples of bytes."""

from __future__ import annotations

import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One training item: its text as bytes, and where it comes from."""

    domain: str
    source: str
    data: bytes


def _chunks(domain: str, source: str, text: str, size: int, most: int) -> list[Sample]:
    data = text.encode()
    starts = range(0, len(data) - size, size)
    return [Sample(domain, source, data[s : s + size]) for s in list(starts)[:most]]


def documentation(size: int) -> list[Sample]:
    """Chunks of the language reference that ``help()`` shows."""
    from pydoc_data import topics

    return [c for name in sorted(topics.topics) for c in _chunks("docs", name, topics.topics[name], size, 4)]


def standard_library(size: int) -> list[Sample]:
    """Chunks of the standard library's source."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(root.glob("*.py"))
    return [c for f in files for c in _chunks("code", f.name, f.read_text("utf-8", "replace"), size, 6)]


def character_tables(size: int) -> list[Sample]:
    """Chunks of the character tables of ``encodings``: regular, and of little use for anything else."""
    root = Path(sysconfig.get_paths()["stdlib"]) / "encodings"
    files = sorted(root.glob("cp*.py"))
    return [c for f in files for c in _chunks("tables", f.name, f.read_text("utf-8", "replace"), size, 6)]


def noise(size: int, count: int, seed: int) -> list[Sample]:
    """Random bytes."""
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    return [Sample("noise", f"noise-{i}", generator.randbytes(size)) for i in range(count)]


def demo_corpus(size: int, per_domain: int, noise_count: int, seed: int) -> tuple[list[Sample], dict[str, list[Sample]]]:
    """Return training samples of four domains in random order, and held-out chunks of docs and code."""
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    train: list[Sample] = []
    held_out: dict[str, list[Sample]] = {}
    for samples in (documentation(size), standard_library(size), character_tables(size)):
        chosen = generator.sample(samples, min(len(samples), per_domain + 16))
        train += chosen[16:]
        if chosen[0].domain != "tables":
            held_out[chosen[0].domain] = chosen[:16]
    train += noise(size, noise_count, seed)
    generator.shuffle(train)
    return train, held_out


def as_tokens(samples: list[Sample]) -> Tensor:
    """Return byte tokens ``[n, size]``."""
    return torch.tensor([list(s.data) for s in samples])

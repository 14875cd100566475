"""The documents of the demo: text of the Python installation, with planted noise, scrambled text and copies."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from inrun.corpus.python_texts import pieces_of

#: What was planted, by the name of its ``source``.
NOISE, SCRAMBLED, COPY = "planted noise", "planted scrambled text", "planted copy"
#: Per domain: how many pieces of one text are taken at most.
DOMAINS = {"reference": 4, "code": 3, "docstrings": 3, "tables": 4}
#: Domains that documents are held out of.
VALIDATED = ("reference", "code")


@dataclass(frozen=True)
class Text:
    """One document of the demo."""

    id: str
    domain: str
    source: str
    split: str
    text: str


def _cut_at_lines(text: str, size: int) -> Iterator[str]:
    """Cut a text into pieces of ``size`` characters that begin at a line; what is left over of the last line is dropped."""
    now = ""
    for line in text.splitlines(keepends=True):
        now += line[:size]
        if len(now) >= size:
            yield now[:size]
            now = ""


def demo_texts(size: int, per_domain: int, held_out: int, planted: int, seed: int) -> list[Text]:
    """Return documents in random order: four domains, held-out ones of two, and three kinds of planted ones.

    Args:
        size: Characters of a document.
        per_domain: Documents of each domain to train on.
        held_out: Documents of "reference" and "code" with split "val".
        planted: Documents of noise, of scrambled text, and of copies: so many of each.
        seed: Of everything that is drawn.
    """
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    texts: list[Text] = []
    seen: set[str] = set()  # no text twice but planted copies, and none of the held-out ones to train on
    for domain, most in DOMAINS.items():
        found = []
        for piece in pieces_of(domain, functools.partial(_cut_at_lines, size=size), most):
            if piece.content not in seen:
                seen.add(piece.content)
                found.append(piece)
        extra = held_out if domain in VALIDATED else 0
        chosen = generator.sample(found, min(len(found), per_domain + extra))
        for place, (source, number, text) in enumerate(chosen):
            split = "val" if place < extra else "train"
            texts.append(Text(f"{domain}/{source}#{number}", domain, source, split, text))
    texts += _planted(texts, size, planted, generator)
    generator.shuffle(texts)
    return texts


def _planted(texts: list[Text], size: int, count: int, generator: random.Random) -> list[Text]:
    real, found = [t for t in texts if t.split == "train"], []
    for i in range(count):
        noise = bytes(generator.randrange(32, 127) for _ in range(size)).decode()
        letters = list(generator.choice(real).text)
        generator.shuffle(letters)
        again = generator.choice(real)
        found.append(Text(f"noise/{i}", "noise", NOISE, "train", noise))
        found.append(Text(f"scrambled/{i}", "scrambled", SCRAMBLED, "train", "".join(letters)))
        found.append(Text(f"copy/{i} of {again.id}", again.domain, COPY, "train", again.text))
    return found


def write_texts(texts: list[Text], file: Path) -> None:
    """Write documents as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(asdict(t)) + "\n" for t in texts), "utf-8")

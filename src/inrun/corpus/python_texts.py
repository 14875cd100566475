"""Text that every Python installation carries, as documents in domains, with planted noise, scrambled text and copies."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

#: What was planted, by the name of its ``source``.
NOISE, SCRAMBLED, COPY = "planted noise", "planted scrambled text", "planted copy"


@dataclass(frozen=True)
class Text:
    """One document of the demo."""

    id: str
    domain: str
    source: str
    split: str
    text: str


def _pieces(text: str, size: int, most: int) -> list[str]:
    """Cut a text at lines into at most ``most`` pieces of about ``size`` characters."""
    pieces, now = [], ""
    for line in text.splitlines(keepends=True):
        now += line[:size]
        if len(now) >= size:
            pieces.append(now[:size])
            now = ""
        if len(pieces) == most:
            break
    return pieces


def _sources(folder: str, pattern: str) -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"]) / folder
    for file in sorted(root.glob(pattern)):
        yield file.name, file.read_text("utf-8", "replace")


def _reference() -> Iterator[tuple[str, str]]:
    """The language reference that ``help()`` shows."""
    from pydoc_data import topics

    yield from sorted(topics.topics.items())


def _docstrings() -> Iterator[tuple[str, str]]:
    """What the standard library says of itself."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name, source in _sources(".", "*.py"):
        try:
            nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
        except (SyntaxError, ValueError, RecursionError):
            continue
        yield name, "\n\n".join(filter(None, (ast.get_docstring(n) for n in nodes)))


#: Per domain: where its text is, and how many pieces of one source are taken at most.
DOMAINS = {
    "reference": (_reference, 4),
    "code": (lambda: _sources(".", "*.py"), 3),
    "docstrings": (_docstrings, 3),
    "tables": (lambda: _sources("encodings", "cp*.py"), 4),
}


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
    for domain, (sources, most) in DOMAINS.items():
        found: list[tuple[str, str, str]] = []
        for name, text in sources():
            for i, piece in enumerate(_pieces(text, size, most)):
                if piece not in seen:
                    seen.add(piece)
                    found.append((f"{name}#{i}", name, piece))
        extra = held_out if domain in ("reference", "code") else 0
        chosen = generator.sample(found, min(len(found), per_domain + extra))
        for place, (key, source, text) in enumerate(chosen):
            texts.append(Text(f"{domain}/{key}", domain, source, "val" if place < extra else "train", text))
    real = [t for t in texts if t.split == "train"]
    for i in range(planted):
        noise = bytes(generator.randrange(32, 127) for _ in range(size)).decode()
        letters = list(generator.choice(real).text)
        generator.shuffle(letters)
        again = generator.choice(real)
        texts.append(Text(f"noise/{i}", "noise", NOISE, "train", noise))
        texts.append(Text(f"scrambled/{i}", "scrambled", SCRAMBLED, "train", "".join(letters)))
        texts.append(Text(f"copy/{i} of {again.id}", again.domain, COPY, "train", again.text))
    generator.shuffle(texts)
    return texts


def write_texts(texts: list[Text], file: Path) -> None:
    """Write documents as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(asdict(t)) + "\n" for t in texts), "utf-8")

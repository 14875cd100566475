"""Text that every Python installation carries, in domains: something to train on where nothing else is at hand."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Piece(NamedTuple, Generic[T]):
    """A piece of a text: where it comes from, its number there, and what it is."""

    source: str
    number: int
    content: T


def pieces_of(domain: str, cut: Callable[[str], Iterable[T]], most: int) -> list[Piece[T]]:
    """Return the pieces of all texts of a domain, in a fixed order.

    Args:
        domain: One of ``DOMAINS``.
        cut: Cuts a text into pieces.
        most: Pieces that are taken of one text, so that no long file outweighs the others.
    """
    return [
        Piece(source, number, piece) for source, text in DOMAINS[domain]() for number, piece in enumerate(islice(cut(text), most))
    ]


def _files(folder: str, pattern: str) -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_paths()["stdlib"]) / folder
    for file in sorted(root.glob(pattern)):
        yield file.name, file.read_text("utf-8", "replace")


def _reference() -> Iterator[tuple[str, str]]:
    """Yield the language reference that ``help()`` shows."""
    from pydoc_data import topics

    yield from sorted(topics.topics.items())


def _code() -> Iterator[tuple[str, str]]:
    """Yield the source of the standard library."""
    return _files(".", "*.py")


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield what the standard library says about itself."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name, source in _code():
        try:
            nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, kinds)]
        except (SyntaxError, ValueError, RecursionError):
            continue
        yield name, "\n\n".join(filter(None, (ast.get_docstring(n) for n in nodes)))


def _tables() -> Iterator[tuple[str, str]]:
    """Yield the character tables of ``encodings``: regular, and of little use for anything else."""
    return _files("encodings", "cp*.py")


#: The texts of each domain with their names, by domain.
DOMAINS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "reference": _reference,
    "code": _code,
    "docstrings": _docstrings,
    "tables": _tables,
}

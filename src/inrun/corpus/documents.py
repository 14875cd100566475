"""A corpus as a stream of documents: rows of any format, with the fields that the user named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from inrun.corpus.problems import Problems
from inrun.corpus.readers import Row, read_rows
from inrun.corpus.sources import SourceFile, find_files
from inrun.errors import ConfigurationError

__all__ = ["Document", "Fields", "Bookmark", "Problems", "SourceFile", "find_files", "read_documents", "read_from", "read_whole"]

#: Fields beside the text; ``TokenStore.column`` knows all but the id.
METADATA = ("id", "domain", "source", "owner", "split")
#: Characters of an id, domain ... beyond which it is no name.
LONGEST_NAME = 16_384
_MISSING = object()


@dataclass(frozen=True)
class Fields:
    """Names of the fields of a row; a dotted name reaches into an object ("meta.domain"), None means that there is none."""

    text: str | None = "text"
    id: str | None = "id"
    domain: str | None = "domain"
    source: str | None = "source"
    owner: str | None = "owner"
    split: str | None = "split"

    def __post_init__(self) -> None:
        """Refuse names that cannot be fields."""
        for role, name in asdict(self).items():
            if name is not None and (not isinstance(name, str) or not name):
                raise ConfigurationError(f"the field for {role} is {name!r}; accepted are the name of a field, or None")
        if self.text is None:
            raise ConfigurationError("the field for text is None; name the field that holds the text")

    def columns(self) -> list[str]:
        """Return the top-level names that may be needed: a dot may be part of a name, or lead into an object."""
        names = [name for name in asdict(self).values() if name is not None]
        return list(dict.fromkeys(n for name in names for n in (name, name.split(".")[0])))


@dataclass(frozen=True)
class Document:
    """One text and what is known about it. ``where`` is "file:line", for messages; for a text file its name."""

    text: str
    id: str
    domain: str | None
    source: str | None
    owner: str | None
    split: str | None
    where: str


class Bookmark(NamedTuple):
    """How far reading has come: behind a document of a file."""

    file: int = 0
    after: int = 0
    line: int = 0
    done: int = 0


def read_documents(paths: str | Path | Sequence[str | Path], fields: Fields, problems: Problems) -> Iterator[Document]:
    """Yield the documents of files and folders one by one, in a fixed order.

    Args:
        paths: See :func:`find_files`.
        fields: Where a row keeps its text and what is known about it.
        problems: Counts rows that are no documents, with file and line; they are skipped.
    """
    for document, _ in read_from(find_files(paths, problems), fields, problems):
        yield document


def read_from(
    files: Sequence[SourceFile], fields: Fields, problems: Problems, start: Bookmark | None = None
) -> Iterator[tuple[Document, Bookmark]]:
    """Yield documents from a place on, each with the place behind it."""
    start, columns = start or Bookmark(), fields.columns()
    for number in range(start.file, len(files)):
        file = files[number]
        after, line = (start.after, start.line) if number == start.file else (0, 0)
        for row in read_rows(file, columns, problems, after, line):
            document = _from_text(row, file, problems) if file.kind == "text" else _from_row(row, file, fields, problems)
            if document is not None:
                yield document, Bookmark(number, row.after, row.line, row.done)


def read_whole(files: Sequence[SourceFile], fields: Fields, problems: Problems) -> Iterator[dict[str, Any]]:
    """Yield the documents of :func:`read_documents` as rows with all the columns that their files have.

    What a row does not say itself, since its file's name or place tells it, is added under the name of its field: read again from
    another file, it is the same document.
    """
    for file in files:
        for row in read_rows(file, None, problems):
            is_text = file.kind == "text"
            document = _from_text(row, file, problems) if is_text else _from_row(row, file, fields, problems)
            if document is None:
                continue
            told = {} if is_text else dict(row.value)
            roles = {"text": document.text} if is_text else {}
            roles |= {role: getattr(document, role) for role in METADATA}
            for role, value in roles.items():
                name = getattr(fields, role)
                if name is not None and value is not None and _dig(told, name) in (_MISSING, None, ""):
                    told[name] = value
            yield told


def _from_text(row: Row, file: SourceFile, problems: Problems) -> Document | None:
    if not row.value:
        problems.add("empty text", file.name, "the file is empty")
        return None
    folder, _, rest = file.name.partition("/")
    return Document(row.value, file.name, folder if rest else None, file.name.rpartition("/")[2], None, file.split, file.name)


def _from_row(row: Row, file: SourceFile, fields: Fields, problems: Problems) -> Document | None:
    where = f"{file.name}:{row.line}"
    text = _text(row.value, str(fields.text), where, problems)
    if text is None:
        return None
    known = {role: _metadata(row.value, role, getattr(fields, role), where, problems) for role in METADATA}
    return Document(
        text=text,
        id=where if known["id"] is None else known["id"],
        domain=known["domain"],
        source=known["source"],
        owner=known["owner"],
        split=file.split if known["split"] is None else known["split"],
        where=where,
    )


def _text(row: Mapping[str, Any], name: str, where: str, problems: Problems) -> str | None:
    value = _dig(row, name)
    if value is _MISSING:
        there = ", ".join(repr(key) for key in list(row)[:8]) or "none"
        problems.add("no text field", where, f"there is no field {name!r}; known fields are {there}")
        return None
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            problems.add("not UTF-8", where, f"the bytes in {name!r} are no UTF-8")
            return None
    if not isinstance(value, str):
        problems.add("text is not a string", where, f"the field {name!r} holds {_title(value)}")
    elif not value:
        problems.add("empty text", where, f"the field {name!r} is empty")
    elif not _is_unicode(value):
        problems.add("not UTF-8", where, f"the field {name!r} holds half a surrogate pair")
    else:
        return value
    return None


def _metadata(row: Mapping[str, Any], role: str, name: str | None, where: str, problems: Problems) -> str | None:
    """Return a name as text. Numbers are written out; empty means unknown."""
    value = _MISSING if name is None else _dig(row, name)
    if value is _MISSING or value is None or value == "":
        return None
    if isinstance(value, str):
        text = value
    elif isinstance(value, int | float):
        text = str(value)
    else:
        problems.add("metadata is not text or number", where, f"the field {name!r} ({role}) holds {_title(value)}")
        return None
    if len(text) > LONGEST_NAME:
        reason = f"the field {name!r} ({role}) has {len(text):,} characters, at most {LONGEST_NAME:,} are a name"
        problems.add("metadata is not text or number", where, reason)
        return None
    return text if _is_unicode(text) else text.encode("utf-8", "backslashreplace").decode()


def _dig(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _title(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"

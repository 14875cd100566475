"""Which files a corpus consists of: paths given by the user, folders walked in a fixed order, links never followed out of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from inrun.corpus.problems import Problems, printable
from inrun.errors import ConfigurationError, DataError

#: How a file is read, by the end of its name.
DATA = {
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".jsonl.gz": "lines",
    ".ndjson.gz": "lines",
    ".json.gz": "lines",
    ".jsonl.zst": "lines",
    ".ndjson.zst": "lines",
    ".json.zst": "lines",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
#: A data file when given by itself; among text files (a package.json in a source tree) it is a text.
MAYBE_DATA = {".json": "lines"}
#: Single files that are one document. In a folder any file counts.
TEXTS = (".txt", ".text", ".md", ".rst", ".py", ".tex")
#: `inrun curate` leaves this beside its files.
CURATED = "curation.json"
#: What it writes beside the kept and the dropped.
CURATION = (CURATED, "README.md", "chunks.parquet")
ACCEPTED = (
    f"accepted are files ending in {', '.join([*DATA, *MAYBE_DATA])}, single texts ({', '.join(TEXTS)}), "
    "folders of such files or of any text files, and folders written by datasets' save_to_disk"
)


@dataclass(frozen=True)
class SourceFile:
    """One file of a corpus.

    Attributes:
        path: Where it is.
        name: Its name relative to what was given: the same on every machine, and fit for messages.
        kind: "lines" (JSON), "parquet", "arrow" or "text".
        split: The split that its folder stands for, in a saved ``datasets.DatasetDict``.
    """

    path: Path
    name: str
    kind: str
    split: str | None = None


def find_files(paths: str | Path | Sequence[str | Path], problems: Problems | None = None) -> list[SourceFile]:
    """List the files of a corpus: paths in the order given, the content of folders by name.

    Args:
        paths: A file or folder, or several.
        problems: Counts links that leave their folder, which are not followed, and files that lie beside a curation.

    Raises:
        ConfigurationError: A path is missing, of an unknown kind, empty, or given twice.
    """
    given = [Path(p) for p in ([paths] if isinstance(paths, str | Path) else paths)]
    if not given:
        raise ConfigurationError(f"no data was given; {ACCEPTED}")
    problems = Problems() if problems is None else problems
    try:
        found = _find(given, problems)
    except OSError as error:
        raise ConfigurationError(f"{error.filename} cannot be looked at: {error.strerror}; {ACCEPTED}") from error
    twice = _first_twice(found)
    if twice is not None:
        raise ConfigurationError(f"{twice} is in the data twice; give each file once, or the folder alone")
    return found


def _find(given: Sequence[Path], problems: Problems) -> list[SourceFile]:
    roots = [Path(os.path.abspath(p if p.is_dir() else p.parent)) for p in given]
    base = Path(os.path.commonpath(roots)) if len(set(roots)) > 1 else roots[0]
    return [file for path in given for file in _files_of(Path(os.path.abspath(path)), base, problems)]


def _files_of(path: Path, base: Path, problems: Problems) -> list[SourceFile]:
    if path.is_dir():
        return _files_in(path, base, problems)
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist; {ACCEPTED}")
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a regular file; {ACCEPTED}")
    kind = _kind(path, {**DATA, **MAYBE_DATA})
    if kind is None and path.name.lower().endswith(TEXTS):
        kind = "text"
    if kind is None:
        raise ConfigurationError(f"{path} is of a kind that is not read; {ACCEPTED}")
    return [SourceFile(path, _name(path, base), kind)]


def _files_in(folder: Path, base: Path, problems: Problems) -> list[SourceFile]:
    splits = _dataset_splits(folder)
    if splits is not None:
        return [_with_split(f, split) for split in splits for f in _dataset_files(_inside(folder, split), base)]
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return _dataset_files(folder, base)
    files = list(_walk(folder, base, problems))
    if not files:
        raise ConfigurationError(f"{folder} holds no files (hidden ones do not count); {ACCEPTED}")
    if any(_kind(f, DATA) for f in files) or all(_kind(f, MAYBE_DATA) for f in files):
        kinds = [(f, _kind(f, {**DATA, **MAYBE_DATA})) for f in files]  # a README beside them is no data
        return [SourceFile(f, _name(f, base), kind) for f, kind in kinds if kind]
    return [SourceFile(f, _name(f, base), "text") for f in files]


def _walk(folder: Path, base: Path, problems: Problems) -> Iterator[Path]:
    """Yield the visible files below a folder in the order of their names."""
    root = folder.resolve()
    for here, folders, names in os.walk(folder, onerror=_raise):
        if _is_ours(folders, names):
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in list(folders):
            if (Path(here) / name).is_symlink():
                problems.add("link out of the folder", _name(Path(here) / name, base), "a link to a folder")
                folders.remove(name)
        left_out = _dropped(Path(here), names, base, problems)
        for name in sorted(n for n in names if not n.startswith(".") and n not in left_out):
            path = Path(here) / name
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                problems.add("link out of the folder", _name(path, base), "a link to a file elsewhere")
            elif path.is_file():
                yield path


def _is_ours(folders: Sequence[str], names: Sequence[str]) -> bool:
    """Tell a token store or a run, which may lie below the data: what inrun wrote is not what it is to read."""
    return ("tokens.bin" in names and "offsets.bin" in names) or ("run.json" in names and "manifest" in folders)


def _dropped(here: Path, names: Sequence[str], base: Path, problems: Problems) -> set[str]:
    """Return the files beside what `inrun curate` kept: they are not to be trained on, and those of others are counted."""
    if CURATED not in names:
        return set()
    mark = _read_json(here / CURATED, "curate again, or move it away if it is not by `inrun curate`")
    if mark.get("written_by") != "inrun curate":
        return set()
    kept = mark.get("kept")
    if kept not in names:
        raise DataError(f"{here} holds no {printable(str(kept))}, though {CURATED} names it as what to train on; curate again")
    for name in sorted(n for n in names if n not in (kept, mark.get("dropped"), *CURATION) and not n.startswith(".")):
        problems.add("file beside a curation", _name(here / name, base), f"`inrun curate` wrote {kept} there, which alone is read")
    return {name for name in names if name != kept}


def _raise(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be listed: {error.strerror}; make it readable, or give the files one by one")


def _kind(path: Path, kinds: dict[str, str]) -> str | None:
    name = path.name.lower()
    return next((kind for ending, kind in kinds.items() if name.endswith(ending)), None)


def _name(path: Path, base: Path) -> str:
    """Return a name that is valid UTF-8 without control characters, whatever the file system holds."""
    return printable(os.fsencode(PurePosixPath(path.relative_to(base).as_posix())).decode("utf-8", "backslashreplace"))


def _first_twice(files: Iterable[SourceFile]) -> Path | None:
    seen: set[Path] = set()
    for file in files:
        if file.path in seen:
            return file.path
        seen.add(file.path)
    return None


def _dataset_splits(folder: Path) -> list[str] | None:
    """Return the splits of a saved ``datasets.DatasetDict``, or None if the folder is none."""
    path = folder / "dataset_dict.json"
    if not path.is_file():
        return None
    splits = _read_json(path).get("splits")
    if not isinstance(splits, list) or not splits or not all(isinstance(s, str) for s in splits):
        raise DataError(f"{path} names no splits; save the data again with save_to_disk")
    return splits


def _dataset_files(folder: Path, base: Path) -> list[SourceFile]:
    """Return the Arrow files of a saved ``datasets.Dataset`` in its own order."""
    state = folder / "state.json"
    entries = _read_json(state).get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(e, dict) and isinstance(e.get("filename"), str) for e in entries):
        raise DataError(f"{state} lists no data files; save the data again with save_to_disk")
    paths = [_inside(folder, entry["filename"]) for entry in entries]
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing, though {state} lists it; save the data again with save_to_disk")
    return [SourceFile(path, _name(path, base), "arrow") for path in paths]


def _inside(folder: Path, name: str) -> Path:
    """Join a name that a file gave, refusing one that leads elsewhere."""
    path = folder / name
    if not name or "\0" in name or not path.resolve().is_relative_to(folder.resolve()) or path.resolve() == folder.resolve():
        raise DataError(f"{folder} names a file {name!r} that is not inside it; it was not written by save_to_disk")
    return path


def _with_split(file: SourceFile, split: str) -> SourceFile:
    return SourceFile(file.path, file.name, file.kind, split)


def _read_json(path: Path, again: str = "save the data again with save_to_disk") -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read ({error}); {again}") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} holds a {type(found).__name__}, not an object; {again}")
    return found

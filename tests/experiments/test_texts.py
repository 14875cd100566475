"""Corpora and runs of the experiments on text, and each experiment at its smallest size."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from inrun.errors import ConfigurationError
from inrun.experiments import paraphrase
from inrun.experiments.curation_tables import spread, steps_to
from inrun.experiments.domains import recall
from inrun.experiments.outputs import save
from inrun.experiments.recipes import Work, run
from inrun.experiments.stages import shares
from inrun.experiments.text_runs import Scoring, TextRun, against_batch, loss_on, order, run_of, scores_by, train
from inrun.experiments.texts import CorpusConfig, Encoder, Rows, read_corpus
from inrun.training.loss import PADDING, next_token_loss

DATA = next((p / "shared" / "data" for p in Path(__file__).resolve().parents if (p / "shared" / "data").exists()), None)
SMALL = TextRun(steps=6, batch=4, warmup=2, context=16, width=16, heads=2)


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("paraphrase", "groups")]


@pytest.mark.parametrize("name", ["curation", "stages", "domains", *LONGER])
def test_runs_at_its_smallest_and_again_the_same(name: str, tmp_path: Path) -> None:
    work = Work(name, seeds=(0,), cells=tmp_path / "cells")
    first = run(name, "smoke", work)
    assert run(name, "smoke", work).data == first.data  # from the cells
    written = save(first, work, tmp_path, 1.0)
    assert (tmp_path / "figure.png").stat().st_size < 500_000 and len(written) == 4
    assert "no --data was given" in (tmp_path / "table.md").read_text()


NAMES = [pytest.param(name, marks=pytest.mark.slow) for name in ("curation", "paraphrase", "domains", "groups")]


@pytest.mark.parametrize("name", ["stages", *NAMES])
def test_computed_twice_gives_the_same_json(name: str) -> None:
    found = [json.dumps(run(name, "smoke", Work(name, seeds=(seed,))).data) for seed in (3, 3, 4)]
    assert found[0] == found[1]
    assert found[0].replace('"seeds": [3]', "") != found[2].replace('"seeds": [4]', "")  # the control


@pytest.mark.slow
@pytest.mark.skipif(DATA is None, reason="no shared data")
@pytest.mark.parametrize("name", ["domains", "paraphrase"])
def test_runs_on_the_data(name: str) -> None:
    found = run(name, "smoke", Work(name, seeds=(0,), data=DATA))
    assert "minipile.jsonl.gz" in found.notes[0]


def a_corpus(folder: Path) -> Path:
    documents = [
        {"text": f"{domain} {split} {i} " * 8, "domain": domain, "split": split}
        for domain in ("a", "b")
        for split in ("train", "val", "test")
        for i in range(6)
    ]
    with gzip.open(folder / "corpus.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(d) + "\n" for d in documents)
    return folder


def test_reads_documents_and_draws_the_same_of_each_domain(tmp_path: Path) -> None:
    work = Work("domains", data=a_corpus(tmp_path))
    config = CorpusConfig(8, 16, 256, 2, 3)
    corpus = read_corpus(work, config, 0)
    assert corpus.train.tokens.shape == (8, 17) and corpus.domains == ["a", "b"] and corpus.source == "corpus.jsonl.gz"
    assert corpus.train.domains.count("a") == 4 and len(corpus.validation) == 4 and len(corpus.test) == 6
    for rows, split in ((corpus.train, "train"), (corpus.validation, "val"), (corpus.test, "test")):
        assert all(t.startswith(f"{d} {split} ") for t, d in zip(rows.texts, rows.domains, strict=True))
    again, other = read_corpus(work, config, 0), read_corpus(work, config, 1)
    assert torch.equal(corpus.train.tokens, again.train.tokens) and not torch.equal(corpus.train.tokens, other.train.tokens)
    with pytest.raises(ConfigurationError, match="has 6 documents of domain 'a' in split 'train', 50 are needed"):
        read_corpus(work, CorpusConfig(100, 16), 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="has none of minipile.jsonl.gz"):
        read_corpus(Work("domains", data=tmp_path / "empty"), config, 0)


def test_rows_are_taken_in_turn_and_short_ones_padded() -> None:
    rows = Rows(torch.arange(8).view(4, 2), ("w", "x", "y", "z"), ("a", "a", "b", "b"))
    assert rows.only({"a", "b"}, 3).texts == ("w", "y", "x") and rows.only({"b"}).texts == ("y", "z")
    short = Encoder(4, None).rows(["ab", "abcdefgh"], ["d", "d"])
    assert short.tokens.tolist() == [[97, 98, *[PADDING] * 3], [97, 98, 99, 100, 101]] and short.texts == ("ab", "abcde")


def test_an_order_without_documents_is_the_same_order() -> None:
    keep = np.ones(10, bool)
    keep[3] = False
    everything, fewer = order(SMALL, 10, 0).ravel(), order(SMALL, 10, 0, keep).ravel()
    assert 3 not in fewer and everything.shape == fewer.shape == (24,)
    assert (everything[everything != 3] == fewer[: (everything != 3).sum()]).all()


def tokens(n: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (n, 17), generator=torch.Generator().manual_seed(0))


def test_weight_0_leaves_a_document_out() -> None:
    rows, batches = tokens(), order(SMALL, 8, 0)
    changed = rows.clone()
    changed[5] = 7
    weights = np.ones(8)
    weights[5] = 0
    losses = [loss_on(train(SMALL, r, batches, 256, 0, weights=weights).model, rows[:2]) for r in (rows, changed)]
    assert losses[0] == losses[1]
    control = [loss_on(train(SMALL, r, batches, 256, 0).model, rows[:2]) for r in (rows, changed)]
    assert control[0] != control[1]


def test_whole_credit_adds_up_and_scoring_leaves_training_alone() -> None:
    rows, batches = tokens(), order(SMALL, 8, 0)
    plain = train(SMALL, rows, batches, 256, 0, checkpoints=(3, 6))
    losses: dict[int, float] = {}
    scored = train(
        SMALL,
        rows,
        batches,
        256,
        0,
        scoring=Scoring("whole", {"v": rows[:4]}, folds=2),
        watch=lambda done, model: losses.update({done: loss_on(model, rows[:4])}),
    )
    assert loss_on(plain.model, rows) == pytest.approx(loss_on(scored.model, rows), abs=1e-5) and len(plain.checkpoints) == 2
    assert scored.scores["v"].sum() == pytest.approx(losses[0] - losses[6], rel=0.05)
    assert (scored.standard_errors["v"] > 0).all()
    turns = train(SMALL, rows, batches, 256, 0, scoring=Scoring("proxy_first", {"v": rows[:4]}, per_step=2))
    assert turns.scores["v"].shape == (8,)


def test_a_run_gives_what_is_beside_it_too() -> None:
    rows = Encoder(16, None).rows([f"row {i} of some" for i in range(8)], ["d"] * 8)
    held, batches = {"v": rows.take(np.array([1]))}, order(SMALL, 8, 0)
    found = scores_by("influence_function", SMALL, rows, batches, 256, 0, held)
    model = train(SMALL, rows.tokens, batches, 256, 0).model
    gradients = []
    for row in (*rows.tokens, held["v"].tokens[0]):
        model.zero_grad()
        next_token_loss(model, row[None]).backward()
        gradients.append(torch.cat([p.grad.ravel() for p in model.parameters()]))
    product = torch.stack(gradients[:-1]) @ gradients[-1]
    assert found["gradient_product"]["v"] == pytest.approx(product.numpy(), rel=1e-3, abs=1e-5)
    assert not np.allclose(found["influence_function"]["v"], product.numpy(), rtol=0.1)
    ours = scores_by("proxy_first", SMALL, rows, batches, 256, 0, held)
    assert set(ours) == {"proxy_first", "proxy_by_step"} and run_of("proxy_by_step") == "proxy_first" == run_of("proxy_first")
    assert abs(ours["proxy_by_step"]["v"].sum()) < 1e-6 < abs(ours["proxy_first"]["v"].sum())  # each step's sum to nothing


def test_text_baselines_rank_a_copy_first() -> None:
    texts = ("one two three four", "five six seven eight", "nine ten eleven twelve")
    rows = Encoder(16, None).rows(texts, ["d"] * 3)
    found = scores_by("bm25", SMALL, rows, order(SMALL, 3, 0), 256, 0, {"v": rows.take(np.array([1]))})
    assert found["bm25"]["v"].argmax() == 1


def test_counting() -> None:
    same = np.array([True, True, False, False])
    assert recall(np.array([4.0, 3, 2, 1]), same, 2) == 2 and recall(np.array([4.0, 1, 3, 2]), same, 2) == 1
    assert steps_to([[0, 5.0], [10, 3.0], [20, 1.0]], 2.0) == 15 and steps_to([[0, 5.0]], 2.0) is None
    assert np.allclose(shares(np.array([[3.0, 1], [-4, 1]])), [[0.75, 0.25], [0, 1]])
    assert spread([1.0, 2.0], ".1f") == "1.5 ± 0.7" and spread([1.0], "+.1f") == "+1.0"
    assert spread([1.0, np.nan], ".1f") == spread([np.nan]) == "–"


def test_against_the_batch_early_steps_count_no_more() -> None:
    uses = {"step": [0, 0, 1, 1, 1, 1], "sample_id": [0, 1, 2, 3, 2, 3], "value": [100.0, 102.0, 0.1, 0.2, 0.1, 0.2]}
    assert against_batch(pa.table(uses), 5).tolist() == pytest.approx([-1, 1, -1, 1, 0])


# Files that are not what they should be


def line(**other: object) -> str:
    return json.dumps({"text": "some text of some words", "domain": "a", "split": "train", **other})


BROKEN = {
    "not JSON": (f"{line()}\n{{", "line 2 is no JSON"),
    "no object": (f"{line()}\n[1]", "line 2 is a JSON list; expected is one JSON object a line"),
    "too deep": ("[" * 100_000, "line 1 is no JSON"),
    "text is a number": (line(text=3), "line 1: domain is a str and text a int; both must be text"),
    "no domain": (json.dumps({"text": "x", "split": "train"}), "line 1: domain is a NoneType and text a str"),
    "empty": ("", "documents of 0 domains to train on"),
    "no split": (json.dumps({"text": "x", "domain": "a"}), "documents of 0 domains to train on"),
    "odd split": (line(split=["train"]), "documents of 0 domains to train on"),
    "too many domains": ("\n".join(line(domain=str(i)) for i in range(9)), "documents of 9 domains .* 4 documents are drawn"),
    "empty text": ("\n".join([line(text="")] * 4 + [line(split="val")] * 9), r"domain 'a' with fewer than two tokens \(''\)"),
    "one byte": ("\n".join([line()] * 4 + [line(split="val", text="x")] * 9), r"fewer than two tokens \('x'\)"),
}
SMALLEST = CorpusConfig(4, 16, 256, 2, 0)


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_of_documents_that_is_broken_is_one_error(case: str, tmp_path: Path) -> None:
    text, words = BROKEN[case]
    (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        read_corpus(Work("domains", data=tmp_path), SMALLEST, 0)


@pytest.mark.parametrize("case", ["not gzip", "cut off", "not UTF-8", "empty"])
def test_a_compressed_file_that_is_broken_is_one_error(case: str, tmp_path: Path) -> None:
    whole = gzip.compress(line().encode() * 50)
    bodies = {"not gzip": b"not gzip", "cut off": whole[:-20], "not UTF-8": gzip.compress(b"\xff\xfe\x00"), "empty": b""}
    (tmp_path / "corpus.jsonl.gz").write_bytes(bodies[case])
    with pytest.raises(ConfigurationError, match=r"corpus.jsonl.gz (cannot be read|has documents of 0 domains)"):
        read_corpus(Work("domains", data=tmp_path), SMALLEST, 0)


def test_odd_documents_that_are_none_the_less_documents(tmp_path: Path) -> None:
    odd = [line(text="half a pair \ud800 of surrogates"), "", line(text="a \u2028 separator")]
    rest = [line()] * 2 + [line(split="validation")] * 2 + [line(split="other", text=None), json.dumps({"about": "nothing"})]
    (tmp_path / "corpus.jsonl").write_text("\n".join([*odd, *rest]).replace("\\u2028", "\u2028"), encoding="utf-8")
    texts = read_corpus(Work("domains", data=tmp_path), CorpusConfig(4, 40, 256, 2, 0), 0).train.texts
    assert sorted(t[:8] for t in texts) == ["a \u2028 sepa", "half a p", "some tex", "some tex"]
    assert any("pair \ufffd of" in t for t in texts)


def test_another_corpus_of_the_same_name_does_not_get_the_cells_of_the_first(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        texts = [line(split=split, text=f"{name} of {i} texts") for split in ("train", "val") for i in range(6)]
        (tmp_path / name / "corpus.jsonl").write_text("\n".join(texts))
    works = {n: Work("domains", data=tmp_path / n, cells=tmp_path / "cells") for n in ("first", "second")}
    read_corpus(works["first"], SMALLEST, 0)
    works["first"].cell({}, lambda: 1)
    read_corpus(works["first"], SMALLEST, 1)  # another draw of the same
    with pytest.raises(ConfigurationError, match="results made from another corpus.jsonl"):
        read_corpus(works["second"], SMALLEST, 0)


GROUP = {
    "id": "x",
    "kind": "news",
    "original": "one",
    "similar_topic_id": "y",
    "paraphrases": [{"text": "t", "fourgram_overlap": 0.5}],
}
OTHER = {**GROUP, "id": "y", "similar_topic_id": "x"}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([GROUP, {**OTHER, "paraphrases": []}], "line 2: a group has id, kind"),
        ([GROUP, {**OTHER, "paraphrases": [{"text": "t"}]}], "line 2: .*each with text and fourgram_overlap"),
        ([{**GROUP, "original": None}], "line 1: a group has id"),
        ([GROUP], "similar_topic_id of group 'x' is the id of no group"),
        ([GROUP, OTHER], "has 1 originals none of which is on the topic of another, 2 are needed"),
        ([], "has 0 originals"),
    ],
)
def test_a_file_of_paraphrases_that_is_broken_is_one_error(lines: list[dict[str, object]], words: str, tmp_path: Path) -> None:
    (tmp_path / "paraphrases.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigurationError, match=words):
        paraphrase._groups(Work("paraphrase", data=tmp_path), 2, 0)


def test_a_file_of_paraphrases_may_have_separators_of_lines_in_its_texts(tmp_path: Path) -> None:
    """What ``str.splitlines`` takes for ends of lines is text in JSON."""
    lines = [{**g, "original": f"{g['id']} \u2028 \x85 text"} for g in (GROUP, OTHER)]
    (tmp_path / "paraphrases.jsonl").write_text("\n".join(json.dumps(g, ensure_ascii=False) for g in lines), encoding="utf-8")
    groups, _ = paraphrase._groups(Work("paraphrase", data=tmp_path), 1, 0)
    assert "\u2028 \x85" in groups[0].original


@pytest.mark.parametrize("domains", [("$x^$", "_y $", "|z"), ("only",), ("junk",)])
def test_stages_takes_domains_of_any_name_and_number(domains: tuple[str, ...], tmp_path: Path) -> None:
    texts = [line(domain=d, split=s, text=f"{d} {s} {i} of some") for d in domains for s in ("train", "val") for i in range(64)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(texts))
    work = Work("stages", seeds=(0,), data=tmp_path)
    assert len(save(run("stages", "smoke", work), work, tmp_path / "out", 1.0)) == 4


@pytest.mark.parametrize(
    "config", [CorpusConfig(8, 16, 256, 1, 0), CorpusConfig(8, 64, 256, 1, 0), CorpusConfig(64, 32, 512, 1, 0)]
)
def test_half_of_the_original_is_in_the_instruction(config: CorpusConfig) -> None:
    """Whole, though a row is short: it is the instruction that is cut."""
    corpus = read_corpus(Work("paraphrase"), config, 0)
    encode = corpus.encode
    for text in corpus.train.texts[:8]:
        ids = encode.ids(text)
        half = encode.text(ids[: len(ids) // 2])
        row = encode.rows([paraphrase.in_instruction(encode, text)], ["original"]).texts[0]
        assert row.endswith(half) and len(half) > 5
        assert row.removesuffix(half) and paraphrase.INSTRUCTION.endswith(row.removesuffix(half))
        as_before = encode.rows([paraphrase.INSTRUCTION[: 2 * len(half)] + half], ["original"]).texts[0]
        assert not as_before.endswith(half) or config.context == 64  # the control

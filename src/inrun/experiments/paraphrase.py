"""Does a document still count for text that says the same in other words? The paper's table of ranks.

Originals are put among the training documents. For validation texts from an exact copy to another text on the same topic, all
training documents are ranked by their scores for that one text, and the rank of the original is what counts: 1 is the best.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from inrun.errors import ConfigurationError
from inrun.experiments.curation_tables import COLOURS
from inrun.experiments.figures import pyplot
from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.text_runs import OURS, TITLES, TextRun, Values, cell_of, order, run_of, scores_by
from inrun.experiments.texts import Corpus, CorpusConfig, Encoder, Rows, read_corpus, read_jsonl

FILE = "paraphrases.jsonl"
#: From the closest to the farthest, with the paper's ranks out of about 320,000: first, second, influence function, BM25.
LEVELS: dict[str, str | None] = {
    "exact copy": None,
    "half of it in an instruction": "1 / 1 / 1 / 1",
    "near copy": "1 / 1 / 1 / 1",
    "free rewrite": "32.3 / 32 / 39.3 / 1.6",
    "same topic": "145.6 / 141.6 / 292 / 20917.3",
}
INSTRUCTION = "### Instruction: Write a text about the following. ### Answer: "
WAYS = ("proxy_first", "proxy_by_step", "whole", "by_step", "influence_function", "gradient_product", "trak", "bm25")
#: The domain that originals are given.
ORIGINALS = "original"


@dataclass(frozen=True)
class ParaphraseConfig:
    """What is tried."""

    corpus: CorpusConfig = field(default_factory=lambda: CorpusConfig(600, 32, 1024, 1, 0))
    run: TextRun = field(default_factory=lambda: TextRun(steps=200, context=32))
    ways: tuple[str, ...] = WAYS
    #: Originals for every seed, other ones each time; half of them news, half of the Bible.
    originals: int = 4
    #: Of TRAK's random projections.
    dimension: int = 2048
    #: Edges of the figure's histogram, in units of the largest value.
    bins: int = 60


SIZES = {
    "smoke": ParaphraseConfig(
        CorpusConfig(64, 16, 256, 1, 0),
        TextRun(steps=8, batch=9, warmup=2, context=16, width=16, heads=2),
        originals=2,
        dimension=64,
        bins=10,
    ),
    "quick": ParaphraseConfig(
        run=TextRun(steps=75, context=32), ways=("proxy_first", "whole", "influence_function", "trak", "bm25")
    ),
    # A quarter of an hour of one core.
    "full": ParaphraseConfig(),
}


def run(config: ParaphraseConfig, work: Work) -> Findings:
    """Score for every text by itself, and rank the originals."""
    runs = list(dict.fromkeys(run_of(way) for way in config.ways))
    cells, source, jobs = [], "", [(seed, main) for seed in work.seeds for main in runs]
    for done, (seed, main) in enumerate(jobs):
        work.tell(f"{main}, seed {seed}", done, len(jobs))
        groups, where = _groups(work, config.originals, seed)
        corpus = read_corpus(work, config.corpus, seed)
        source = f"{corpus.source}; originals and rewrites: {where}"
        # Cells without "half" are of rows in which the instruction left room for a third of it.
        key = {"run": cell_of(main), "seed": seed, "config": replace(config, ways=()), "text": source, "half": "whole"}
        found = work.cell(key, functools.partial(_ranks, config, corpus, groups, main, seed))
        cells += [{"way": way, "seed": seed, **found[way]} for way in config.ways if way in found]
    documents = cells[0]["documents"]
    notes = [
        f"Text: {source}. {documents} training documents, {config.originals} of them originals (others for every seed), a row of "
        f"{config.corpus.context + 1} tokens each (vocabulary {config.corpus.vocab}), {config.run.steps} AdamW steps of batch "
        f"{config.run.batch}. Only what fits into a row counts, for the model and for BM25.",
        "TRAK: 5 checkpoints of the one run, dimension 2048. The paper: GPT-2, three originals, rewrites by GPT-4, about 320,000 "
        "documents.",
    ]
    tables = [_table(config, cells, documents), _median_table(config, cells)]
    return Findings({"cells": cells}, tables, notes, draw=lambda path: _draw(config, cells, path))


@dataclass(frozen=True)
class _Group:
    """An original and the texts that are held against it, by level."""

    original: str
    others: dict[str, str]


def _groups(work: Work, count: int, seed: int) -> tuple[list[_Group], str]:
    """Draw originals; none is the topic's neighbour of another, which would be in training then."""
    if work.data is None:
        return _python_groups(work, count, seed), "Python's own text, rewritten by rule (words left out, words in another order)"
    path = work.data / FILE
    if not path.exists():
        raise ConfigurationError(f"{work.data} has no {FILE}; leave --data out, and Python's own text serves instead")
    found = [_checked_group(path, number, group) for number, group in read_jsonl(path)]
    text_of = {group["id"]: group["original"] for group in found}
    alone = next((g["id"] for g in found if g["similar_topic_id"] not in text_of), None)
    if alone is not None:
        raise ConfigurationError(f"{path}: the similar_topic_id of group {alone!r} is the id of no group in the file")
    work.made_from(FILE, hashlib.sha256(path.read_bytes()).hexdigest())
    draw = np.random.default_rng([seed, 4])
    kinds = sorted({group["kind"] for group in found})
    chosen: list[dict[str, Any]] = []
    taken: set[str] = set()
    for i, at in enumerate(draw.permutation(len(found)).tolist() * len(kinds)):
        group = found[at]
        if len(chosen) == count:
            break
        fits = group["kind"] == kinds[len(chosen) % len(kinds)] or i >= len(found)
        if fits and group["id"] not in taken and group["similar_topic_id"] not in taken:
            chosen.append(group)
            taken |= {group["id"], group["similar_topic_id"]}
    if len(chosen) < count:
        raise ConfigurationError(
            f"{path} has {len(chosen)} originals none of which is on the topic of another, {count} are needed; add groups"
        )
    return [_read_group(group, text_of) for group in chosen], FILE


def _checked_group(path: Path, number: int, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group, or raise ConfigurationError where something is missing."""
    texts = all(isinstance(group.get(name), str) for name in ("id", "kind", "original", "similar_topic_id"))
    others = group.get("paraphrases")
    if not texts or not isinstance(others, list) or not others or not all(_is_paraphrase(p) for p in others):
        raise ConfigurationError(
            f"{path}, line {number}: a group has id, kind, original and similar_topic_id, all text, and one or more paraphrases, "
            "each with text and fourgram_overlap"
        )
    return group


def _is_paraphrase(given: Any) -> bool:
    return isinstance(given, dict) and isinstance(given.get("text"), str) and isinstance(given.get("fourgram_overlap"), int | float)


def _read_group(group: dict[str, Any], text_of: dict[str, str]) -> _Group:
    by_overlap = sorted(group["paraphrases"], key=lambda p: -p["fourgram_overlap"])
    near, free, topic = by_overlap[0]["text"], by_overlap[-1]["text"], text_of[group["similar_topic_id"]]
    return _Group(group["original"], {"near copy": near, "free rewrite": free, "same topic": topic})


def _python_groups(work: Work, count: int, seed: int) -> list[_Group]:
    """Make groups of held-out pieces where there is no data: the code runs, and the numbers mean little."""
    texts = [t for t in read_corpus(work, CorpusConfig(4, 600, 256, max(2, count), 0), seed).validation.texts if t.split()]
    groups = []
    for i in range(count):
        words = texts[i].split(" ")
        near = " ".join(w for j, w in enumerate(words) if j % 5 != 4)
        free = " ".join(words[1::2] + words[::2])
        groups.append(_Group(texts[i], {"near copy": near, "free rewrite": free, "same topic": texts[(i + 1) % len(texts)]}))
    return groups


def _ranks(config: ParaphraseConfig, corpus: Corpus, groups: list[_Group], main: str, seed: int) -> dict[str, Any]:
    """Return ranks of the originals by level, for all ways of one run."""
    encode = corpus.encode
    originals = encode.rows([g.original for g in groups], [ORIGINALS] * len(groups))
    rows = corpus.train.and_also(originals)
    validation: dict[str, Rows] = {}
    for i, group in enumerate(groups):
        instructed = in_instruction(encode, group.original)
        texts = {"exact copy": group.original, "half of it in an instruction": instructed, **group.others}
        for level in LEVELS:
            validation[f"{level} {i}"] = encode.rows([texts[level]], [ORIGINALS])
    batches = order(config.run, len(rows), seed)
    found = scores_by(main, config.run, rows, batches, corpus.vocab, seed, validation, dimension=config.dimension)
    place = len(corpus.train)
    return {
        way: {
            "documents": len(rows),
            "ranks": {level: [_rank(scores[f"{level} {i}"], place + i) for i in range(len(groups))] for level in LEVELS},
            "values": _histograms(config, scores, len(groups), place),
        }
        for way, scores in found.items()
    }


def in_instruction(encode: Encoder, text: str) -> str:
    """Return half of what a row has of a text, behind as much of the instruction's end as leaves room for all of it in a row."""
    ids = encode.ids(text)
    half, lead = encode.text(ids[: len(ids) // 2]), INSTRUCTION
    while lead and not encode.text(encode.ids(lead + half)).endswith(half):
        lead = lead[1:]
    return lead + half


def _rank(scores: Values, place: int) -> float:
    """Return the place from 1, ties in the middle."""
    mine = scores[place]
    return float((scores > mine).sum() + (np.sum(scores == mine) + 1) / 2)


def _histograms(config: ParaphraseConfig, scores: dict[str, Values], groups: int, place: int) -> dict[str, Any]:
    """Return how values are distributed at each level, in units of the largest in size, and where the originals are."""
    edges = np.linspace(-1, 1, config.bins + 1)
    found: dict[str, Any] = {"edges": edges.tolist()}
    for level in LEVELS:
        scaled = [scores[f"{level} {i}"] / max(np.abs(scores[f"{level} {i}"]).max(), 1e-30) for i in range(groups)]
        counts = sum(np.histogram(x, edges)[0] for x in scaled)
        found[level] = {"counts": np.asarray(counts).tolist(), "originals": [float(x[place + i]) for i, x in enumerate(scaled)]}
    return found


def _of(cells: list[dict[str, Any]], way: str, level: str) -> list[list[float]]:
    return [c["ranks"][level] for c in cells if c["way"] == way]


def _table(config: ParaphraseConfig, cells: list[dict[str, Any]], documents: int) -> Table:
    rows: list[list[object]] = []
    for level, paper in LEVELS.items():
        row: list[object] = [level]
        for way in config.ways:
            means = [float(np.mean(ranks)) for ranks in _of(cells, way, level)]
            row.append(f"{np.mean(means):.1f}" + (f" ± {np.std(means, ddof=1):.1f}" if len(means) > 1 else ""))
        rows.append([*row, paper])
    return Table(
        f"Mean rank of the original among {documents} training documents",
        ["validation text", *(TITLES[way] for way in config.ways), "paper: first / second / influence function / BM25"],
        rows,
        f"Mean ± standard deviation over seeds with other originals; chance is {(documents + 1) / 2:.0f}.",
    )


def _median_table(config: ParaphraseConfig, cells: list[dict[str, Any]]) -> Table:
    """Return medians over all originals, and how often the original is among the first one per cent."""
    rows: list[list[object]] = []
    top = 0.01 * cells[0]["documents"]
    for level in LEVELS:
        row: list[object] = [level]
        for way in config.ways:
            ranks = np.concatenate([np.array(r) for r in _of(cells, way, level)])
            row.append(f"{np.median(ranks):g} ({100 * np.mean(ranks <= max(1.0, top)):.0f} %)")
        rows.append(row)
    return Table(
        "Median rank, and how often the original is in the first 1 %", ["validation text", *(TITLES[w] for w in config.ways)], rows
    )


def _draw(config: ParaphraseConfig, cells: list[dict[str, Any]], path: Path) -> None:
    """Draw how values are distributed for every level, with the originals, for the last of our ways; and ranks of all ways."""
    plt = pyplot()
    ours = [w for w in config.ways if w in OURS][-1]
    mine = [c["values"] for c in cells if c["way"] == ours]
    figure, grid = plt.subplots(2, (len(LEVELS) + 2) // 2, figsize=(12, 6.6), layout="constrained")
    axes = grid.ravel()
    edges = np.array(mine[0]["edges"])
    for axis, level in zip(axes, LEVELS, strict=False):
        counts = np.sum([np.array(v[level]["counts"]) for v in mine], axis=0)
        axis.stairs(counts, edges, fill=True, color="#8fb8de")
        for value in (x for v in mine for x in v[level]["originals"]):
            axis.axvline(value, ymax=0.9, color="#b3446c", lw=1.1, alpha=0.6)
        axis.set_yscale("symlog", linthresh=1)
        axis.set_title(level, fontsize=10)
        axis.set_xlabel("value / largest", fontsize=8)
        axis.tick_params(labelsize=8)
    for row in grid:
        row[0].set_ylabel(f"documents, {TITLES[ours].removeprefix('in-run, ')}\n(lines: the originals)", fontsize=8)
    last = axes[-1]
    for way in config.ways:
        means = [np.mean(_of(cells, way, level)) for level in LEVELS]
        mark = "o-" if run_of(way) in OURS else "D--"
        last.plot(means, range(len(LEVELS)), mark, ms=4, lw=1.2, color=COLOURS[way], label=TITLES[way].replace(", the paper's", ""))
    last.axvline((cells[0]["documents"] + 1) / 2, color="0.6", lw=0.8, ls=":")
    last.set_xscale("log")
    last.set_yticks(range(len(LEVELS)), [level.replace(" in an", "\nin an") for level in LEVELS], fontsize=8)
    last.invert_yaxis()
    last.set_title("mean rank of the original (dotted: chance)", fontsize=10)
    figure.legend(loc="outside lower center", fontsize=8, frameon=False, ncol=4, title="ranks, at the lower right")
    figure.savefig(path, dpi=100)
    plt.close(figure)

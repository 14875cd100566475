"""Which domains feed a skill, and when? The paper's figures of domain values over training.

A run is scored for several validation sets. The value of a use counts at the step that used the document; values are added up by
domain, over training. Shares are of the sum over domains with a positive total, as in the paper.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inrun.experiments.curation_tables import spread
from inrun.experiments.figures import DOMAIN_COLOURS, literal, pyplot
from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.text_runs import TITLES, Scoring, TextRun, cell_of, order, train
from inrun.experiments.texts import Corpus, CorpusConfig, read_corpus

Values = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StagesConfig:
    """What is tried."""

    corpus: CorpusConfig = field(default_factory=lambda: CorpusConfig(1200, 32, 1024, 8, 0))
    run: TextRun = field(default_factory=lambda: TextRun(steps=200, context=32))
    #: Domains of the validation sets; where a corpus has none of them, its first two useful ones.
    sets: tuple[str, ...] = ("latex_math", "math_word_problems", "dm_mathematics")
    #: The second is the paper's, to first order.
    ways: tuple[str, ...] = ("whole", "proxy_first")
    stages: int = 20


SIZES = {
    "smoke": StagesConfig(
        CorpusConfig(64, 16, 256, 2, 0), TextRun(steps=8, batch=8, warmup=2, context=16, width=16, heads=2), stages=4
    ),
    "quick": StagesConfig(CorpusConfig(1200, 32, 1024, 4, 0), TextRun(steps=100, context=32), ways=("whole",), stages=10),
    "full": StagesConfig(),
}


def run(config: StagesConfig, work: Work) -> Findings:
    """Score, and add up by domain and stage."""
    cells, source, jobs = [], "", [(seed, way) for seed in work.seeds for way in config.ways]
    for done, (seed, way) in enumerate(jobs):
        work.tell(f"{way}, seed {seed}", done, len(jobs))
        corpus = read_corpus(work, config.corpus, seed)
        source = corpus.source
        key = {"way": cell_of(way), "seed": seed, "config": config, "text": source}
        found = work.cell(key, functools.partial(_by_stage, config, corpus, way, seed))
        cells.append({"way": way, "seed": seed, **found})
    tables = [_shares_table(cells, way, name) for way in config.ways for name in cells[0]["sets"]]
    tables.append(_means_table(cells, config.ways[0]))
    notes = [
        f"Text: {source}. {config.corpus.documents} documents, a row of {config.corpus.context + 1} tokens each (vocabulary "
        f"{config.corpus.vocab}), {config.run.steps} AdamW steps of batch {config.run.batch} in {config.stages} stages; "
        f"{config.corpus.validation_rows} validation rows of each set at every step. Every domain has the same share of "
        "the documents.",
        "The paper: for a maths text the ArXiv domain has by far the largest share, well above its share of the data; "
        "shares change quickly at first and then settle; a general domain (Pile-CC) helps in the first iterations only; "
        "averages go to zero as training goes on.",
    ]
    return Findings({"cells": cells}, tables, notes, draw=lambda path: _draw(cells, path))


def _by_stage(config: StagesConfig, corpus: Corpus, way: str, seed: int) -> dict[str, Any]:
    """Return sums of values, and numbers of uses, ``[stages][domains]``, for every set."""
    names = [s for s in config.sets if s in corpus.domains] or corpus.useful[:2]
    rows = {name: corpus.validation.only({name}).tokens for name in names}
    batches = order(config.run, len(corpus.train), seed)
    uses = train(config.run, corpus.train.tokens, batches, corpus.vocab, seed, scoring=Scoring(way, rows)).uses
    domains = corpus.domains
    of = np.array([domains.index(d) for d in corpus.train.domains])
    sets = np.array(uses["validation"].to_pylist())
    stage = uses["step"].to_numpy() * config.stages // config.run.steps
    place = stage * len(domains) + of[uses["sample_id"].to_numpy()]
    shape, value = (config.stages, len(domains)), uses["value"].to_numpy()
    sums = {
        n: np.bincount(place[sets == n], value[sets == n], minlength=shape[0] * shape[1]).reshape(shape).tolist() for n in names
    }
    counts = np.bincount(place[sets == names[0]], minlength=shape[0] * shape[1]).reshape(shape).tolist()
    return {"domains": domains, "sets": names, "sums": sums, "uses": counts}


def shares(sums: Values) -> Values:
    """Return each domain's share of the positive totals up to each stage, ``[stages, domains]``."""
    total = np.cumsum(sums, axis=0).clip(min=0)
    return total / np.maximum(total.sum(1, keepdims=True), 1e-30)


def _mine(cells: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    return [c for c in cells if c["way"] == way]


def _shares_table(cells: list[dict[str, Any]], way: str, name: str) -> Table:
    mine = _mine(cells, way)
    found = np.array([shares(np.array(c["sums"][name])) for c in mine])  # [seeds, stages, domains]
    stages = found.shape[1]
    at = sorted({0, max(0, stages // 4 - 1), max(0, stages // 2 - 1), stages - 1})
    domains = mine[0]["domains"]
    best = np.argsort(-found[:, -1].mean(0), kind="stable")
    rows = [[domains[d], *(spread(100 * found[:, s, d], ".1f") + " %" for s in at)] for d in best[:6]]
    rest = [[f"other {len(best) - 6} domains", *(spread(100 * found[:, s][:, best[6:]].sum(1), ".1f") + " %" for s in at)]]
    return Table(
        f"{name}, {TITLES[way]}: share of the positive value up to a part of training",
        ["domain", *(f"{100 * (s + 1) / stages:.0f} %" for s in at)],
        rows + (rest if len(best) > 6 else []),
    )


def _means_table(cells: list[dict[str, Any]], way: str) -> Table:
    """Return mean values of a use by quarters of training: the matching domain, and all others."""
    mine = _mine(cells, way)
    rows: list[list[object]] = []
    for name in mine[0]["sets"]:
        for label, same in (("same domain", True), ("other domains", False)):
            per_seed = []
            for c in mine:
                chosen = [i for i, d in enumerate(c["domains"]) if (d == name) == same]
                sums, uses = np.array(c["sums"][name])[:, chosen].sum(1), np.array(c["uses"])[:, chosen].sum(1)
                quarters = [
                    s.sum() / max(1, u.sum()) for s, u in zip(np.array_split(sums, 4), np.array_split(uses, 4), strict=True)
                ]
                per_seed.append(1e6 * np.array(quarters))
            rows.append([name, label, *(spread([q[i] for q in per_seed], ".0f") for i in range(4))])
    return Table(
        f"{TITLES[way]}: mean value of a use (1e-6 nats) by quarter of training",
        ["validation set", "documents", "1st quarter", "2nd", "3rd", "4th"],
        rows,
    )


def _draw(cells: list[dict[str, Any]], path: Path) -> None:
    """Draw shares and mean values over training, for every set, in the first way that was run."""
    plt = pyplot()
    mine = _mine(cells, cells[0]["way"])
    names, domains = mine[0]["sets"], mine[0]["domains"]
    figure, axes = plt.subplots(2, len(names), figsize=(4.6 * len(names) + 1.8, 7), squeeze=False, layout="constrained")
    for column, name in enumerate(names):
        found = np.mean([shares(np.array(c["sums"][name])) for c in mine], axis=0)
        part = 100 * (np.arange(len(found)) + 1) / len(found)
        colours = [DOMAIN_COLOURS[i % len(DOMAIN_COLOURS)] for i in range(len(domains))]
        axes[0][column].stackplot(part, found.T, labels=[literal(d) for d in domains], colors=colours)
        axes[0][column].set_title(f"validation: {literal(name)}")
        axes[0][column].set(ylim=(0, 1), xlim=(part[0], 100), ylabel="share of positive value so far")
        means = np.mean([np.array(c["sums"][name]) / np.maximum(1, np.array(c["uses"])) for c in mine], axis=0)
        # The matching domain and the two next ones in colour; the rest, whose means are of a few uses, in grey.
        best = {*np.argsort(-means.sum(0), kind="stable")[:3].tolist(), domains.index(name)}
        for d, domain in enumerate(domains):
            style = {"color": colours[d] if d in best else "0.8", "lw": 2.4 if domain == name else 1.4 if d in best else 0.8}
            axes[1][column].plot(part, 1e3 * means[:, d], zorder=3 if d in best else 1, **style)
        others = np.delete(means, domains.index(name), axis=1)
        if others.size:
            label = f"mean of all but {literal(name)}"
            axes[1][column].plot(part, 1e3 * others.mean(1), "k--", lw=1.4, label=label, zorder=4)
            axes[1][column].legend(fontsize=8, frameon=False, loc="upper right")
        axes[1][column].axhline(0, color="0.6", lw=0.8, zorder=0)
        axes[1][column].set(xlabel="% of training", ylabel="mean value of a use (1e-3 nats)", xlim=(part[0], 100))
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, dpi=100)
    plt.close(figure)

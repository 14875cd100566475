"""Do the highest scores belong to the domain of the validation text? The paper's relevant domain detection.

For a few validation rows of each domain, documents are ranked by their scores. Counted is how many of the first k are of the same
domain, divided by what k documents drawn at random would have: 1 is chance, the number of domains is the most.

Runs of several lengths are asked: a method that looks at the final weights sees gradients of documents that are learned by heart by
then, where in-run scores add up what documents did while they were learned.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from inrun.experiments.curation_tables import COLOURS, spread
from inrun.experiments.figures import literal, pyplot
from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.text_runs import ITERATIVE, OURS, TITLES, TextRun, Values, cell_of, loss_on, order, run_of, scores_by, train
from inrun.experiments.texts import Corpus, CorpusConfig, read_corpus

#: The paper's normalised recall@1000, as (first order, second order, influence function, BM25).
PAPER: dict[str, tuple[float, float, float, float]] = {
    "code": (30.5, 29, 17.9, 18.8),
    "europarl": (12.7, 14.8, 4.1, 6.3),
    "latex_math": (48.4, 50, 41.7, 44.8),
    "freelaw": (14.6, 16.9, 5.7, 72.6),
    "stackexchange": (16.3, 20, 6.5, 37.2),
    "wikipedia": (14.5, 18.9, 5.5, 18.6),
    "pubmed": (10.4, 16.6, 10.2, 28.6),
    "uspto": (10.5, 11.1, 7.4, 23),
    "enron_emails": (0.8, 1, 0.2, 1),
    "dm_mathematics": (23.5, 24.5, 10.1, 34.6),
    "ubuntu_irc": (10.2, 11.5, 4.3, 12.5),
    "gutenberg": (8.7, 15.3, 8.8, 25.9),
}
WAYS = (
    "proxy_first",
    "proxy_specific",
    "whole",
    "specific",
    "own_step",
    "own_specific",
    "influence_function",
    "influence_specific",
    "influence_iterative",
    "gradient_product",
    "bm25",
)
#: Documents of the first steps: this share of them.
EARLY = 0.1
#: The cell of a plain run.
LOSSES = "losses"


@dataclass(frozen=True)
class Setting:
    """A run, and how its documents are ranked."""

    corpus: CorpusConfig = field(default_factory=lambda: CorpusConfig(600, 32, 1024, 8, 0))
    run: TextRun = field(default_factory=lambda: TextRun(steps=300, context=32))
    ways: tuple[str, ...] = WAYS
    #: Half of a domain's documents.
    k: int = 20
    #: Parts of every domain's validation rows that are scored by themselves, for the view ``specific``.
    folds: int = 8

    @property
    def epochs(self) -> float:
        """How often the run takes every document."""
        return self.run.steps * self.run.batch / self.corpus.documents

    def longer(self, times: int) -> Setting:
        """Return the same with so many times the steps."""
        return replace(self, run=replace(self.run, steps=times * self.run.steps))


@dataclass(frozen=True)
class DomainsConfig:
    """What is tried: settings, one after the other."""

    settings: tuple[Setting, ...] = (Setting(), Setting().longer(3))


_SMOKE = Setting(
    CorpusConfig(64, 16, 256, 2, 0),
    TextRun(steps=8, batch=8, warmup=2, context=16, width=16, heads=2),
    k=8,
    folds=2,
)
_QUICK = Setting(CorpusConfig(600, 32, 1024, 4, 0), TextRun(steps=75, context=32), folds=4)
SIZES = {
    "smoke": DomainsConfig((_SMOKE, replace(_SMOKE.longer(2), ways=("proxy_first", "influence_function")))),
    "quick": DomainsConfig((_QUICK,)),
    # Two hours of one core.
    "full": DomainsConfig(),
}


def recall(scores: Values, same: np.ndarray[Any, Any], k: int) -> float:
    """Return the share of the same domain among the k highest scores, divided by its share of all."""
    best = np.argsort(-scores, kind="stable")[:k]
    return float(same[best].mean() / same.mean())


def run(config: DomainsConfig, work: Work) -> Findings:
    """Score for every domain in every setting, and count."""
    jobs = [
        (setting, seed, main)
        for setting in config.settings
        for seed in work.seeds
        for main in (LOSSES, *dict.fromkeys(run_of(way) for way in setting.ways))
    ]
    cells, losses, source = [], [], ""
    for done, (setting, seed, main) in enumerate(jobs):
        at = {"steps": setting.run.steps, "seed": seed}
        work.tell(f"{main}, {setting.run.steps} steps, seed {seed}", done, len(jobs))
        corpus = read_corpus(work, setting.corpus, seed)
        source = corpus.source
        key = {"run": cell_of(main), "seed": seed, "config": replace(setting, ways=()), "text": source}
        found = work.cell(key, functools.partial(_losses if main == LOSSES else _counted, setting, corpus, main, seed))
        if main == LOSSES:
            losses.append({**at, **found})
        else:
            cells += [{**at, "way": way, **found[way]} for way in setting.ways if way in found]
    lengths = [_Length(setting, [c for c in cells if c["steps"] == setting.run.steps]) for setting in config.settings]
    tables = [table for length in lengths for table in (_table(length), _wins_table(length))]
    tables += [_losses_table(lengths, losses), _early_table(lengths)]
    data = {"cells": cells, "losses": losses}
    return Findings(data, tables, _notes(lengths, source), draw=lambda path: _draw(lengths, path))


@dataclass(frozen=True)
class _Length:
    """A setting with what was found in it."""

    setting: Setting
    cells: list[dict[str, Any]]

    @property
    def title(self) -> str:
        """What tables call it."""
        return f"{self.setting.run.steps} steps ({self.setting.epochs:.3g} epochs)"

    @property
    def domains(self) -> list[str]:
        return sorted(self.cells[0]["recall"])

    @functools.cached_property
    def recalls(self) -> dict[str, dict[str, list[float]]]:
        """Recalls over seeds, by way and domain."""
        return {way: {d: [c["recall"][d] for c in self._of(way)] for d in self.domains} for way in self.setting.ways}

    @property
    def early(self) -> dict[str, list[float]]:
        """How many of the best are documents of the first steps, over seeds, by way."""
        return {way: [c["early"] for c in self._of(way)] for way in self.setting.ways}

    def _of(self, way: str) -> list[dict[str, Any]]:
        return [c for c in self.cells if c["way"] == way]


def _notes(lengths: list[_Length], source: str) -> list[str]:
    setting, domains = lengths[0].setting, lengths[0].domains
    steps = " or ".join(str(length.setting.run.steps) for length in lengths)
    return [
        f"Text: {source}. {setting.corpus.documents} documents of {len(domains)} domains, a row of {setting.corpus.context + 1} "
        f"tokens each (vocabulary {setting.corpus.vocab}), {steps} AdamW steps of batch {setting.run.batch}, "
        f"{setting.corpus.validation_rows} validation rows of each domain; k = {setting.k}. BM25 reads the same rows as text.",
        "Adam's own step is the part of whole credit that a use earns in its own step. Specific: less what the scores of the same "
        "use for the other domains predict (the ledger's view of that name, by ridge regression; every domain in "
        f"{setting.folds} folds). By linearity these are values for the loss of the domain less a weighted sum of the others. "
        "The influence function gets the same treatment, row by row.",
        "Influence function: inverse of the Fisher matrix in an eigenbasis of Kronecker factors, damped; or the Hessian of the "
        f"training loss, damped by {ITERATIVE['damping']:g}, solved by {ITERATIVE['iterations']} steps of conjugate gradients; "
        "without curvature it is the product of a document's gradient with the validation gradient at the final weights. The paper "
        "cites Koh & Liang (2017), whose way is the second, and does not say which it took.",
        "The paper: GPT-2 on the Pile, k = 1000; its domains differ in size, so that its numbers go beyond ours.",
    ]


def _losses(setting: Setting, corpus: Corpus, main: str, seed: int) -> dict[str, float]:
    """Return the mean loss per token of the documents and of the validation rows at the end."""
    batches = order(setting.run, len(corpus.train), seed)
    model = train(setting.run, corpus.train.tokens, batches, corpus.vocab, seed).model
    return {"train": loss_on(model, corpus.train.tokens), "validation": loss_on(model, corpus.validation.tokens)}


def _counted(config: Setting, corpus: Corpus, main: str, seed: int) -> dict[str, Any]:
    """Return recalls by domain, and how many of the best are documents of the first steps, for all ways of one run."""
    validation = {d: corpus.validation.only({d}) for d in corpus.domains}
    batches = order(config.run, len(corpus.train), seed)
    found = scores_by(main, config.run, corpus.train, batches, corpus.vocab, seed, validation, folds=config.folds)
    of = np.array(corpus.train.domains)
    first = np.zeros(len(of), bool)
    first[batches.ravel()[: round(EARLY * len(of))]] = True
    return {
        way: {
            "recall": {d: recall(scores[d], of == d, config.k) for d in corpus.domains},
            "early": float(np.mean([recall(scores[d], first, config.k) for d in corpus.domains])),
        }
        for way, scores in found.items()
    }


def _table(length: _Length) -> Table:
    setting, means, domains = length.setting, length.recalls, length.domains
    rows: list[list[object]] = []
    for d in domains:
        paper = PAPER.get(d)
        shown = None if paper is None else " / ".join(f"{x:g}" for x in paper)
        rows.append([d, *(spread(means[way][d], ".1f") for way in setting.ways), shown])
    rows.append(["mean", *(f"{np.mean([np.mean(means[way][d]) for d in domains]):.2f}" for way in setting.ways), None])
    return Table(
        f"Normalised recall@{setting.k} of same-domain documents after {length.title} (1 = chance, {len(domains)} = all)",
        ["domain", *(TITLES[way] for way in setting.ways), "paper: first / second / influence function / BM25 (recall@1000)"],
        rows,
        "Mean ± standard deviation over seeds.",
    )


def _wins_table(length: _Length) -> Table:
    """Return in how many domains one of our ways is above a baseline."""
    means, domains = length.recalls, length.domains
    rows: list[list[object]] = []
    ours = [w for w in means if run_of(w) in OURS]
    theirs = [w for w in means if w not in ours]
    for way in ours:
        row: list[object] = [TITLES[way]]
        for other in theirs:
            above = sum(np.mean(means[way][d]) > np.mean(means[other][d]) for d in domains)
            even = sum(np.mean(means[way][d]) == np.mean(means[other][d]) for d in domains)
            row.append(f"{above} of {len(domains)}" + (f", {even} even" if even else ""))
        rows.append(row)
    return Table(f"Domains in which the mean is higher, after {length.title}", ["", *(f"than {TITLES[w]}" for w in theirs)], rows)


def _losses_table(lengths: list[_Length], losses: list[dict[str, Any]]) -> Table:
    def over_seeds(length: _Length, of: str) -> str:
        return spread([x[of] for x in losses if x["steps"] == length.setting.run.steps], ".2f")

    rows: list[list[object]] = [[length.title, over_seeds(length, "train"), over_seeds(length, "validation")] for length in lengths]
    return Table(
        "Losses at the end",
        ["run", "of the documents", "of the validation rows"],
        rows,
        "Nats per token, mean ± standard deviation over seeds: how far documents are learned by heart.",
    )


def _early_table(lengths: list[_Length]) -> Table:
    ways = list(dict.fromkeys(way for length in lengths for way in length.setting.ways))
    rows = [
        [TITLES[way], *(spread(length.early[way], ".2f") if way in length.early else None for length in lengths)] for way in ways
    ]
    return Table(
        f"Documents of the first steps among the k best (1 = chance, {1 / EARLY:g} = all)",
        ["recall of the first tenth of the documents that training takes", *(length.title for length in lengths)],
        rows,
        "Mean over domains. A bias towards the first steps, in which any text is worth much, would show here.",
    )


def _draw(lengths: list[_Length], path: Path) -> None:
    """Draw a panel per length: a row per domain, easiest first, a mark per way, and the standard deviation over seeds as a line."""
    plt = pyplot()
    means, domains = lengths[0].recalls, lengths[0].domains
    ordered = sorted(domains, key=lambda d: np.mean([np.mean(found[d]) for found in means.values()]))
    size = 5 * len(lengths) + 2, (0.06 * len(means) + 0.04) * len(domains) + 2.2
    figure, axes = plt.subplots(1, len(lengths), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=True):
        _draw_length(axis, length, ordered)
    axes[0, 0].set_yticks(range(len(ordered)), [literal(d) for d in ordered], fontsize=9)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", fontsize=8, frameon=False, ncol=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_length(axis: Any, length: _Length, ordered: list[str]) -> None:
    for i, (way, found) in enumerate(length.recalls.items()):
        places = np.arange(len(ordered)) - 0.7 * ((i + 0.5) / len(length.recalls) - 0.5)
        errors = [np.std(found[d], ddof=1) if len(found[d]) > 1 else 0.0 for d in ordered]
        mark = "o" if run_of(way) in OURS else "D"
        style = {"color": COLOURS[way], "fmt": mark, "ms": 5, "elinewidth": 0.8, "label": TITLES[way]}
        axis.errorbar([np.mean(found[d]) for d in ordered], places, xerr=errors, **style)
    for line in np.arange(len(ordered) - 1) + 0.5:
        axis.axhline(line, color="0.92", lw=0.8, zorder=0)
    axis.axvline(1, color="0.5", lw=0.8, ls="--")
    axis.set_title(length.title, fontsize=10)
    axis.set(xlabel="normalised recall@k (dashed: chance; circles: in-run)", xlim=(-0.3, None), ylim=(-0.5, len(ordered) - 0.5))

"""Do scores of groups tell what leaving them out does? They are left out, the model is trained again, and correlated.

Leaving out means that the loss of the group's documents weighs 0: same first weights, same batches, same normaliser. The effect of
a group is the final validation loss without it less the loss with it: positive where the group helped, as scores are. Beside single
groups, random halves of all documents are left out: the rank correlation of the sum of scores of what is kept with what the model
then reaches is the field's linear datamodeling score. Last, single documents are left out: how far the loss moves when hardly
anything is changed is the noise that no score can explain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from inrun.experiments.curation_tables import COLOURS, spread
from inrun.experiments.figures import pyplot
from inrun.experiments.recipes import Findings, Table, Work
from inrun.experiments.text_runs import TITLES, TextRun, Values, cell_of, loss_on, order, scores_by, train
from inrun.experiments.texts import Corpus, CorpusConfig, Rows, read_corpus
from inrun.statistics import pearson, spearman

#: What titles of panels do without.
PAPERS = ", the paper's"
OURS = ("proxy_first", "proxy_second", "step", "whole")
WAYS = (*OURS, "influence_function", "trak", "less", "tracin_cp", "gradient_cosine", "bm25", "random")


@dataclass(frozen=True)
class GroupsConfig:
    """What is tried."""

    corpus: CorpusConfig = field(default_factory=lambda: CorpusConfig(600, 64, 256, 8, 0))
    run: TextRun = field(default_factory=lambda: TextRun(steps=100, lr=1e-3))
    ways: tuple[str, ...] = WAYS
    #: Domains of the validation sets, beside all useful ones together; where a corpus has none of them, its first two useful ones.
    sets: tuple[str, ...] = ("code", "latex_math", "wikipedia")
    #: Parts of every domain, each a group.
    parts: int = 2
    #: Random halves for the linear datamodeling score.
    halves: int = 24
    #: Single documents, for the noise.
    singles: int = 4
    #: Of the random projections of TRAK and LESS.
    dimension: int = 2048


SIZES = {
    "smoke": GroupsConfig(
        CorpusConfig(64, 16, 256, 4, 0),
        TextRun(steps=6, batch=8, warmup=2, context=16, width=16, heads=2),
        halves=3,
        singles=1,
        dimension=64,
    ),
    "quick": GroupsConfig(
        run=TextRun(steps=50, lr=1e-3), ways=("proxy_first", "step", "whole", "influence_function"), halves=8, singles=2
    ),
    "full": GroupsConfig(),
}


def run(config: GroupsConfig, work: Work) -> Findings:
    """Score, leave out, train again, and correlate."""
    cells, source = [], ""
    for done, seed in enumerate(work.seeds):
        corpus = read_corpus(work, config.corpus, seed)
        source = corpus.source
        cells.append(_Seed(config, corpus, seed, work).all(done))
    noise = {n: float(np.sqrt(np.mean([np.square(c["singles"][n]) for c in cells]))) for n in cells[0]["singles"]}
    tables = [_table(config, cells, "spearman", "Spearman"), _table(config, cells, "pearson", "Pearson")]
    tables += [_table(config, cells, "lds", "Linear datamodeling score (Spearman)"), _noise_table(cells, noise)]
    groups = len(cells[0]["groups"])
    notes = [
        f"Text: {source}. {config.corpus.documents} documents, a row of {config.corpus.context + 1} bytes each, {groups} groups "
        f"(parts of domains), {config.run.steps} AdamW steps of batch {config.run.batch}, lr {config.run.lr:g}; "
        f"{config.halves} random halves.",
        "Scores of a group are sums over its documents. TRAK, LESS and TracIn-CP have 5 checkpoints of the one run, TRAK and LESS "
        f"{config.dimension} dimensions.",
        "The paper has no such comparison.",
    ]
    return Findings({"cells": cells, "noise": noise}, tables, notes, draw=lambda path: _draw(config, cells, path))


class _Seed:
    """Everything with one seed."""

    def __init__(self, config: GroupsConfig, corpus: Corpus, seed: int, work: Work) -> None:
        self.config, self.corpus, self.seed, self.work = config, corpus, seed, work
        names = [s for s in config.sets if s in corpus.domains] or corpus.useful[:2]
        self.validation: dict[str, Rows] = {name: corpus.validation.only({name}) for name in names}
        self.validation[_unlike("all useful", names)] = corpus.validation.only(corpus.useful, 2 * config.corpus.validation_rows)
        self.batches = order(config.run, len(corpus.train), seed)
        counts: dict[str, int] = {}
        each = max(1, -(-len(corpus.train) // len(corpus.domains) // config.parts))
        self.group: list[str] = []
        for domain in corpus.train.domains:
            self.group.append(f"{domain} {counts.get(domain, 0) // each + 1}")
            counts[domain] = counts.get(domain, 0) + 1

    def _kept(self, part: str, compute: Any) -> Any:
        about = {k: v for k, v in vars(self.config).items() if k not in ("ways", "halves", "singles", "parts")}
        return self.work.cell({"part": part, "seed": self.seed, "about": about, "text": self.corpus.source}, compute)

    def _without(self, left_out: np.ndarray[Any, Any]) -> dict[str, float]:
        """Return the final losses of a run in which some documents weigh 0."""
        weights = 1.0 - left_out.astype(float)
        model = train(self.config.run, self.corpus.train.tokens, self.batches, self.corpus.vocab, self.seed, weights=weights).model
        return {name: loss_on(model, rows.tokens) for name, rows in self.validation.items()}

    def _scores(self, way: str) -> dict[str, list[float]]:
        c = self.corpus
        found = scores_by(
            way, self.config.run, c.train, self.batches, c.vocab, self.seed, self.validation, dimension=self.config.dimension
        )
        return {name: values.tolist() for name, values in found[way].items()}

    def all(self, done: int) -> dict[str, Any]:
        """Return scores of groups, effects of leaving them out, and correlations."""
        n, members = len(self.corpus.train), np.array(self.group)
        names = list(dict.fromkeys(self.group))
        draw = np.random.default_rng([self.seed, 5])
        halves = [draw.permutation(n) < n // 2 for _ in range(self.config.halves)]
        singles = draw.choice(n, self.config.singles, replace=False).tolist()
        total = len(self.work.seeds)
        self.work.tell(f"scores, seed {self.seed}", done, total)
        scores = {way: self._kept(f"scores {cell_of(way)}", lambda way=way: self._scores(way)) for way in self.config.ways}
        self.work.tell(f"leaving out, seed {self.seed}", done, total)
        whole = self._kept("whole", lambda: self._without(np.zeros(n, bool)))
        parts = self.config.parts
        effects = [self._kept(f"without {g} of {parts}", lambda g=g: self._without(members == g)) for g in names]
        kept = [self._kept(f"half {i}", lambda out=out: self._without(out)) for i, out in enumerate(halves)]
        moved = [self._kept(f"without document {i}", lambda i=i: self._without(np.arange(n) == i)) for i in singles]
        found: dict[str, Any] = {
            "seed": self.seed,
            "groups": names,
            "final": whole,
            "effects": {v: [e[v] - whole[v] for e in effects] for v in whole},
            "singles": {v: [m[v] - whole[v] for m in moved] for v in whole},
            "ways": {},
        }
        reached = {v: [-k[v] for k in kept] for v in whole}
        for way, by_set in scores.items():
            sums = {v: _sums(np.array(by_set[v]), members, names) for v in whole}
            predicted = {v: [float(np.array(by_set[v])[~out].sum()) for out in halves] for v in whole}
            found["ways"][way] = {
                "sums": sums,
                "pearson": {v: pearson(sums[v], found["effects"][v]) for v in whole},
                "spearman": {v: spearman(sums[v], found["effects"][v]) for v in whole},
                "lds": {v: spearman(predicted[v], reached[v]) for v in whole},
            }
        return found


def _unlike(name: str, others: list[str]) -> str:
    """Return a name that none of the others is."""
    return name if name not in others else _unlike(f"{name} domains", others)


def _sums(scores: Values, members: np.ndarray[Any, Any], names: list[str]) -> list[float]:
    return [float(scores[members == g].sum()) for g in names]


def _table(config: GroupsConfig, cells: list[dict[str, Any]], which: str, words: str) -> Table:
    sets = list(cells[0]["final"])
    rows: list[list[object]] = []
    for way in config.ways:
        found = {v: [c["ways"][way][which][v] for c in cells] for v in sets}
        over = [float(np.mean([found[v][i] for v in sets])) for i in range(len(cells))]
        rows.append([TITLES[way], *(spread(found[v], ".2f") for v in sets), spread(over, ".2f")])
    title = words if which == "lds" else f"{words} of group scores with the effect of leaving the group out"
    return Table(title, ["scores by", *sets, "mean over sets"], rows, "Mean ± standard deviation over seeds.")


def _noise_table(cells: list[dict[str, Any]], noise: dict[str, float]) -> Table:
    rows: list[list[object]] = []
    for v in noise:
        effects = np.concatenate([np.array(c["effects"][v]) for c in cells])
        rows.append(
            [v, spread([c["final"][v] for c in cells]), f"{effects.mean():+.4f}", f"{effects.std():.4f}", f"{noise[v]:.4f}"]
        )
    columns = ["validation set", "final loss", "effects, mean", "effects, spread", "one document left out (r.m.s.)"]
    return Table("What leaving out does (nats)", columns, rows)


def _draw(config: GroupsConfig, cells: list[dict[str, Any]], path: Path) -> None:
    """Draw scores of groups against effects, each standardised by set and seed: a panel per way."""
    plt = pyplot()
    columns = min(4, len(config.ways))
    lines = -(-len(config.ways) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.3 * columns, 3.3 * lines), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for axis in axes.flat[len(config.ways) :]:
        axis.axis("off")
    for axis, way in zip(axes.flat, config.ways, strict=False):
        for c in cells:
            for v in c["final"]:
                x, y = _standard(c["effects"][v]), _standard(c["ways"][way]["sums"][v])
                axis.plot(x, y, "o", ms=2.5, alpha=0.5, mew=0, color=COLOURS[way])
        axis.axline((0, 0), slope=1, color="0.75", lw=0.8, zorder=0)
        ranks = np.array([c["ways"][way]["spearman"][v] for c in cells for v in c["final"]])
        mean = spread([ranks[np.isfinite(ranks)].mean() if np.isfinite(ranks).any() else np.nan], ".2f")
        axis.set(xlim=(-4, 4), ylim=(-4, 4))
        axis.set_title(f"{TITLES[way].replace(PAPERS, '')}\nSpearman {mean}", fontsize=9)
    figure.supxlabel("effect of leaving the group out on the validation loss (standardised by set and seed)", fontsize=10)
    figure.supylabel("score of the group (standardised)", fontsize=10)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _standard(values: list[float]) -> Values:
    x = np.array(values, float)
    return np.asarray((x - x.mean()) / (x.std() or 1.0))

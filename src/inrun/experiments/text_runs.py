"""Training one small language model on chosen rows in a chosen order, scored or not: what the experiments on text share.

run = TextRun(steps=500)
original = train(run, corpus.train.tokens, order(run, len(corpus.train), seed=0), corpus.vocab, seed=0)
scored = train(..., scoring=Scoring("whole", {"all": rows}))
scored.scores["all"]                     # [n]; 0 for documents that were never used
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor, nn

import inrun
from inrun.baselines import registry
from inrun.errors import ConfigurationError
from inrun.experiments.texts import Rows as TextRows
from inrun.ledger.labels import Label, by_set, set_of
from inrun.ledger.specific import Rows, common_part, moments, specific
from inrun.training.config import Model
from inrun.training.loss import next_token_loss, row_losses, token_losses
from inrun.training.models import build_model, decay_groups

Values = npt.NDArray[np.float64]
Batches = npt.NDArray[np.int64]
#: Our ways to score a run: options of the accountant by name. Models are small enough to keep gradients as they are.
OURS: dict[str, dict[str, Any]] = {
    "proxy_first": {"method": "first"},
    "proxy_second": {"method": "second"},
    "step": {"method": "step"},
    "whole": {"method": "whole", "sketch": "exact"},
}
#: What the run of a way gives besides, at hardly any cost: values against their batch, and the product of gradients at the end.
BESIDE = {"proxy_first": "proxy_by_step", "whole": "by_step", "influence_function": "gradient_product"}
#: With folds it gives more: values less what those for the other sets predict, and with whole credit the part of the step itself.
IN_FOLDS: dict[str, tuple[str, ...]] = {
    "proxy_first": ("proxy_specific",),
    "whole": ("own_step", "specific", "own_specific"),
    "influence_function": ("influence_specific",),
}
#: Baselines that look at the final weights alone; others get checkpoints spread over the run.
AT_THE_END = ("influence_function", "influence_iterative", "gradient_cosine", "loss_at_end")
#: Koh & Liang's way: conjugate gradients on the Hessian. Of four dampings (0.1 to 10), the one that did best on another seed.
ITERATIVE = {"curvature": "hessian", "damping": 0.3, "iterations": 15}
CHECKPOINTS = 5
#: Of AdamW.
BETAS = (0.9, 0.95)
#: What tables call them.
TITLES = {
    "proxy_first": "in-run, first order (SGD proxy, the paper's)",
    "proxy_second": "in-run, second order (SGD proxy, the paper's)",
    "step": "in-run, the step's own share",
    "whole": "in-run, whole credit",
    "significant": "in-run, whole credit, significance rule",
    "proxy_by_step": "in-run, first order (SGD proxy) against its batch",
    "by_step": "in-run, whole credit against its batch",
    "own_step": "in-run, Adam's own step",
    "proxy_specific": "in-run, first order (SGD proxy), specific",
    "specific": "in-run, whole credit, specific",
    "own_specific": "in-run, Adam's own step, specific",
    "influence_function": "influence function",
    "gradient_product": "influence function without curvature",
    "influence_specific": "influence function, specific",
    "influence_iterative": "influence function, damped Hessian",
    "tracin_cp": "TracIn-CP",
    "less": "LESS",
    "gradient_cosine": "gradient cosine at the end",
    "trak": "TRAK",
    "bm25": "BM25",
    "random": "random",
}


@dataclass(frozen=True)
class TextRun:
    """Model and training: AdamW, linear warm-up, a cosine to a tenth, clipping by norm."""

    steps: int = 500
    batch: int = 16
    lr: float = 2e-3
    warmup: int = 20
    model: str = "gpt"
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def build(self, vocab: int, seed: int) -> nn.Module:
        """Make the model with weights drawn by the seed."""
        torch.manual_seed(seed)
        options = {"intermediate_size": 4 * self.width} if self.model == "gpt_neox" else {}
        tied = True if self.model == "gpt" else None
        shape = Model(self.model, None, False, self.context, self.width, self.layers, self.heads, 0.0, tied, options)
        return build_model(shape, vocab)


@dataclass(frozen=True)
class Scoring:
    """How a run is scored, and for which validation rows.

    Attributes:
        way: One of ``OURS``.
        rows: Validation rows by name, ``[m, context + 1]`` each.
        per_step: Rows of a set that a step looks at, in turn; 0 takes all at every step.
        folds: Parts that a set is scored in, for standard errors; 0 for none.
    """

    way: str
    rows: Mapping[str, Tensor]
    per_step: int = 0
    folds: int = 0

    def losses(self) -> dict[str, Any]:
        """Return what the accountant is to measure."""
        return {name: self._loss(rows) for name, rows in self.rows.items()}

    def _loss(self, rows: Tensor) -> Any:
        measure = row_losses if self.folds else next_token_loss
        turns = max(1, len(rows) // self.per_step) if self.per_step else 1
        parts = [rows[turn::turns] for turn in range(turns)]
        if turns == 1:
            return inrun.folds(lambda model: measure(model, rows), self.folds) if self.folds else lambda model: measure(model, rows)

        def loss(model: nn.Module, step: int) -> Tensor:
            return measure(model, parts[step % turns])

        return inrun.folds(loss, self.folds) if self.folds else loss


@dataclass
class Trained:
    """What a run leaves: the model, and with scoring the documents' scores, ``[n]`` by set, and single uses."""

    model: nn.Module
    scores: dict[str, Values] = field(default_factory=dict)
    standard_errors: dict[str, Values] = field(default_factory=dict)
    estimate_errors: dict[str, Values] = field(default_factory=dict)
    #: Columns step, sample_id, validation, value, pending.
    uses: Any = None
    #: The same with each step's own part: contributions, where uses have credits.
    own: Any = None
    checkpoints: list[dict[str, Tensor]] = field(default_factory=list)
    #: Of the checkpoints: the number of steps done, the rate of the last one, and Adam's second moments.
    steps: list[int] = field(default_factory=list)
    lrs: list[float] = field(default_factory=list)
    second_moments: list[dict[str, Tensor]] = field(default_factory=list)

    def looked_back(self, way: str) -> dict[str, Any]:
        """Return what a baseline that looks at checkpoints wants to know of them."""
        found: dict[str, Any] = {"checkpoints": self.checkpoints}
        if way in ("tracin_cp", "less"):
            found["lrs"] = self.lrs
        if way == "less":
            found |= {"second_moments": self.second_moments, "steps": self.steps, "betas": BETAS}
        return found


def order(run: TextRun, documents: int, seed: int, keep: npt.NDArray[np.bool_] | None = None) -> Batches:
    """Return the documents of every step, ``[steps, batch]``: epochs of permutations, without those that are not kept.

    The permutations are those of all documents, so that a run on fewer sees them in the same order, only sooner.
    """
    draw = np.random.default_rng([seed, 2])
    wanted = run.steps * run.batch
    kept = np.ones(documents, bool) if keep is None else keep
    if not kept.any():
        raise ConfigurationError("no document is kept, so there is nothing to train on: take more documents or steps")
    found: list[npt.NDArray[np.int64]] = []
    while sum(map(len, found)) < wanted:
        epoch = draw.permutation(documents)
        found.append(epoch[kept[epoch]])
    return np.concatenate(found)[:wanted].reshape(run.steps, run.batch)


def train(
    run: TextRun,
    tokens: Tensor,
    batches: Batches,
    vocab: int,
    seed: int,
    *,
    weights: Values | None = None,
    scoring: Scoring | None = None,
    checkpoints: Sequence[int] = (),
    watch: Callable[[int, nn.Module], None] | None = None,
) -> Trained:
    """Train once.

    Args:
        run: Model and training.
        tokens: Rows of all documents, ``[n, context + 1]``.
        batches: Which of them each step takes.
        vocab: Of the model.
        seed: Of the first weights.
        weights: Of every document's loss, ``[n]``: 0 leaves it out, with the batch's normaliser as it was.
        scoring: How the run is scored; None for not at all.
        checkpoints: After how many steps the weights are kept.
        watch: Called with the number of steps done and the model, before the first step and after each.
    """
    model = run.build(vocab, seed)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=run.lr, betas=BETAS)
    found = Trained(model)
    with _accountant(model, optimizer, scoring) as accountant:
        for t, batch in enumerate(batches):
            if watch is not None:
                watch(t, model)
            for group in optimizer.param_groups:
                group["lr"] = run.rate(t)
            rows = tokens[torch.from_numpy(batch)]
            with contextlib.nullcontext() if accountant is None else accountant.step(batch):
                _loss(model, rows, None if weights is None else torch.from_numpy(weights[batch])).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if t + 1 in checkpoints:
                found.checkpoints.append({name: w.detach().clone() for name, w in model.state_dict().items()})
                found.steps.append(t + 1)
                found.lrs.append(run.rate(t))
                squares = {name: optimizer.state[w]["exp_avg_sq"].clone() for name, w in model.named_parameters()}
                found.second_moments.append(squares)
    if watch is not None:
        watch(len(batches), model)
    if accountant is not None:
        _read(accountant, len(tokens), found)
    return found


def _loss(model: nn.Module, rows: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return next_token_loss(model, rows)
    losses, counts = token_losses(model, rows)
    return (losses * weights.to(losses)).sum() / counts.sum()


@contextlib.contextmanager
def _accountant(model: nn.Module, optimizer: torch.optim.Optimizer, scoring: Scoring | None) -> Iterator[inrun.Accountant | None]:
    if scoring is None:
        yield None
        return
    log = logging.getLogger("inrun")
    level = log.level
    log.setLevel(logging.WARNING)  # what is kept is said once a run; here there are hundreds
    accountant = inrun.Accountant(model, optimizer, scoring.losses(), audit_every=0, **OURS[scoring.way])
    try:
        yield accountant
    finally:
        accountant.close()
        log.setLevel(level)


def _read(accountant: inrun.Accountant, documents: int, found: Trained) -> None:
    table = accountant.scores()
    names, ids = np.array(table["validation"].to_pylist()), table["sample_id"].to_numpy()
    columns = {"score": found.scores, "standard_error": found.standard_errors, "estimate_error": found.estimate_errors}
    for column, into in columns.items():
        values = table[column].to_numpy(zero_copy_only=False).astype(np.float64)
        for name in dict.fromkeys(names.tolist()):
            into[name] = np.full(documents, 0.0 if column == "score" else np.nan)
            into[name][ids[names == name]] = values[names == name]
    found.uses = accountant.ledger.uses()  # type: ignore[attr-defined]
    own = accountant.ledger.contributions()  # type: ignore[attr-defined]
    found.own = own.rename_columns(["value" if name == "contribution" else name for name in own.column_names])


@torch.no_grad()
def loss_on(model: nn.Module, rows: Tensor) -> float:
    """Return the mean loss per token of rows."""
    return float(next_token_loss(model, rows))


def against_batch(uses: Any, documents: int) -> Values:
    """Return the mean over a document's uses of its value less the batch's mean, in standard deviations of the batch, ``[n]``.

    Early steps are worth far more than late ones, to whoever is in them; against its own batch, a document is judged alone.
    """
    step, ids, value = (uses[name].to_numpy() for name in ("step", "sample_id", "value"))
    places, use = np.unique(np.stack([step, ids]), axis=1, return_inverse=True)
    value = np.bincount(use.ravel(), value)  # folds of one use, and a document that is twice in a batch
    step, ids = places
    count = np.bincount(step)
    mean = np.bincount(step, value) / np.maximum(count, 1)
    spread = np.sqrt(np.bincount(step, (value - mean[step]) ** 2) / np.maximum(count, 1))
    standard = (value - mean[step]) / np.maximum(spread[step], 1e-30)
    return np.bincount(ids, standard, documents) / np.maximum(np.bincount(ids, minlength=documents), 1)


def specific_scores(uses: Any, documents: int) -> dict[str, Values]:
    """Return the scores of the view ``specific`` of uses in folds, ``[n]`` by set; see :mod:`inrun.ledger.specific`."""
    labels = by_set(dict.fromkeys(uses["validation"].to_pylist()))
    names = [label for own in labels.values() for label in own]
    at = {label: j for j, label in enumerate(names)}
    sets = [[at[label] for label in own] for own in labels.values()]
    of = np.array([at[label] for label in uses["validation"].to_pylist()])
    rows = Rows(uses["step"].to_numpy(), uses["sample_id"].to_numpy(), of, uses["value"].to_numpy().astype(np.float64))
    values = specific(rows, sets, common_part(moments(rows.matrix(len(names))[0]), sets))
    added = {j: np.bincount(rows.sample_id[of == j], values[of == j], documents) for j in at.values()}
    return {name: np.mean([added[j] for j in own], axis=0) for name, own in zip(labels, sets, strict=True)}


def _in_sets(uses: Any, documents: int) -> dict[str, Values]:
    """Return the sums of uses, ``[n]`` by set: the mean over its folds."""
    labels, ids, values = np.array(uses["validation"].to_pylist()), uses["sample_id"].to_numpy(), uses["value"].to_numpy()
    sums = {x: np.bincount(ids[labels == x], values[labels == x], documents) for x in dict.fromkeys(labels.tolist())}
    return {name: np.mean([sums[x] for x in own], axis=0) for name, own in by_set(sums).items()}


def run_of(way: str) -> str:
    """Return the way whose run gives this one besides; itself where it has its own."""
    others = {main: (other, *IN_FOLDS.get(main, ())) for main, other in BESIDE.items()}
    return next((main for main, given in others.items() if way in given), way)


def cell_of(way: str) -> str:
    """Return what kept cells of a way are called: those of whole credit by sketches, as it was once scored, are others."""
    return f"{way}, exact" if way == "whole" else way


def scores_by(
    way: str,
    run: TextRun,
    rows: TextRows,
    batches: Batches,
    vocab: int,
    seed: int,
    validation: Mapping[str, TextRows],
    per_step: int = 0,
    folds: int = 0,
    dimension: int = 2048,
) -> dict[str, dict[str, Values]]:
    """Score documents in one of our ways or by a baseline; ``[n]`` by way and validation set: the way and what is ``BESIDE`` it.

    With folds also what is ``IN_FOLDS``; of a baseline the folds are single rows.

    Args:
        way: One of ``OURS``, or a baseline that takes gradients or texts.
        run: Model and training.
        rows: The documents.
        batches: Which of them each step takes.
        vocab: Of the model.
        seed: Of the first weights.
        validation: Rows by name.
        per_step: Rows of a set that a step looks at, for our ways; 0 for all.
        folds: Parts that sets are scored in.
        dimension: Of the random projections of TRAK and LESS.
    """
    held = {name: some.tokens for name, some in validation.items()}
    if way in OURS:
        scoring = Scoring(way, held, per_step, folds)
        return _with_others_of_the_step(way, train(run, rows.tokens, batches, vocab, seed, scoring=scoring), held, folds)
    if way == "bm25":
        texts = {name: list(some.texts) for name, some in validation.items()}
        return {way: _by_set(registry.run(way, np.arange(len(rows)), texts, texts=list(rows.texts)))}
    if way == "random":
        return {way: _by_set(registry.run(way, np.arange(len(rows)), held, seed=seed))}
    if way not in AT_THE_END:
        spread = [round(run.steps * (i + 1) / CHECKPOINTS) for i in range(CHECKPOINTS)]
        trained = train(run, rows.tokens, batches, vocab, seed, checkpoints=spread)
        projected = {"dimension": dimension} if way in ("trak", "less") else {}
        return {way: baseline(way, rows.tokens, held, trained.model, **trained.looked_back(way), **projected)}
    model = train(run, rows.tokens, batches, vocab, seed).model
    found = {way: baseline(way, rows.tokens, held, model)}
    if way in BESIDE:
        found[BESIDE[way]] = baseline(BESIDE[way], rows.tokens, held, model)
    if folds and way == "influence_function":
        found["influence_specific"] = _by_rows(way, rows.tokens, held, model)
    return found


def _with_others_of_the_step(way: str, trained: Trained, held: Mapping[str, Tensor], folds: int) -> dict[str, dict[str, Values]]:
    found, n = {way: trained.scores}, len(next(iter(trained.scores.values())))
    if way in BESIDE:
        names = np.array([set_of(label) for label in trained.uses["validation"].to_pylist()])
        found[BESIDE[way]] = {name: against_batch(trained.uses.filter(names == name), n) for name in held}
    if folds and way == "proxy_first":
        found["proxy_specific"] = specific_scores(trained.uses, n)
    if folds and way == "whole":
        found["specific"] = specific_scores(trained.uses, n)
        found["own_step"], found["own_specific"] = _in_sets(trained.own, n), specific_scores(trained.own, n)
    return found


def _by_rows(name: str, tokens: Tensor, held: Mapping[str, Tensor], model: nn.Module) -> dict[str, Values]:
    """Return the specific scores of a baseline: one value per document and validation row, as if documents were used once."""
    single = {str(Label(label, j, is_fold=True)): rows[j : j + 1] for label, rows in held.items() for j in range(len(rows))}
    found = baseline(name, tokens, single, model)
    ids = np.arange(len(tokens))
    columns = {"step": np.zeros_like(ids), "sample_id": ids}
    uses = [pa.table({**columns, "validation": [label] * len(ids), "value": scores}) for label, scores in found.items()]
    return specific_scores(pa.concat_tables(uses), len(ids))


def baseline(name: str, tokens: Tensor, rows: Mapping[str, Tensor], model: nn.Module, **more: Any) -> dict[str, Values]:
    """Score documents by a baseline that looks at gradients, or by their product with those of the sets; ``[n]`` by set."""
    if name == "influence_iterative":
        return baseline("influence_function", tokens, rows, model, **ITERATIVE)
    if name == "gradient_product":
        return baseline("tracin_cp", tokens, rows, model, checkpoints=[model.state_dict()], lrs=[1.0])

    def sample_loss(model: nn.Module, k: Any) -> Tensor:
        # A vector of one index: with a bare one torch asks for its value, which cannot be mapped over.
        return next_token_loss(model, tokens[torch.as_tensor(k).reshape(1)])

    sets = {label: (lambda m, r=r: next_token_loss(m, r)) for label, r in rows.items()}
    return _by_set(registry.run(name, np.arange(len(tokens)), sets, model=model, sample_loss=sample_loss, **more))


def _by_set(table: Any) -> dict[str, Values]:
    """Return the scores of a table, ``[n]`` by validation set, in the order of ids."""
    names, scores = np.array(table["validation"].to_pylist()), table["score"].to_numpy()
    return {name: scores[names == name] for name in dict.fromkeys(names.tolist())}

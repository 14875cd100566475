"""Do scores of groups tell what leaving the group out does? Drop each group of documents, train again, and correlate.

    python benchmarks/leave_group_out.py --data ../shared/data/minipile.jsonl.gz --lr 6e-4 --lr 2e-3 --out results.jsonl

A small GPT on bytes, one row of 128 bytes per document, trained by AdamW with warm-up, a cosine to a tenth and clipping. Documents
are drawn in epochs of one fixed order. For every learning rate the run is scored by the SGD proxy, the step game and whole credit
(same weights to rounding; the fall of all runs is printed), then trained again without each group. What leaving out means:

    lack      the batch lacks the group's samples, and its loss is the mean over the others (they weigh a little more)
    replace   each of the group's samples is exchanged for a document that the run has never seen

The effect of a group is the final validation loss without it less the loss with it: positive where the group helped. Groups are
parts of domains (whose effects differ), or random. Last, single documents are left out: how far the final loss moves when hardly
anything is changed bounds the noise that no score can explain.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

import inrun
from inrun.statistics import spearman
from inrun.training.gpt import GPT, GPTConfig, next_token_loss
from inrun.training.models import decay_groups

#: What is held against the effects: options of the accountant by name.
METHODS: dict[str, dict[str, Any]] = {
    "SGD proxy": {"method": "first", "update": "sgd"},
    "step game": {"method": "midpoint"},
    "whole, sketch": {"credit": "whole"},
    "whole, exact": {"credit": "whole", "credit_memory": "exact"},
}


@dataclass(frozen=True)
class Corpus:
    """Rows of bytes: documents to train on with their groups, documents to take their place, and validation rows."""

    rows: Tensor
    group: np.ndarray
    names: list[str]
    spare: Tensor
    validation: Tensor


def read_corpus(options: argparse.Namespace) -> Corpus:
    """Draw documents, the same number of each domain, and cut each to one row."""
    by_domain: dict[str, list[Tensor]] = {}
    held: dict[str, list[Tensor]] = {}
    with gzip.open(options.data, "rt", encoding="utf-8") as file:
        for line in file:
            document = json.loads(line)
            text = document["text"].encode()[: options.context]
            if len(text) == options.context and document["split"] in ("train", "val"):
                into = by_domain if document["split"] == "train" else held
                into.setdefault(document["domain"], []).append(torch.tensor(list(text)))
    draw = np.random.default_rng(options.seed)
    domains = sorted(by_domain)
    each = options.documents // len(domains)
    rows, spare, domain = [], [], []
    for name in domains:
        chosen = draw.permutation(len(by_domain[name]))[: 2 * each]
        rows += [by_domain[name][i] for i in chosen[:each]]
        spare += [by_domain[name][i] for i in chosen[each:]]
        domain += [name] * each
    per = max(1, options.groups // len(domains))
    if options.by == "domain":
        group = np.concatenate([np.arange(each) * per // each + per * d for d in range(len(domains))])
        names = [f"{d} {i + 1}" for d in domains for i in range(per)]
    else:
        group = draw.permutation(len(rows)) % options.groups
        names = [f"group {i + 1}" for i in range(options.groups)]
    order = draw.permutation(len(domains))
    chosen_rows = [held[domains[order[i % len(order)]]][i // len(order)] for i in range(options.validation)]
    return Corpus(torch.stack(rows), group, names, torch.stack(spare), torch.stack(chosen_rows))


def draw_batches(documents: int, options: argparse.Namespace) -> np.ndarray:
    """Return the documents of every step, ``[steps, batch]``: epochs of permutations."""
    draw = np.random.default_rng(options.seed + 1)
    wanted = options.steps * options.batch
    order = np.concatenate([draw.permutation(documents) for _ in range(math.ceil(wanted / documents))])
    return order[:wanted].reshape(options.steps, options.batch)


def rate(step: int, peak: float, options: argparse.Namespace) -> float:
    """Return the learning rate: a linear warm-up, then a cosine to a tenth."""
    if step < options.warmup:
        return peak * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(
    corpus: Corpus,
    batches: np.ndarray,
    peak: float,
    options: argparse.Namespace,
    left_out: np.ndarray | None = None,
    scoring: dict[str, Any] | None = None,
) -> tuple[float, dict[str, Any]]:
    """Train once; return the final validation loss and, with ``scoring``, the scores of the documents and their books."""
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(256, options.context, options.width, options.layers, 4))
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=peak, betas=(0.9, 0.95))

    def validation(model: torch.nn.Module) -> Tensor:
        return next_token_loss(model, corpus.validation)

    with torch.no_grad():
        start = float(validation(model))
    accountant = None if scoring is None else inrun.Accountant(model, optimizer, validation, audit_every=1, **scoring)
    for t, batch in enumerate(batches):
        for g in optimizer.param_groups:
            g["lr"] = rate(t, peak, options)
        rows = corpus.rows[torch.from_numpy(batch)]
        if left_out is not None and left_out[batch].any():
            gone = torch.from_numpy(left_out[batch])
            if options.drop == "replace":
                rows[gone] = corpus.spare[torch.from_numpy(batch)][gone]
            else:
                rows, batch = rows[~gone], batch[~left_out[batch]]
        with contextlib.nullcontext() if accountant is None else accountant.step(batch):
            next_token_loss(model, rows).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        end = float(validation(model))
    return end, {} if accountant is None else read_books(accountant, len(corpus.rows), start - end)


def read_books(accountant: inrun.Accountant, documents: int, fall: float) -> dict[str, Any]:
    """Close the books: the scores of the documents, what they add up to, and how unevenly steps hold them."""
    accountant.close()
    table = accountant.scores()
    scores = np.zeros(documents)
    scores[table["sample_id"].to_numpy()] = table["score"].to_numpy()
    books = accountant.summary().sets[0]
    uses = accountant.ledger.uses()  # type: ignore[attr-defined]
    by_step = np.bincount(uses["step"].to_numpy(), np.abs(uses["value"].to_numpy()))
    top = np.sort(by_step)[-math.ceil(0.03 * len(by_step)) :].sum() / by_step.sum()
    return {
        "scores": scores,
        "fall": fall,
        "sum": float(scores.sum()),
        "top": float(top),
        "residual": books.relative_residual,
        "points": books.most_points,
    }


def compare(peak: float, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Score one run in all ways, leave each group out, and correlate."""
    corpus = read_corpus(options)
    batches = draw_batches(len(corpus.rows), options)
    names = [m for m in METHODS if options.exact or m != "whole, exact"]
    found: dict[str, Any] = {"lr": peak, "seed": options.seed, "by": options.by, "drop": options.drop, "methods": {}}
    task = progress.add_task(f"lr {peak:g}", total=len(names) + 1 + len(corpus.names) + options.noise)
    full, _ = train(corpus, batches, peak, options)
    progress.advance(task)
    scores = {}
    for name in names:
        began = time.perf_counter()
        end, books = train(corpus, batches, peak, options, scoring=METHODS[name])
        scores[name] = np.bincount(corpus.group, books.pop("scores"), minlength=len(corpus.names))
        found["methods"][name] = {**books, "off": abs(end - full), "seconds": time.perf_counter() - began}
        progress.advance(task)
    effects = []
    for group in range(len(corpus.names)):
        effects.append(train(corpus, batches, peak, options, left_out=corpus.group == group)[0] - full)
        progress.advance(task)
    single = np.random.default_rng(options.seed + 2).choice(len(corpus.rows), options.noise, replace=False)
    moved = []
    for document in single:
        moved.append(train(corpus, batches, peak, options, left_out=np.arange(len(corpus.rows)) == document)[0] - full)
        progress.advance(task)
    effect = np.array(effects)
    for name in names:
        found["methods"][name] |= {
            "pearson": float(np.corrcoef(scores[name], effect)[0, 1]),
            "spearman": spearman(scores[name], effect),
            "groups": scores[name].tolist(),
        }
    found |= {
        "final": full,
        "effects": effects,
        "names": corpus.names,
        "noise": float(np.sqrt(np.mean(np.square(moved)))) if moved else None,
    }
    return found


def table_of(found: dict[str, Any]) -> Table:
    """Return a run's figures for people."""
    noise = "" if found["noise"] is None else f", one document left out moves it by {found['noise']:.2g} (r.m.s.)"
    table = Table(
        title=f"lr {found['lr']:g}, seed {found['seed']}, groups by {found['by']}, drop={found['drop']}: "
        f"final loss {found['final']:.4f}, effects {np.mean(found['effects']):+.4f} ± {np.std(found['effects']):.4f}{noise}"
    )
    for column in ("", "Pearson", "Spearman", "Σ score", "fall", "top 3 % of steps", "residual", "points", "seconds"):
        table.add_column(column, justify="right" if column else "left")
    for name, m in found["methods"].items():
        residual = "" if m["residual"] is None else f"{100 * m['residual']:.2g} %"
        figures = (f"{m['pearson']:.2f}", f"{m['spearman']:.2f}", f"{m['sum']:.3f}", f"{m['fall']:.3f}", f"{100 * m['top']:.0f} %")
        table.add_row(name, *figures, residual, str(m["points"] or ""), f"{m['seconds']:.0f}")
    return table


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="minipile.jsonl.gz, or documents with text, domain and split")
    parser.add_argument("--lr", type=float, action="append", default=[], help="learning rates to run at; default 6e-4 and 2e-3")
    parser.add_argument("--by", choices=("domain", "random"), default="domain", help="what makes a group")
    parser.add_argument("--drop", choices=("lack", "replace"), default="lack", help="what leaving out means, see above")
    parser.add_argument("--exact", action="store_true", help="whole credit by kept gradients, too: 0.8 GB at the default shape")
    parser.add_argument("--out", type=Path, help="append what was found, one line of JSON per learning rate")
    for name, default in (("steps", 100), ("batch", 16), ("warmup", 20), ("context", 128), ("width", 96), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("documents", 600), ("groups", 30), ("validation", 16), ("noise", 5), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=132)
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    for peak in options.lr or [6e-4, 2e-3]:
        with Progress(*bar, console=Console(stderr=True)) as progress:
            found = compare(peak, options, progress)
        console.print(table_of(found))
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

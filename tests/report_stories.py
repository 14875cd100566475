"""Ledgers made up for the report's tests: no model, but numbers that behave as those of a training run."""

from __future__ import annotations

import inspect
import math
from importlib import import_module
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from inrun.ledger import Ledger, StepRecord

#: How much the samples of a domain do for a validation set: at the start, and when the basics are learnt.
TASTES = {
    "reference": {"docs": (1.0, 0.9), "code": (0.5, 0.15)},
    "library": {"docs": (0.8, 0.5), "code": (0.7, 0.4)},
    "code": {"docs": (0.4, 0.05), "code": (1.1, 1.0)},
    "tables": {"docs": (0.3, -0.12), "code": (0.35, 0.02)},
    "tutorials": {"docs": (0.55, 0.1), "code": (0.3, -0.15)},
    "noise": {"docs": (-0.1, -0.5), "code": (-0.1, -0.4)},
}
OWNERS = ("python.org", "anna", "bert", None)
MODULES = (
    "argparse",
    "asyncio.tasks",
    "calendar",
    "csv",
    "dataclasses",
    "decimal",
    "difflib",
    "json.decoder",
    "logging",
    "statistics",
)


def texts_of(domain: str, count: int, rng: np.random.Generator) -> list[str]:
    """Return texts that every Python installation carries."""
    if domain == "noise":
        letters = np.array(list("abcdefgh#%&/()=?{}[]+*~xyz  "))
        return ["".join(rng.choice(letters, 300)) for _ in range(count)]
    if domain == "reference":
        whole = "\n".join(topics[k] for k in sorted(topics))
    elif domain == "code":
        whole = "\n".join(inspect.getsource(import_module(m)) for m in MODULES)
    elif domain == "library":
        whole = "\n".join(
            inspect.getdoc(import_module(m)) or "" for m in (*MODULES, "heapq", "pickletools", "tempfile", "zipfile", "typing")
        )
    elif domain == "tables":
        names = sorted(import_module("encodings.aliases").aliases.items())
        whole = "\n".join(f"{a:<24}| {b:<18}| {len(a):>4}" for a, b in names)
    else:
        names = (
            "doctest",
            "pdb",
            "optparse",
            "timeit",
            "unittest",
            "sched",
            "pickle",
            "locale",
            "string",
            "weakref",
            "cmd",
            "bisect",
        )
        whole = "\n\n".join(inspect.getdoc(import_module(m)) or "" for m in names)
    starts = rng.integers(0, max(len(whole) - 420, 1), count)
    return [whole[s : s + 420].strip() for s in starts]


def tell_story(path: Path, steps: int = 400, batch: int = 16, samples: int = 1200, folds: int = 4, audit: int = 5) -> Path:
    """Write a run: six domains, two validation sets in folds, accounts, texts, some of them twice."""
    rng = np.random.default_rng(7)
    domains = list(TASTES)
    kind = rng.choice(len(domains), samples, p=[0.22, 0.2, 0.24, 0.14, 0.1, 0.1])
    texts: list[str] = [""] * samples
    for k, domain in enumerate(domains):
        places = np.flatnonzero(kind == k)
        for i, text in zip(places, texts_of(domain, len(places), rng), strict=True):
            texts[i] = text
    for original, *copies in ((3, 200, 700, 1100), (10, 400), (55, 56), (90, 91, 92, 93, 94)):
        for copy in (c for c in copies if c < samples):
            texts[copy], kind[copy] = texts[original].upper() if copy % 2 else texts[original], kind[original]
    quality = rng.normal(0, 0.5, samples)
    about = {"method": "step", "model": "GPT", "optimizers": ["AdamW"], "parameters": 3_242_496}
    loss = {"docs": 5.55, "code": 5.61}
    memory = dict.fromkeys(loss, 0.0)
    with Ledger(path, about=about) as ledger:
        rows = [
            {
                "sample_id": i,
                "id": f"{domains[k]}-{i:05d}",
                "domain": domains[k],
                "source": "stdlib" if k in (1, 2, 3) else "made" if k == 5 else "docs",
                "owner": OWNERS[i % 4],
                "text": texts[i],
            }
            for i, k in enumerate(kind)
        ]
        ledger.register_samples(rows)
        order = np.concatenate([rng.permutation(samples) for _ in range(-(-steps * batch // samples))])
        for step in range(steps):
            ids = order[step * batch : (step + 1) * batch]
            lr = 6e-4 * min(1.0, (step + 1) / 30) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
            learnt = 1 - math.exp(-step / 70)
            scale = lr * 1.6 * (0.12 + 0.88 * math.exp(-step / 110))
            columns, accounts = {}, []
            for name in loss:
                taste = np.array([TASTES[domains[k]][name] for k in kind[ids]])
                push = scale * (
                    taste[:, 0] * (1 - learnt) + taste[:, 1] * learnt + quality[ids] * 0.35 + rng.normal(0, 0.25, batch)
                )
                data = float(push.sum())
                memory[name] = 0.9 * memory[name] + data
                parts = {
                    "data": data,
                    "momentum": 0.9 * memory[name] * 0.93,
                    "decay": -0.011 * scale * batch,
                    "residual": 0.004 * data,
                }
                parts["residual"] *= float(rng.normal(0, 1))
                fall = sum(parts.values())
                before, loss[name] = loss[name], loss[name] - fall
                audited = audit and step % audit == 0
                for j in range(folds):
                    wobble = push + rng.normal(0, 0.3 * scale, batch)
                    label = f"{name}#{j}" if folds > 1 else name
                    columns[label] = wobble.astype(np.float32)
                    row = {"step": step, "validation": label, "loss_before": before, "loss_after": None, "data": data, "lr": lr}
                    row |= {"spread": float(np.abs(push).sum()), "n_samples": batch, "clip": 1.0}
                    if audited:
                        row |= {"loss_after": loss[name], **parts}
                    accounts.append(row)
            ledger.write(StepRecord(step, ids, columns, accounts))
    return path

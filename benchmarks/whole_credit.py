"""How close sketched whole credit comes to exact: one run, both kept side by side, bit for bit the same training.

    python benchmarks/whole_credit.py --data ../shared/data/minipile.jsonl.gz --corpus bytes --lr 3e-3 --sketch 4096 --sketch 16384

Prints, per sketch size: Spearman pooled over all uses and within steps, error / spread, the sum of estimates over
the exact sum, how often the error estimate covers at 1 and 2 standard errors, the memory held between steps, and the
mean CPU time of a step, once the window is full.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import time
from collections import Counter

import numpy as np
import torch

from inrun.engine import Accountant
from inrun.statistics import spearman
from inrun.training.gpt import GPT, GPTConfig, next_token_loss


def read_tokens(path: str, corpus: str, most: int) -> tuple[torch.Tensor, int]:
    """Return a stream of tokens and the size of the vocabulary: bytes, or the 2,000 most frequent words."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in itertools.islice(file, 0, None, 40)]
    if corpus == "bytes":
        return torch.tensor(list(" ".join(texts).encode()[:most])), 256
    words = " ".join(texts).split()[:most]
    place = {w: i + 1 for i, (w, _) in enumerate(Counter(words).most_common(1999))}
    return torch.tensor([place.get(w, 0) for w in words]), 2000


def run(options: argparse.Namespace, sizes: list[int], exact: bool) -> list[dict]:
    """Train once with an accountant per size after another; exact first."""
    tokens, vocab = read_tokens(options.data, options.corpus, 2_000_000)
    found = []
    for size in ([None] if exact else []) + sizes:
        torch.manual_seed(options.seed)
        model = GPT(GPTConfig(vocab, options.context, options.width, options.layers, 4, 0.0, options.tied))
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        draw = torch.Generator().manual_seed(options.seed)

        def rows(n: int, g: torch.Generator) -> torch.Tensor:
            starts = torch.randint(0, len(tokens) - options.context, (n,), generator=g).tolist()
            return torch.stack([tokens[s : s + options.context] for s in starts])

        fixed = rows(8, torch.Generator().manual_seed(99))

        def validation(model: torch.nn.Module, step: int, fixed: torch.Tensor = fixed, rows=rows) -> torch.Tensor:
            held = rows(8, torch.Generator().manual_seed(10_000 + step)) if options.redrawn else fixed
            return next_token_loss(model, held)

        sketch = "exact" if size is None else size
        accountant = Accountant(model, optimizer, validation, sketch=sketch, bitwise=True, audit_every=0)
        peak, started, took = 0, time.process_time(), []
        for t in range(options.steps):
            for g in optimizer.param_groups:
                g["lr"] = options.lr * min(1.0, (t + 1) / 20)
            with accountant.step(range(t * options.batch, (t + 1) * options.batch)):
                next_token_loss(model, rows(options.batch, draw)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            peak = max(peak, accountant.held_bytes())
            took.append(time.process_time() - started - sum(took))
        accountant.close()
        table = accountant.ledger.credits().sort_by([("step", "ascending"), ("row", "ascending")])
        found.append(
            {
                "size": size,
                "credit": table["credit"].to_numpy().reshape(options.steps, -1).astype(float),
                "error": table["error"].to_numpy().reshape(options.steps, -1).astype(float),
                "bytes": peak,
                "ms": 1e3 * float(np.mean(took[44:])),
                "entries": sum(p.numel() for p in model.parameters()),
            }
        )
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--corpus", choices=("bytes", "words"), default="bytes")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--redrawn", action="store_true", help="new validation rows at every step")
    parser.add_argument("--by-step", action="store_true", help="Spearman of every step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--sketch", type=int, action="append", default=[])
    for name, default in (("steps", 100), ("batch", 16), ("width", 64), ("layers", 2), ("context", 64), ("seed", 0), ("skip", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    truth, *others = run(options, options.sketch or [4096, 16384], exact=True)
    last = options.steps - 44  # later uses are cut off by the end
    exact = truth["credit"][options.skip : last]
    kind = options.corpus + (" tied" if options.tied else "") + (" redrawn" if options.redrawn else "")
    print(
        f"{kind} lr {options.lr:g} seed {options.seed}, {truth['entries']:,} entries; exact window {truth['bytes'] / 1e6:.0f} MB "
        f"{truth['ms']:.0f} ms",
        flush=True,
    )
    for other in others:
        credit, error = other["credit"][options.skip : last], other["error"][options.skip : last]
        off = credit - exact
        by_step = [spearman(a, b) for a, b in zip(credit, exact, strict=True)]
        within = np.mean(by_step)
        if options.by_step:
            print("   ", " ".join(f"{x:.2f}" for x in by_step))
        cover = [float((np.abs(off) <= k * error).mean()) for k in (1, 2)]
        print(
            f"  {other['size']:>7}: pooled {spearman(credit.ravel(), exact.ravel()):.4f} within {within:.4f} error/spread "
            f"{off.std() / exact.std():.3f} totals {credit.sum() / exact.sum():.3f} cover {cover[0]:.2f} {cover[1]:.2f} "
            f"{other['bytes'] / 1e6:.0f} MB {other['ms']:.0f} ms",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""A run in which everything a user can name is hostile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from inrun.ledger import Ledger, StepRecord
from report_payloads import PAYLOADS

#: Names of validation sets: without the marks of folds and points, which are the ledger's own.
SETS = ["</script><script>window.__pwned=1</script>", "<img src=x onerror=window.__pwned=1>", "\u202e%{x}<b>\x1b[31m"]


def hostile_run(path: Path, steps: int = 12) -> Path:
    """Write it: payloads as texts, ids, domains, owners, sources, set names, model, method, reasons and run facts."""
    rng = np.random.default_rng(0)
    n = len(PAYLOADS)
    about: dict[str, Any] = {"method": PAYLOADS[0], "model": "<img src=x onerror=window.__pwned=1>"}
    about |= {p[:40] or "empty": p for p in PAYLOADS[:12]} | {"coverage": {"</dd><script>": PAYLOADS[3]}, "list": PAYLOADS[:5]}
    with Ledger(path, about=about) as ledger:
        ids = [f"{p} #{i}" for i, p in enumerate(PAYLOADS)]
        rows = [
            {"sample_id": i, "id": ids[i], "domain": p, "source": PAYLOADS[i % 7], "owner": PAYLOADS[-1 - i % 9], "text": p}
            for i, p in enumerate(PAYLOADS)
        ]
        rows += [{**rows[i], "sample_id": n + i, "id": f"again {ids[i]}", "text": rows[i]["text"].upper()} for i in range(0, n, 3)]
        ledger.register_samples(rows, text_preview=0)
        labels = [f"{SETS[0]}#0", f"{SETS[0]}#1", *SETS[1:]]
        for step in range(steps):
            values = {x: (rng.standard_normal(len(rows)) / 100).astype(np.float32) for x in labels}
            row = {"loss_before": 2.0 - step / 20, "loss_after": 1.95 - step / 20, "data": 0.01, "spread": 0.5, "momentum": 0.03}
            row |= {"decay": 0.005, "residual": 0.005, "lr": 0.1, "skipped": None}
            ledger.write(StepRecord(step, np.arange(len(rows)), values, [{**row, "step": step, "validation": x} for x in labels]))
        skipped = {"step": steps, "validation": labels[0], "skipped": "</li><script>window.__pwned=1</script>"}
        ledger.write(StepRecord(steps, np.arange(2), {}, [skipped]))
    evaluation = '{"step": 1, "loss": 2.0, "validation": {"<img src=x onerror=alert(1)>": 1.5}}\n'
    (path / "metrics.jsonl").write_text(evaluation + evaluation.replace("1,", "5,", 1) + "{broken\n", encoding="utf-8")
    return path

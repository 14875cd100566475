"""Whole credit as plain data and tensors, and back: a resumed run settles the same, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from inrun.errors import ConfigurationError
from inrun.ledger.labels import Label
from inrun.old.engine.credit.direction import Epoch
from inrun.old.engine.credit.exact_store import ExactEntry
from inrun.old.engine.credit.keeper import WholeCredit
from inrun.old.engine.credit.owing import Owed
from inrun.old.engine.credit.payment import Open
from inrun.old.engine.credit.sketch_store import RowsApart, SketchEntry, SketchStore
from inrun.old.engine.credit.sketcher import Sketcher
from inrun.old.layers import Formed, GradientShape, LookUp, Outer, Packed, packed

#: Changes whenever sketches or payments are laid out in another way: windows of another format cannot be gone on with.
FORMAT = 3
#: Numbers by column that last over the run.
_SUMS = ("to_all", "given", "spread")
#: Tensors of a sketched step, by field.
_FIELDS = ("sketch", "beyond", "known", "known_square", "rest", "spread_rows", "rest_rows")


def credit_state(credit: WholeCredit) -> dict[str, Any]:
    """Return ``{"plain": ..., "tensors": {name: tensor}}``."""
    tensors: dict[str, Tensor] = {f"open.{j}.credit": o.credit for j, o in enumerate(credit.open)}
    tensors |= {f"open.{j}.ids": o.ids for j, o in enumerate(credit.open)}
    tensors |= {f"open.{j}.rows": o.rows for j, o in enumerate(credit.open) if o.rows is not None}
    tensors |= {f"decay.{i}": x for i, x in credit.decays.items()} | {f"inherited.{i}": x for i, (x, _) in credit.inherited.items()}
    plain: dict[str, Any] = {
        "format": FORMAT,
        "steps": credit.steps,
        "begun": credit.begun,
        "columns": None if credit.columns is None else [str(c) for c in credit.columns],
        "open": [o.step for o in credit.open],
        "memory": credit.memory.state_dict(),
        "factors": credit.factors.tolist(),
        "inherited": {str(i): alpha for i, (_, alpha) in credit.inherited.items()},
        "exact": credit.exact,
        "owed": credit.owed.state(_sketcher_names(credit), tensors),
    }
    tensors |= {name: getattr(credit, name) for name in _SUMS}
    if isinstance(credit.store, SketchStore):
        plain |= _sketch_state(credit.store, tensors)
        plain["sketch"] = credit.store.sketchers[False].size
        assert credit.audit is not None
        tensors |= {f"audit.{i}": x for i, x in enumerate(credit.audit.remembered)}
    else:
        plain["entries"] = [_exact_state(e, j, tensors) for j, e in enumerate(credit.store.entries)]
        if credit.exact_audit is not None:
            tensors |= {f"audit.{i}": x for i, x in enumerate(credit.exact_audit.remembered)}
    return {"plain": plain, "tensors": {name: x.detach().cpu() for name, x in tensors.items()}}


def _sketcher_names(credit: WholeCredit) -> dict[Sketcher, str]:
    sketchers = credit.store.sketchers if isinstance(credit.store, SketchStore) else {}
    return {sketcher: "early" if early else "usual" for early, sketcher in sketchers.items()}


def _sketch_state(store: SketchStore, tensors: dict[str, Tensor]) -> dict[str, Any]:
    rows = []
    for j, e in enumerate(store.entries):
        tensors |= {f"entry.{j}.{name}": getattr(e, name) for name in _FIELDS}
        for i, r in enumerate(e.rows):
            tensors |= {f"entry.{j}.rows.{i}": r.numbers, f"entry.{j}.values.{i}": r.values}
            tensors |= {} if r.owner is None else {f"entry.{j}.owner.{i}": r.owner}
        rows.append({"epoch": e.epoch, "rows": [(r.parameter, r.first) for r in e.rows]})
    for number, epoch in store.epochs.items():
        tensors |= {f"epoch.{number}.{i}": w for i, w in enumerate(epoch.weights)}
    tensors |= {f"known.{i}": x for i, x in store.known_whole.items()}
    return {
        "entries": rows,
        "epoch": store.epoch,
        "epochs": [[n, e.early] for n, e in store.epochs.items()],
        "known": list(store.known_whole),
    }


def _exact_state(e: ExactEntry, j: int, tensors: dict[str, Tensor]) -> dict[str, Any]:
    held = []
    for r, (i, first, shape) in enumerate(e.held):
        if isinstance(shape, Packed):
            tensors[f"entry.{j}.{r}.owner"], shape = shape.owner, shape.inner
        for p, part in enumerate(shape.parts()):
            tensors[f"entry.{j}.{r}.{p}"] = part
        more = [shape.rows, shape.padding] if isinstance(shape, LookUp) else []
        held.append({"parameter": i, "first": first, "kind": type(shape).__name__, "parts": len(shape.parts()), "more": more})
    tensors |= {f"entry.{j}.factor.{i}": x for i, x in e.factors.items()}
    return {"n": e.n, "held": held, "factors": list(e.factors)}


def is_readable(state: dict[str, Any]) -> bool:
    """Whether a saved state is of this version's format."""
    return bool(state["plain"].get("format") == FORMAT)


def load_credit_state(credit: WholeCredit, state: dict[str, Any]) -> None:
    """Go on from a saved state."""
    # Copies: tensors in a mapped file may be aligned otherwise than torch's own, and then round otherwise.
    plain, tensors = state["plain"], {name: x.clone() for name, x in state["tensors"].items()}
    size = None if credit.exact else credit.store.sketchers[False].size  # type: ignore[union-attr]
    if plain["exact"] != credit.exact or plain.get("sketch") != size:
        raise ConfigurationError(
            f"the saved run kept {_words(plain['exact'], plain.get('sketch'))} for whole credit, this accountant keeps "
            f"{_words(credit.exact, size)}; give the same credit_memory= and sketch="
        )
    columns = plain["columns"]
    credit.restore(
        steps=int(plain["steps"]),
        begun=bool(plain["begun"]),
        columns=None if columns is None else [Label.parse(c) for c in columns],
        open_=[
            Open(step, tensors[f"open.{j}.ids"], tensors[f"open.{j}.credit"].clone(), tensors.get(f"open.{j}.rows"))
            for j, step in enumerate(plain["open"])
        ],
        factors=np.array(plain["factors"], np.float64).reshape(-1, len(credit.scored)),
        decays={i: _like(credit, i, tensors[name]) for name, i in _numbered(tensors, "decay.")},
        inherited={
            i: (_like(credit, i, tensors[name]), float(plain["inherited"][str(i)])) for name, i in _numbered(tensors, "inherited.")
        },
        owed=Owed.from_state(plain["owed"], {name: s for s, name in _sketcher_names(credit).items()}, tensors),
        sums=(tensors["to_all"], tensors["given"], tensors["spread"]),
    )
    credit.memory.load_state_dict(plain["memory"])
    if isinstance(credit.store, SketchStore):
        _load_sketches(credit, credit.store, plain, tensors)
    else:
        credit.store.entries = [_load_exact(e, j, tensors) for j, e in enumerate(plain["entries"])]
        if credit.exact_audit is not None:
            credit.exact_audit.go_on(_audited(tensors))


def _numbered(tensors: dict[str, Tensor], prefix: str) -> list[tuple[str, int]]:
    return [(name, int(name[len(prefix) :])) for name in tensors if name.startswith(prefix)]


def _like(credit: WholeCredit, index: int, x: Tensor) -> Tensor:
    return x.to(credit.scored[index].parameter.device)


def _words(exact: bool, size: int | None) -> str:
    return "gradients (exact)" if exact else f"sketches of {size} numbers"


def _load_sketches(credit: WholeCredit, store: SketchStore, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    device = store.sketcher.device
    entries = []
    for j, e in enumerate(plain["entries"]):
        fields: dict[str, Any] = {name: tensors[f"entry.{j}.{name}"].to(device).clone() for name in _FIELDS}
        rows = [
            RowsApart(
                i,
                first,
                tensors[f"entry.{j}.rows.{r}"].to(device),
                tensors[f"entry.{j}.values.{r}"].to(device),
                owner.to(device) if (owner := tensors.get(f"entry.{j}.owner.{r}")) is not None else None,
            )
            for r, (i, first) in enumerate(e["rows"])
        ]
        entries.append(SketchEntry(epoch=e["epoch"], rows=rows, **fields))
    count = len(store.sketcher.plans)
    store.restore(
        entries,
        {
            n: Epoch(store.sketchers[early], [tensors[f"epoch.{n}.{i}"].to(device) for i in range(count)], early)
            for n, early in plain["epochs"]
        },
        int(plain["epoch"]),
        {i: _like(credit, i, tensors[f"known.{i}"]) for i in plain["known"]},
    )
    assert credit.audit is not None
    credit.audit.restore(store.sketcher, _audited(tensors))


def _audited(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Return what the audit follows, by parameter."""
    return [tensors[name] for name, _ in sorted(_numbered(tensors, "audit."), key=lambda pair: pair[1])]


def _load_exact(e: dict[str, Any], j: int, tensors: dict[str, Tensor]) -> ExactEntry:
    kinds: dict[str, Any] = {"Formed": Formed, "Outer": Outer, "LookUp": LookUp}
    held: list[tuple[int, int, GradientShape]] = []
    for r, h in enumerate(e["held"]):
        parts = tuple(tensors[f"entry.{j}.{r}.{p}"].clone() for p in range(h["parts"]))
        shape, owner = kinds[h["kind"]].of(parts, *h["more"]), tensors.get(f"entry.{j}.{r}.owner")
        held.append((h["parameter"], h["first"], shape if owner is None else packed(shape, owner, int(owner[-1]) + 1)))
    return ExactEntry(e["n"], held, {i: tensors[f"entry.{j}.factor.{i}"] for i in e["factors"]})

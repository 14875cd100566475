"""What one microbatch's backward left, and the factor between its gradients and those that the optimizer used."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inrun.engine.parameters import Parameters, Scored
from inrun.engine.processes import Processes
from inrun.engine.readers import LeafReader, Request
from inrun.engine.ring import Entering, contract
from inrun.engine.sketch import Sketcher
from inrun.layers.gradients import PerSample

#: Tensors from which the clip factor is read where gradients are only contracted.
FEW = 12


@dataclass(eq=False)
class Reading:
    """The probes of one microbatch, after its backward."""

    n: int
    #: By place: inner products ``[n, k]`` and sketches ``[n, buckets]``.
    products: dict[int, Tensor]
    sketches: dict[int, Tensor]
    #: Rows of tables: place, number of the call, numbers, values.
    tables: list[tuple[int, int, Tensor, Tensor]]
    kept: list[tuple[int, PerSample]] = field(default_factory=list)
    #: Σ|terms| of every entry, by place; on audited steps.
    sizes: dict[int, Tensor] = field(default_factory=dict)
    #: Inner products with random signs, ``[n, 1]`` by place.
    signed: dict[int, Tensor] = field(default_factory=dict)
    #: The ids of the samples, if they are known.
    ids: Tensor | None = None


def read_probes(parameters: Parameters, request: Request) -> Reading:
    """Collect what a microbatch's backward left as gradients of probes."""
    products: dict[int, Tensor] = {}
    sketches: dict[int, Tensor] = {}
    sizes: dict[int, Tensor] = {}
    signed: dict[int, Tensor] = {}
    for s in parameters.scored:
        reader = s.leaf.reader
        assert isinstance(reader, LeafReader)
        if reader.products is not None and reader.products.grad is not None:
            found = reader.products.grad
            products[s.place] = found
            if s.place in request.signed:
                products[s.place], signed[s.place] = found[:, : request.k], found[:, request.k :]
        if reader.sketch is not None and reader.sketch.grad is not None:
            sketches[s.place] = reader.sketch.grad
        if reader.sizes is not None and reader.sizes.grad is not None:
            sizes[s.place] = reader.sizes.grad
    tables: list[tuple[int, int, Tensor, Tensor]] = []
    calls: dict[int, int] = {}
    for rows in request.rows:
        touched = rows.result()
        if touched is not None:
            call = calls[rows.tensor] = calls.get(rows.tensor, -1) + 1
            tables.append((rows.tensor, call, *touched))
    return Reading(request.n, products, sketches, tables, request.kept, sizes, signed)


def joined(sketcher: Sketcher, readings: Sequence[Reading]) -> Entering:
    """Join the sketches of all microbatches: one row per sample, one column per number."""
    rows = torch.empty(sum(r.n for r in readings), sketcher.size, dtype=sketcher.dtype, device=sketcher.device)
    tables, first = [], 0
    for r in readings:
        parts = [_column(sketcher, r, i) for i in sketcher.order]
        torch.cat(parts, 1, out=rows[first : first + r.n])
        tables += [(i, call, first, numbers, values) for i, call, numbers, values in r.tables]
        first += r.n
    ids = [r.ids for r in readings if r.ids is not None]
    return Entering(rows, tables, torch.cat(ids).numpy() if ids else None)


def _column(sketcher: Sketcher, reading: Reading, place: int) -> Tensor:
    found = reading.sketches.get(place)
    if found is not None:
        return found
    return torch.zeros((), dtype=sketcher.dtype, device=sketcher.device).expand(reading.n, sketcher.plans[place].buckets)


def exact_products(sketcher: Sketcher, entering: Entering, readings: Sequence[Reading], k: int) -> Tensor:
    """Return ⟨g, v⟩ of the lossy tensors, ``[n, tensors, k]``."""
    parts = []
    for r in readings:
        none = torch.zeros((), dtype=sketcher.dtype, device=sketcher.device).expand(r.n, k)
        parts.append(torch.stack([r.products.get(i, none) for i in sketcher.lossy], 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def correct(sketcher: Sketcher, entering: Entering, readings: Sequence[Reading], known: Tensor, tables: dict[int, Tensor]) -> None:
    """Make sketches exact for the known directions v, tensor by tensor: S g += S v (S vᵀ S v)⁻¹ (⟨g, v⟩ − ⟨S g, S v⟩).

    Args:
        sketcher: How gradients are sketched.
        entering: The rows, which are changed.
        readings: With ⟨g, v⟩ by place.
        known: S v, ``[k, columns]``.
        tables: S v of rows of tables, ``[k, rows, per_row]``.
    """
    lossy, cut, n, k = sketcher.lossy, sketcher.cut, len(entering.rows), len(known)
    if not lossy or n == 0 or not any(r.products for r in readings):
        return
    missing = exact_products(sketcher, entering, readings, k)
    for i, _, start, numbers, values in entering.tables:
        if i in tables and any(i in r.products for r in readings):
            missing[start : start + len(numbers), lossy.index(i)] -= contract(numbers, values, tables[i])
    part, sv, owner = entering.rows[:, :cut], known[:, :cut], sketcher.owner[:cut]
    tiny = torch.finfo(sv.dtype).tiny
    if k == 1:
        missing = missing[..., 0] - sketcher.by_tensor_of_lossy(part * sv)
        gram = sketcher.by_tensor_of_lossy(sv * sv)[0]
        share = torch.where(gram > 0, missing / gram.clamp_min(tiny), 0.0)
        part.addcmul_(share.index_select(1, owner), sv)
        return
    missing = missing - torch.stack([sketcher.by_tensor_of_lossy(part * one) for one in sv], 2)
    gram = torch.stack([sketcher.by_tensor_of_lossy(sv * one) for one in sv], 0)  # [k, k, tensors]
    square = gram.permute(2, 0, 1)
    ridge = square.diagonal(dim1=1, dim2=2).sum(1).clamp_min(tiny) * 1e-6
    inverse = torch.linalg.inv_ex(square + ridge.view(-1, 1, 1) * torch.eye(k, dtype=sv.dtype, device=sv.device)).inverse
    share = torch.einsum("ntk,tkl->ntl", missing, inverse).nan_to_num_(0.0, 0.0, 0.0)
    for j in range(k):
        part.addcmul_(share[..., j].index_select(1, owner), sv[j])


def clip_from_entries(sketcher: Sketcher, total: Tensor, now: Tensor, small: Sequence[int], processes: Processes) -> Tensor:
    """Return the factor of one optimizer's gradients: clipping, loss scale, and the share among microbatches.

    The gradients of small tensors are known entry by entry from the samples: the factor is ⟨known, now⟩ / ⟨known, known⟩.

    Args:
        sketcher: How gradients are sketched.
        total: The entries of small tensors, Σ_n g_n.
        now: The same as the optimizer will use them.
        small: The places of the optimizer's small tensors that have a gradient.
        processes: Those whose samples the gradient is of.
    """
    if len(small) < len(sketcher.kept):
        where = [sketcher.kept_columns(i) for i in small]
        total, now = torch.cat([total[c] for c in where]), torch.cat([now[c] for c in where])
    return ratio(total, now, processes)


def random_signs(parameters: Parameters, sketcher: Sketcher, optimizers: int) -> dict[int, Tensor]:
    """Return random signs ``[1, *shape]`` for optimizers without small tensors: products with them tell the factor."""
    found, generator = {}, torch.Generator().manual_seed(0)
    for j in range(optimizers):
        some = parameters.of(j)
        if all(s.place in sketcher.lossy for s in some):
            for s in sorted(some, key=lambda s: s.parameter.numel())[:FEW]:
                signs = torch.randint(0, 2, (1, *s.weights.shape), generator=generator) * 2 - 1
                found[s.place] = signs.to(sketcher.device, sketcher.dtype)
    return found


def clip_from_products(
    readings: Sequence[Reading], some: Sequence[Scored], directions: dict[int, Tensor], processes: Processes
) -> Tensor:
    """Return the same from inner products with known directions, of the smallest tensors."""
    few = sorted((s for s in some if s.grad is not None and s.place in directions), key=lambda s: s.parameter.numel())
    few = [s for s in few if processes.several or any(s.place in r.products for r in readings)][:FEW]
    if not few:
        return torch.full((), 1.0 / processes.world, device=some[0].parameter.device)
    vs = torch.cat([(v := directions[s.place]).reshape(len(v), -1) for s in few], 1)
    gradients = torch.cat([s.grad.reshape(-1) for s in few]).to(vs.dtype)  # type: ignore[union-attr]
    owner = owners(tuple(directions[s.place][0].numel() for s in few), vs.device)
    now = torch.zeros(len(vs), len(few), dtype=vs.dtype, device=vs.device).index_add_(1, owner, vs * gradients)
    none = torch.zeros((), dtype=vs.dtype, device=vs.device)
    known = [torch.stack([r.products.get(s.place, none.expand(r.n, len(vs))) for s in few], 2).sum(0) for r in readings]
    total = known[0] if len(known) == 1 else torch.stack(known).sum(0)
    total = processes.all_reduced("sums of gradients", total)
    return ratio(total.reshape(-1), processes.over_shards(now).reshape(-1), processes)


@functools.lru_cache(maxsize=16)
def owners(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return which part every entry of a vector belongs to, for parts of some sizes."""
    return torch.cat([torch.full((size,), j) for j, size in enumerate(sizes)]).to(device)


def ratio(known: Tensor, now: Tensor, processes: Processes) -> Tensor:
    """Return ⟨known, now⟩ / ⟨known, known⟩, 1 over the processes, whose gradients are averaged, where nothing is known."""
    square = torch.dot(known, known)
    return torch.where(square > 0, torch.dot(known, now) / square, 1.0 / processes.world)

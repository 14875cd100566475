"""How ``fully_shard`` splits parameters: every rank holds some rows of every tensor, as many on each but for the last ranks.

A flat vector holds what is here. Sums over entries, sketches and whole directions are those of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from inrun.engine.processes import Processes


@dataclass(frozen=True)
class Shard:
    """Which entries of a tensor are here."""

    shape: torch.Size
    rank: int
    world: int

    @property
    def padded(self) -> int:
        """Return the entries per rank, filled up."""
        return -(-self.shape[0] // self.world) * self.shape[1:].numel()

    @property
    def part(self) -> slice:
        """Return the local entries of the flat tensor."""
        first = min(self.rank * self.padded, self.shape.numel())
        return slice(first, min(first + self.padded, self.shape.numel()))


class Shards:
    """The shards of all scored parameters, by place."""

    def __init__(self, shapes: Sequence[torch.Size], processes: Processes) -> None:
        self.processes = processes
        self.of = [Shard(shape, processes.rank, processes.world) for shape in shapes]

    def embed(self, place: int, x: Tensor) -> Tensor:
        """Return local entries ``[k, ...]`` in their place in whole tensors of zeros, ``[k, *shape]``."""
        shard = self.of[place]
        found = torch.zeros(len(x), shard.shape.numel(), dtype=x.dtype, device=x.device)
        found[:, shard.part] = x.reshape(len(x), -1)
        return found.view(len(x), *shard.shape)

    @torch.no_grad()
    def gather(self, some: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return whole tensors ``[k, *shape]`` by place from local entries ``[k, ...]``, in one call; all ranks ask together."""
        if not some:
            return {}
        flat = {i: x.reshape(len(x), -1) for i, x in some.items()}
        parts = [torch.nn.functional.pad(x, (0, self.of[i].padded - x.shape[1])).reshape(-1) for i, x in flat.items()]
        found = self.processes.all_gather("directions", torch.cat(parts))
        whole = {}
        for (i, x), part in zip(flat.items(), found.split([len(p) for p in parts], 1), strict=True):
            shape = self.of[i].shape
            rows = part.view(len(found), len(x), -1).transpose(0, 1).reshape(len(x), -1)
            whole[i] = rows[:, : shape.numel()].view(len(x), *shape)
        return whole

    def agree_(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give directions d ``[k, m]`` the form of q ``[m]``, in place: d ← q ⟨q, d⟩ / ‖q‖², tensor by tensor."""
        if not pairs:
            return
        sums = torch.stack([torch.cat([d.double() @ q.double(), q.double().square().sum().view(1)]) for q, d in pairs])
        sums = self.processes.all_reduced("products of shards", sums)
        for (q, d), (*products, square) in zip(pairs, sums, strict=True):
            norm = square.sqrt().clamp_min(torch.finfo(torch.float32).tiny)
            shares = torch.stack(products) / norm
            d.copy_((q / norm) * shares.unsqueeze(1))


class Gathered(Mapping[int, Tensor]):
    """Directions ``[k, *shape]`` by place, of which each rank has its rows; whole ones are here while they are needed."""

    def __init__(self, here: dict[int, Tensor], shards: Shards) -> None:
        self._here, self._shards = here, shards
        self._whole: dict[int, Tensor] = {}

    def __getitem__(self, place: int) -> Tensor:
        if place not in self._whole:
            self.gather([place])
        return self._whole[place]

    def __contains__(self, place: object) -> bool:
        return place in self._here

    def __iter__(self) -> Iterator[int]:
        return iter(self._here)

    def __len__(self) -> int:
        return len(self._here)

    def gather(self, places: Sequence[int]) -> None:
        """Gather some of them."""
        self._whole |= self._shards.gather({i: self._here[i] for i in places if i in self._here and i not in self._whole})

    def drop(self, kept: set[int]) -> None:
        """Let go of whole ones but for some."""
        self._whole = {i: x for i, x in self._whole.items() if i in kept}

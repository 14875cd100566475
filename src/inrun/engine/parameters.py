"""Which parameters are scored, and what steps them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from inrun.engine.flat import local
from inrun.engine.processes import Processes
from inrun.engine.readers import LeafReader
from inrun.engine.shards import Gathered, Shards
from inrun.errors import ConfigurationError, CoverageError
from inrun.layers.tap import Leaf


@dataclass(eq=False)
class Scored:
    """A scored parameter: its leaf, and its place among the optimizers and their groups."""

    leaf: Leaf
    place: int
    optimizer: int
    owner: torch.optim.Optimizer
    number: int

    @property
    def group(self) -> dict[str, Any]:
        """Return its group: ``load_state_dict`` of an optimizer makes new ones."""
        return self.owner.param_groups[self.number]

    @property
    def name(self) -> str:
        """Return its name in the model."""
        return self.leaf.name

    @property
    def parameter(self) -> nn.Parameter:
        """Return it."""
        return self.leaf.parameter  # type: ignore[return-value]

    @property
    def weights(self) -> Tensor:
        """Return its data, of which ``fully_shard`` leaves some rows on each rank."""
        return local(self.parameter.detach())

    @property
    def grad(self) -> Tensor | None:
        """Return its gradient as far as it is here, if it has one."""
        grad = self.parameter.grad
        return None if grad is None else local(grad)

    def state_of(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return its state in the optimizer as far as it is here."""
        state = optimizer.state.get(self.parameter, {})
        return {name: local(x) for name, x in state.items()} if hasattr(self.parameter, "to_local") else state


@dataclass(eq=False)
class Parameters:
    """All trainable parameters of a model: those that are scored, and leaves for all."""

    scored: list[Scored]
    leaves: list[Leaf]
    #: The processes that train them together, and how ``fully_shard`` splits them over these.
    processes: Processes = field(default_factory=Processes)
    shards: Shards | None = None

    @property
    def device(self) -> torch.device:
        """Return the device that scoring runs on."""
        return self.scored[0].parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of scores: float32, or float64 if a parameter is."""
        return torch.float64 if any(s.parameter.dtype == torch.float64 for s in self.scored) else torch.float32

    def precisions(self) -> list[torch.dtype]:
        """Return in which precision the gradient of each tensor is computed; where that is not known, the lowest that is."""
        own = [r.precision if isinstance(r := s.leaf.reader, LeafReader) else None for s in self.scored]
        lowest = min((d for d in own if d), key=lambda d: d.itemsize, default=None)
        each = [(s.parameter.dtype, d or lowest) for s, d in zip(self.scored, own, strict=True)]
        return [kept if d is None or kept.itemsize < d.itemsize else d for kept, d in each]

    def tensors(self) -> list[Tensor]:
        """Return the scored parameters."""
        return [s.parameter for s in self.scored]

    def gathered(self, directions: dict[int, Tensor]) -> Mapping[int, Tensor]:
        """Return directions as a backward contracts with them: whole."""
        return directions if self.shards is None else Gathered(directions, self.shards)

    def of(self, optimizer: int) -> list[Scored]:
        """Return the scored parameters of one optimizer."""
        return [s for s in self.scored if s.optimizer == optimizer]


def find_parameters(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], patterns: Sequence[str] | None) -> Parameters:
    """Return the trainable parameters of a model; scored are those that an optimizer has and a pattern names."""
    places: dict[nn.Parameter, tuple[int, torch.optim.Optimizer, int]] = {}
    for i, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if p in places:
                    raise ConfigurationError("a parameter is in two optimizers or groups. Give each parameter one optimizer.")
                places[p] = (i, optimizer, number)
    leaves = [
        Leaf(i, name.replace("_orig_mod.", ""), p)
        for i, (name, p) in enumerate((n, p) for n, p in model.named_parameters() if p.requires_grad)
    ]
    chosen = [
        leaf
        for leaf in leaves
        if leaf.parameter in places and (patterns is None or any(fnmatch.fnmatchcase(leaf.name, pattern) for pattern in patterns))
    ]
    # By optimizers and groups, so that the parameters of a group lie next to each other in flat vectors.
    chosen.sort(key=lambda leaf: places[leaf.parameter][::2])  # type: ignore[index]
    scored = []
    for place, leaf in enumerate(chosen):
        leaf.reader = LeafReader(leaf, place)
        scored.append(Scored(leaf, place, *places[leaf.parameter]))  # type: ignore[index]
    if not scored:
        known = ", ".join(leaf.name for leaf in leaves[:5]) or "none"
        raise CoverageError(
            "no trainable parameter of the model is in the optimizer"
            f"{'' if patterns is None else f' and matches {list(patterns)}'}. "
            f"Trainable are: {known}{' ...' if len(leaves) > 5 else ''}."
        )
    check_memory(scored)
    devices = {s.parameter.device for s in scored}
    if len(devices) > 1:
        raise ConfigurationError(
            f"scored parameters are on {len(devices)} devices ({', '.join(map(str, devices))}). Put them on one."
        )
    return Parameters(scored, leaves)


def check_memory(scored: Sequence[Scored]) -> None:
    """Raise for parameters whose values are not there, are complex, or lie where those of another one lie."""
    owners: dict[int, str] = {}
    for s in scored:
        if s.parameter.is_complex():
            raise ConfigurationError(
                f"{s.name} is complex, which is not scored. Make a real parameter and use torch.view_as_complex, or leave it out "
                "with parameters=."
            )
        if s.parameter.is_meta:
            raise ConfigurationError(f"{s.name} is on the meta device. Make the accountant when the weights are loaded.")
        where = s.weights.data_ptr()
        if where != 0 and owners.setdefault(where, s.name) != s.name:
            raise ConfigurationError(
                f"{s.name} and {owners[where]} are two parameters in the same memory, and each moves the other. Give both modules "
                "the same nn.Parameter."
            )


def table_places(model: nn.Module, parameters: Parameters) -> tuple[set[int], set[int]]:
    """Return the places of look-up tables, and of output vocabularies: matrices much higher than wide, or the last one."""
    place = {s.parameter: s.place for s in parameters.scored}
    tables, used = set[int](), set[int]()
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p in place:
                (tables if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else used).add(place[p])
    matrices = [s for s in parameters.scored if s.parameter.dim() == 2 and (s.place not in tables or s.place in used)]
    outputs = {s.place for s in matrices if s.parameter.shape[0] >= 8 * s.parameter.shape[1]}
    outputs |= {s.place for s in matrices[-1:] if s.parameter.shape[0] > s.parameter.shape[1]}
    outputs |= {i for i in tables & used if parameters.scored[i].parameter.shape[0] > parameters.scored[i].parameter.shape[1]}
    return tables, outputs

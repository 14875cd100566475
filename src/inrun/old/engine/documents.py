"""Packed documents: which positions of a microbatch belong to which document, from ids per position.

A *use* of a document is one run of its id in one row. The same id in another row, or again after other documents, is another
use, as a repeated id is where rows are samples; the books add them up.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inrun.errors import ConservationError, CoverageError, IdsError, RowOwnershipError
from inrun.old.engine.quiet import Arguments
from inrun.old.engine.sites import Site
from inrun.old.layers import GradientShape, Packing, packed
from inrun.old.layers.trees import tensors_of

#: What a chunk costs beside its positions, in positions: in the shared form every entry of a weight is read once more for it.
CHUNK_COST = 32


class Documents:
    """The documents of one microbatch.

    Args (of the constructor):
        ids: ``[n, t]`` on the host, −1 for positions that are nobody's.
        device: Where the batch is.
    """

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        """Find the runs of ids and cut them into chunks."""
        rows, length = ids.shape
        new = torch.ones(rows, length, dtype=torch.bool)
        new[:, 1:] = ids[:, 1:] != ids[:, :-1]
        flat = ids.reshape(-1)
        starts = torch.nonzero(new.reshape(-1)).flatten()
        sizes = torch.diff(starts, append=torch.tensor([flat.numel()]))
        named = flat[starts] >= 0
        starts, sizes = starts[named], sizes[named]
        #: The id of every use, ``[U]``; on the host.
        self.ids = flat[starts]
        size = chunk_length(sizes)
        places = _places(starts, sizes, size)
        self.packing = Packing(rows, length, len(starts), len(places), size)
        #: The document of every position, −1 for nobody, ``[n · t]``; the first on the host.
        self.unit_on_host = torch.full((flat.numel(),), -1)
        self.unit_on_host[flat >= 0] = torch.repeat_interleave(torch.arange(len(starts)), sizes)
        self.unit = self.unit_on_host.to(device)
        #: As the seam takes them: see ``layers.packed.Packing``; and the positions that are nobody's.
        self.places = places.to(device)
        self.nobody = torch.nonzero(flat < 0).flatten().to(device)

    @property
    def owner(self) -> Tensor | None:
        """Return the document of every chunk, ``[chunks]``; None where every document is one chunk."""
        return None if self.packing.chunks == self.packing.documents else self.places[:, 0]

    def gather(self, shape: GradientShape) -> GradientShape:
        """Turn gradients that were kept by chunk into those of documents (formed ones are kept by document)."""
        if self.owner is None or shape.summable:
            return shape
        return packed(shape, self.owner.to(shape.parts()[0].device), self.packing.documents)

    # What cannot be scored, by name

    def check_batch(self, arguments: Arguments) -> None:
        """Raise unless some tensor the model was called with has one entry per id."""
        shapes = [x.shape for x in tensors_of(arguments) if x.dim() > 0]
        if shapes and all(self.packing.features(shape) is None for shape in shapes):
            raise IdsError(
                f"got ids of packed documents of shape {self._shape}, but the model was called with tensors of shapes "
                f"{sorted({tuple(s) for s in shapes})}, none of which has these positions. Give one id per position that the "
                "model sees (ids[:, :-1] where the last token is only a label), or one id per row."
            )

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.packing.rows, self.packing.length)

    def check_call(self, site: Site, shape: torch.Size) -> None:
        """Raise unless a module with a rule treats every position by itself and got (or returned) all of them."""
        if not site.rule.positionwise:
            raise CoverageError(
                f"{site.title} cannot be scored for packed documents: its rule ({site.rule.label}) knows rows, not positions. "
                "Freeze it, give one document per row, or give one id per row."
            )
        features = self.packing.features(shape)
        if features is None:
            raise RowOwnershipError(_no_positions(site, shape, self._shape))
        if not site.rule.by_position(site.module, len(features)):
            raise CoverageError(
                f"{site.title} cannot be scored for packed documents: it works on a tensor of shape {tuple(shape)} over the "
                f"{self._shape[1]} positions together, and documents share them. Let it work on the {len(features)} dimensions "
                "behind the positions, freeze it, or give one id per row."
            )

    def check_output(self, site: Site, b: Tensor) -> None:
        """The same for gradient that came through an output of a module without a rule."""
        if self.packing.features(b.shape) is None:
            raise RowOwnershipError(_no_positions(site, b.shape, self._shape))
        self.check_nobody(float(self.packing.by_position(b)[self.nobody].abs().sum()))

    def check_nobody(self, size: float) -> None:
        """Raise if gradient came through positions that are nobody's; infinities are dealt with by the step."""
        if size != 0.0 and math.isfinite(size):
            raise ConservationError(
                f"{len(self.nobody)} positions have the id -1, nobody's, and gradient flows through them: they are in the loss, or "
                "documents attend to them. What they did would be in nobody's books. Mask them out (labels of -100, an attention "
                "mask), or give them an id of their own."
            )


def _no_positions(site: Site, shape: torch.Size, wanted: tuple[int, int]) -> str:
    return (
        f"{site.title} works on a tensor of shape {tuple(shape)}, which does not have the {wanted[0]} x {wanted[1]} positions of "
        "the packed documents in front (a pooled head, added or selected tokens?), so that they cannot be told apart there. "
        "Give one document per row, or one id per row if rows are meant."
    )


def chunk_length(sizes: Tensor) -> int:
    """Choose the length of chunks for documents of these sizes: the least positions, with what every chunk costs beside."""
    longest = int(sizes.max())
    choices = sorted({max(1, math.ceil(longest / 2 ** (j / 2))) for j in range(2 * longest.bit_length() + 1)})
    chunks = torch.stack([((sizes + choice - 1) // choice).sum() for choice in choices])
    cost = chunks * (torch.tensor(choices) + CHUNK_COST)
    return choices[int(cost.argmin())]


def _places(starts: Tensor, sizes: Tensor, size: int) -> Tensor:
    """Return document and positions of every chunk, ``[chunks, 1 + size]``, −1 where a chunk is filled up."""
    counts = (sizes + size - 1) // size
    owner = torch.repeat_interleave(torch.arange(len(starts)), counts)
    number = torch.arange(len(owner)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    within = number.unsqueeze(1) * size + torch.arange(size)
    places = torch.where(within < sizes[owner].unsqueeze(1), starts[owner].unsqueeze(1) + within, -1)
    return torch.cat([owner.unsqueeze(1), places], dim=1)

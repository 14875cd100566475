"""Do packed documents see each other? Verified, not assumed, like the rows.

The forward is run again, without gradient, with the content of some documents exchanged: at every observed module only positions
of those may move. Half of the documents are exchanged at a time, every other one at first, so that two forwards show whether
neighbours see each other; later looks take other halves, and in the end any two documents were once told apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from inrun.errors import RowOwnershipError
from inrun.old.engine.checks.recorder import Entry, Recorder, moved_rows
from inrun.old.engine.documents import Documents
from inrun.old.engine.quiet import Arguments
from inrun.old.engine.sites import Site
from inrun.old.layers import Packing
from inrun.old.layers.layout import Pattern, pattern_of
from inrun.old.layers.trees import flatten, tensors_of, unflatten

log = logging.getLogger("inrun")
#: Steps between two looks at a packing that was verified before (audited steps look anyway).
LOOK_AGAIN = 100


class DocumentCheck:
    """Verifies that documents of one row do not see each other; looks again now and then."""

    def __init__(self, run: Callable[[Arguments, Recorder], Any], enabled: bool) -> None:
        """``enabled=False`` takes the user's word."""
        self.run, self.enabled = run, enabled
        self._verified: set[Pattern] = set()
        #: Calls that looks have shown.
        self._shown: set[tuple[Site, Pattern]] = set()
        self._looked: int | None = None
        self._looks = 0
        #: The running forward took a way that no look has shown.
        self._new = False

    def note(self, site: Site, shape: torch.Size, packing: Packing) -> None:
        """Note a call of the user's own forward."""
        self._new = self._new or (site, pattern_of(shape, packing.rows)) not in self._shown

    def before_forward(self, arguments: Arguments, documents: Documents, step: int, audited: bool) -> None:
        """Verify the forward that is about to run, if its shapes are new or it is time to look again."""
        self._new = False
        if not self.enabled or documents.packing.documents == 1:
            return
        pattern = tuple(pattern_of(x.shape, documents.packing.rows) for x in tensors_of(arguments))
        early = step < 4 or step & (step - 1) == 0
        again = self._looked is None or (self._looked != step and (audited or early or step - self._looked >= LOOK_AGAIN))
        if pattern in self._verified and not again:
            return
        first = pattern not in self._verified
        if self._look(arguments, documents, both=first):
            self._verified.add(pattern)
            self._looked = step

    def after_forward(self, arguments: Arguments, documents: Documents) -> None:
        """Verify the forward that has just run, if it went a way that no look had shown."""
        if self._new and self.enabled and documents.packing.documents > 1:
            self._look(arguments, documents, both=True)

    def _look(self, arguments: Arguments, documents: Documents, both: bool) -> bool:
        """Exchange half of the documents, or one half and then the other; return whether an exchange could be made."""
        packing = documents.packing
        base = self._record(arguments, packing)
        self._shown |= {(e.site, pattern_of(e.shape, packing.rows)) for e in base if e.site is not None}
        bits = max(1, (packing.documents - 1).bit_length())
        half = (torch.arange(packing.documents) >> (self._looks // 2 % bits)) & 1 == self._looks % 2
        self._looks += 1
        seen = False
        for chosen in (half, ~half) if both else (half,):
            other = exchange_documents(arguments, documents, chosen)
            if other is not None:
                seen = True
                self._compare(base, self._record_exchanged(other, packing), documents, chosen)
        if not seen:
            log.info("inrun: no document of this batch could be exchanged; documents will be verified at a later step")
        return seen

    def _record(self, arguments: Arguments, packing: Packing) -> list[Entry]:
        recorder = Recorder(packing=packing)
        self.run(arguments, recorder)
        return recorder.entries

    def _record_exchanged(self, arguments: Arguments, packing: Packing) -> list[Entry]:
        try:
            return self._record(arguments, packing)
        except RowOwnershipError:
            raise
        except Exception as error:
            raise RowOwnershipError(
                "the model failed when tokens of some documents changed places, so that it cannot be verified that documents do "
                f"not see each other ({type(error).__name__}: {str(error).strip()}). Pass check_rows=False to vouch for it, or "
                "give one id per row."
            ) from error

    @staticmethod
    def _compare(base: list[Entry], after: list[Entry], documents: Documents, chosen: Tensor) -> None:
        """Raise if positions moved that belong to documents that were not exchanged; nobody's may."""
        if [(e.site, e.shape) for e in base] != [(e.site, e.shape) for e in after]:
            raise RowOwnershipError(
                "the modules the forward calls change when tokens of documents are exchanged; documents cannot be told apart"
            )
        unit = documents.unit_on_host
        others = (unit >= 0) & ~chosen[unit.clamp(min=0)]
        for entry, now in zip(base, after, strict=True):
            if entry.argument is not None or entry.site is None:
                continue
            moved = moved_rows(entry.rows, now.rows).cpu()
            if len(moved) != len(unit) or documents.packing.features(entry.shape) is None:
                if entry.output is None and bool(moved.any()):
                    documents.check_call(entry.site, entry.shape)
                continue
            bad = moved & others
            if bool(bad.any()):
                raise RowOwnershipError(_message(entry, bad, documents, chosen))


def _message(entry: Entry, bad: Tensor, documents: Documents, chosen: Tensor) -> str:
    assert entry.site is not None
    place = int(torch.nonzero(bad)[0])
    row, position = divmod(place, documents.packing.length)
    document = int(documents.ids[documents.unit_on_host[place]])
    same_row = documents.unit_on_host.view(documents.packing.rows, -1)[row].unique()
    causes = [int(documents.ids[u]) for u in same_row.tolist() if u >= 0 and bool(chosen[u])]
    return (
        f"documents see each other at {entry.site.title}: when tokens of documents {causes[:5]} were exchanged, document "
        f"{document} moved too (row {row}, position {position}), so that what one document taught cannot be told from the other. "
        "Keep them apart (a block-diagonal attention mask; position ids that restart, where the model makes the mask from them; "
        "cu_seqlens), or give one id per row, if the row and not the document is the sample."
    )


def exchange_documents(arguments: Arguments, documents: Documents, chosen: Tensor) -> Arguments | None:
    """Return the arguments with the content of ``chosen`` documents ``[U]`` exchanged; None if that changes nothing.

    Inside a document, entries move by one place and one becomes another, since what sees their sum or mean (attention without
    positions, statistics) does not see them move; a document of equal entries takes another's. What tells where documents lie
    stays: position ids, masks, numbers of documents, separators.
    """
    leaves, structure = flatten(arguments)
    given = [isinstance(x, Tensor) and _is_content(x, documents) for x in leaves]
    apart = [g and not _few_values(x) for x, g in zip(leaves, given, strict=True)]
    mine = apart if any(apart) else given
    swapped = [_exchange(x, documents, chosen) if m else x for x, m in zip(leaves, mine, strict=True)]
    changed = any(m and not torch.equal(x, y) for x, y, m in zip(leaves, swapped, mine, strict=True))
    return unflatten(swapped, structure) if changed else None


def _few_values(x: Tensor) -> bool:
    return not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())


def _is_content(x: Tensor, documents: Documents) -> bool:
    """Whether a tensor has positions and tells more than where documents lie: constant or counting in every document."""
    features = documents.packing.features(x.shape)
    if features is None or x.dtype == torch.bool:
        return False
    return len(features) > 0 or not _constant_or_counting(x, documents)


def _constant_or_counting(x: Tensor, documents: Documents) -> bool:
    flat, unit = documents.packing.by_position(x).cpu(), documents.unit_on_host
    inside = (unit[1:] == unit[:-1]) & (unit[1:] >= 0)
    steps = (flat[1:] - flat[:-1])[inside]
    return bool((steps == 0).all()) or bool((steps == 1).all())


def _separators(flat: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Return the entries that all documents begin, or all end with, as far as they are more than one."""
    found = [flat[at] for at in (first, last) if len(at) > 1 and bool((flat[at] == flat[at[0]]).all())]
    return torch.unique(torch.cat(found)) if found else flat[:0]


def _exchange(x: Tensor, documents: Documents, chosen: Tensor) -> Tensor:
    """Move entries by one place inside the chosen documents, and change one; separators stay."""
    flat, unit = documents.packing.by_position(x.detach()).clone(), documents.unit_on_host
    places = torch.nonzero(unit >= 0).flatten()
    starts = places[torch.diff(unit[places], prepend=torch.tensor([-1])) != 0]
    ends = starts + torch.bincount(unit[places], minlength=documents.packing.documents) - 1
    free = unit >= 0
    if flat.dim() == 1:
        free &= ~torch.isin(flat.cpu(), _separators(flat.cpu(), starts, ends))
    before = flat[torch.nonzero(free).flatten().to(flat.device)]
    for u in torch.nonzero(chosen).flatten().tolist():
        mine = torch.nonzero((unit == u) & free).flatten().to(flat.device)
        new = flat[mine].roll(1, 0)
        if len(mine) and torch.equal(new, flat[mine]):
            other = torch.nonzero(free & (unit != u)).flatten().to(flat.device)
            differs = (flat[other] != flat[mine[0]]).reshape(len(other), -1).any(1)
            new = flat[other[differs][:1]].expand_as(new) if bool(differs.any()) else new
        elif len(mine):
            differs = (before != new[0]).reshape(len(before), -1).any(1)
            new[0] = before[differs][0]
        flat[mine] = new
    return flat.view(x.shape)

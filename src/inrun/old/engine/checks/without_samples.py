"""Calls that no sample moves: position embeddings, learned queries, and what looks like them."""

from __future__ import annotations

from inrun.errors import RowOwnershipError
from inrun.old.engine.checks.look import Look, UnfollowedError, free_message
from inrun.old.engine.checks.movement import chosen, entry_of, possible_layouts
from inrun.old.engine.checks.recorder import Entry
from inrun.old.layers import Layout
from inrun.old.layers.layout import SHARED, pattern_of


def constant_layout(look: Look, index: int, entry: Entry) -> Layout:
    """Decide about an input that no sample moves: disturb one row of the output and see whose rows move.

    Position indices of shape [t] with t = n look like one row per sample; a disturbed position moves all samples. Copies of a
    parameter, one per sample, are seen to be the samples' when one of them is disturbed.
    """
    assert entry.site is not None
    n = look.n
    if (entry.site, pattern_of(entry.shape, n)) in look.passes.apart:
        return "apart"
    if entry.output is not None:
        if look.seen:  # refused when gradient comes through it
            entry.site.note_shared_output(entry.output)
        return "rows"
    if look.by_copies[index]:
        return chosen(look.by_copies[index] or set(), None)
    if entry.shape[0] == n and not look.seen:
        return "rows"
    if entry.site.rule.reads:
        refusal = RowOwnershipError(free_message(entry.site.title, n))
        raise UnfollowedError([entry.site], f"no sample moves what its parameters meet, of shape {tuple(entry.shape)}", refusal)
    if entry.shape[0] != n:
        return "free"
    for row in (0, n - 1):  # the first position of a causal model may show nothing
        any_moved, alone = look.moves(*look.repeat(disturb=index, row=row), row, calls=False)
        if any_moved:
            return "rows" if alone else "free"
    raise RowOwnershipError(
        f"{entry.site.name} gets an input of shape {tuple(entry.shape)} that no sample changes, and nothing shows whether "
        f"its {n} rows are samples; call it with another leading size than the batch, or let the model return its logits"
    )


def find_bare(look: Look, layouts: list[Layout | None]) -> frozenset[int]:
    """Return those of the calls without samples whose leading dimension of 1 is no batch of one."""
    free = {i for i, x in enumerate(layouts) if x in SHARED and x != "apart"}
    if not free:
        return frozenset()
    maybe = frozenset(i for i in free if look.base[i].shape[0] == 1)
    try:
        _check_expansion(look, free, frozenset())
    except RowOwnershipError:
        if not maybe:
            raise
        _check_expansion(look, free, maybe)
        return maybe
    return frozenset()


def _check_expansion(look: Look, free: set[int], bare: frozenset[int]) -> None:
    """See that giving batch-free outputs one copy per sample changes no shape elsewhere."""
    n, base = look.n, look.base
    names = ", ".join(sorted({site.name for i in free if (site := base[i].site) is not None}))
    try:
        recorder, after_outputs = look.repeat(expand=(free, n), bare=bare)
    except Exception as error:
        raise RowOwnershipError(free_message(names, n) + f" (the expanded forward failed: {error})") from error
    after = recorder.entries
    same = len(after) == len(base) and all(
        a.site is b.site and a.shape == b.shape and possible_layouts(b, a, n, 0) is None for a, b in zip(after, base, strict=True)
    )
    if not same or [x.shape for x in after_outputs] != [x.shape for x in look.outputs]:
        raise RowOwnershipError(free_message(names, n))
    # Equal copies hide whose copy is used: change one sample's, and only its rows may move.
    for row in (0, n - 1):
        recorder, disturbed = look.repeat(expand=(free, n), bare=bare, disturb_copy=True, row=row)
        if len(recorder.entries) != len(base):
            raise RowOwnershipError(free_message(names, n))
        calls = zip(base, recorder.entries, look.possible, strict=True)
        pairs = [(b, a, p) for b, a, p in calls if b.argument is None and b.shape == a.shape]
        results = zip(look.outputs, disturbed, look.possible_outputs, strict=True)
        pairs += [(entry_of(b), entry_of(a), p) for b, a, p in results if b.dim()]
        for before, now, known in pairs:
            found = possible_layouts(before, now, n, row, anywhere=True)
            if found is None or not (known or before.shape[0] % n == 0):
                continue
            if not found or (known and not found & known):
                raise RowOwnershipError(free_message(names, n))

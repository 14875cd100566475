"""Look back at a run: score its samples for validation data that arrived after it began."""

#: Steps can be guessed at from saved states: the line between two, the nearest, or the one before (see ``viewpoints``).
PINNED = ("interpolate", "nearest", "before")
#: Or they are taken again exactly, by training on from a saved state.
MODES = ("exact", *PINNED)

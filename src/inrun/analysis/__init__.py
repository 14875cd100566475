"""Questions to a ledger: queries, summaries, curation, shares. Reads, and never writes to a run. Imports no torch."""

from inrun.analysis.summary import Summary, summarise, summarise_run

__all__ = ["Summary", "summarise", "summarise_run"]

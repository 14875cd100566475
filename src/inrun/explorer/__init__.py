"""The explorer: all samples of live or finished runs in a browser, straight from their ledgers. Imports no torch.

    ledger ──► reading.py (what is new) ──► snapshot.py (added up in a DuckDB file of our own) ──► pages.py, pictures.py (answers)
                                                                                    guard.py ──► app.py ──► the browser

The ledger is only read. Marks are ours (``marks.py``); who may ask is decided in one place (``guard.py``).
"""

from inrun.explorer.marks import MarkBook
from inrun.explorer.snapshot import Snapshot, Store

__all__ = ["MarkBook", "Snapshot", "Store"]

"""The books: what every step gave every sample. Imports no torch."""

from inrun.ledger.disk import Ledger, LedgerReader
from inrun.ledger.memory import MemoryLedger
from inrun.ledger.record import SIGN, UNIT, LedgerWriter, StepRecord
from inrun.ledger.summary import Summary, read_run, summarise

__all__ = [
    "SIGN",
    "UNIT",
    "Ledger",
    "LedgerReader",
    "LedgerWriter",
    "MemoryLedger",
    "StepRecord",
    "Summary",
    "read_run",
    "summarise",
]

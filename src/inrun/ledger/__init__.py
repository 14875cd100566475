"""The ledger: what every step gave every sample, on disk or in memory. Imports no torch."""

from inrun.ledger.about import credit_of, method_of
from inrun.ledger.labels import Label
from inrun.ledger.memory import MemoryLedger
from inrun.ledger.reader import LedgerReader
from inrun.ledger.record import SIGN, UNIT, LedgerWriter, SettledCredits, Skip, StepRecord
from inrun.ledger.writer import Ledger

__all__ = [
    "SIGN",
    "UNIT",
    "Label",
    "Ledger",
    "LedgerReader",
    "LedgerWriter",
    "MemoryLedger",
    "SettledCredits",
    "Skip",
    "StepRecord",
    "credit_of",
    "method_of",
]

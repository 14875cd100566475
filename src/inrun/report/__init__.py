"""The report: one HTML page about a run. Imports no torch and needs no model."""

from inrun.report.build import build_report
from inrun.report.page import ReportError

__all__ = ["ReportError", "build_report"]

"""Figures, an HTML page and README tables from result files."""

from flash_helpers.report.command import write_report
from flash_helpers.report.readme import update_readme

__all__ = ["update_readme", "write_report"]

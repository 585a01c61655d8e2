"""A report: what some runs found, as one HTML file that needs nothing else."""

from __future__ import annotations

from dropmax.lab.report.page import make_report

__all__ = ["make_report"]

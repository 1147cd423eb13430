"""Explanation of misses: why blocks were not found, and where those that were came from."""

from kvxfer.explain.answer import Answer
from kvxfer.explain.report import Report, Run, explain

__all__ = ["Answer", "Report", "Run", "explain"]

"""Explanation of misses: why blocks were not found, and which tiers gave those that were."""

from kvxfer.explain.answer import Answer
from kvxfer.explain.report import Report, Run, explain

__all__ = ["Answer", "Report", "Run", "explain"]

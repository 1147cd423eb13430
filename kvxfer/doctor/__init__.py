"""Examination of a machine and its stores and peers, and comparison of two engines."""

from kvxfer.doctor.configuration import environment_backends, read_backends, read_hash_name
from kvxfer.doctor.examination import MAX_TIMEOUT_S, Check, examine, plan_checks, run_checks
from kvxfer.doctor.finding import Finding, Severity, error, ok, warning
from kvxfer.doctor.places import require_openable
from kvxfer.doctor.sharing import compare, is_comparable

__all__ = [
    "MAX_TIMEOUT_S",
    "Check",
    "Finding",
    "Severity",
    "compare",
    "environment_backends",
    "error",
    "examine",
    "is_comparable",
    "ok",
    "plan_checks",
    "read_backends",
    "read_hash_name",
    "require_openable",
    "run_checks",
    "warning",
]

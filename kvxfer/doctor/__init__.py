"""Examination of a machine and its stores and peers, and comparison of two engines."""

from kvxfer.doctor.configuration import (
    environment_backends,
    read_backends,
    read_hash_name,
)
from kvxfer.doctor.examination import PlannedCheck, examine, run_checks, sort_findings
from kvxfer.doctor.finding import Check, Finding, Result, Severity, error, ok, warning
from kvxfer.doctor.machine import (
    check_cpus,
    check_cuda,
    check_hash_seed,
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_nixl,
    check_open_files,
    check_packages,
    check_plugin,
    check_shared_memory,
    check_vllm,
)
from kvxfer.doctor.places import (
    check_direct_io,
    check_folder,
    check_inodes,
    check_io_uring,
    check_medium,
    check_peer,
    check_secret,
    check_space,
)
from kvxfer.doctor.sharing import compare, is_comparable

__all__ = [
    "Check",
    "Finding",
    "PlannedCheck",
    "Result",
    "Severity",
    "check_cpus",
    "check_cuda",
    "check_direct_io",
    "check_folder",
    "check_hash_seed",
    "check_huge_pages",
    "check_inodes",
    "check_io_uring",
    "check_locked_memory",
    "check_medium",
    "check_memory",
    "check_nixl",
    "check_open_files",
    "check_packages",
    "check_peer",
    "check_plugin",
    "check_secret",
    "check_shared_memory",
    "check_space",
    "check_vllm",
    "compare",
    "environment_backends",
    "error",
    "examine",
    "is_comparable",
    "ok",
    "read_backends",
    "read_hash_name",
    "run_checks",
    "sort_findings",
    "warning",
]

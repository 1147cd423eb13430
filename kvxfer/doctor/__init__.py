"""Examination of a machine and its stores and peers, and comparison of two engines."""

from kvxfer.doctor.configuration import (
    environment_backends,
    read_backends,
    read_hash_name,
)
from kvxfer.doctor.examination import PlannedCheck, examine, run_checks, sort_findings
from kvxfer.doctor.finding import Check, Examined, Finding, Severity
from kvxfer.doctor.memory import check_huge_pages, check_memory, check_shared_memory
from kvxfer.doctor.packages import (
    check_cuda,
    check_nixl,
    check_packages,
    check_plugin,
    check_vllm,
)
from kvxfer.doctor.peers import check_peer
from kvxfer.doctor.process import (
    check_cpus,
    check_hash_seed,
    check_locked_memory,
    check_open_files,
)
from kvxfer.doctor.sharing import compare, is_comparable
from kvxfer.doctor.stores import (
    check_direct_io,
    check_folder,
    check_inodes,
    check_io_uring,
    check_medium,
    check_secret,
    check_space,
)

__all__ = [
    "Check",
    "Examined",
    "Finding",
    "PlannedCheck",
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
    "examine",
    "is_comparable",
    "read_backends",
    "read_hash_name",
    "run_checks",
    "sort_findings",
]

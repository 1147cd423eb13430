"""Maintenance of a store, behind the commands `kvxfer fsck`, `gc`, `inspect` and `ls`."""

from kvxfer.backends.file.maintenance.fsck import BlockCheck, Finding, StoreCheck, Verdict
from kvxfer.backends.file.maintenance.gc import GarbageCollection, RemovedCounts
from kvxfer.backends.file.maintenance.inspect import Inspection, inspect_file
from kvxfer.backends.file.maintenance.ls import NamespaceUsage, measure_usage

__all__ = [
    "BlockCheck",
    "Finding",
    "GarbageCollection",
    "Inspection",
    "NamespaceUsage",
    "RemovedCounts",
    "StoreCheck",
    "Verdict",
    "inspect_file",
    "measure_usage",
]

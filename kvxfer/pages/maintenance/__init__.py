"""Maintenance of a store, behind the commands `kvxfer fsck`, `gc`, `inspect` and `ls`."""

from kvxfer.pages.maintenance.block_store import BlockStore, OpenBlock, StoredNamespace
from kvxfer.pages.maintenance.fsck import BlockCheck, StoreCheck, Verdict
from kvxfer.pages.maintenance.gc import GarbageCollection, RemovedCounts
from kvxfer.pages.maintenance.inspect import Inspection, inspect_file, split_path
from kvxfer.pages.maintenance.ls import NamespaceUsage, measure_usage

__all__ = [
    "BlockCheck",
    "BlockStore",
    "GarbageCollection",
    "Inspection",
    "NamespaceUsage",
    "OpenBlock",
    "RemovedCounts",
    "StoreCheck",
    "StoredNamespace",
    "Verdict",
    "inspect_file",
    "measure_usage",
    "split_path",
]

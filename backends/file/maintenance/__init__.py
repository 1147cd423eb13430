"""Maintenance of a store, behind the commands `kvxfer fsck`, `gc`, `inspect` and `ls`."""

from kvxfer.backends.file.maintenance.block_store import (
    DESCRIPTIONS,
    BlockStore,
    OpenBlock,
    OtherEntry,
    StoredNamespace,
)
from kvxfer.backends.file.maintenance.folder_store import FolderStore
from kvxfer.backends.file.maintenance.fsck import BlockCheck, Finding, StoreCheck, Verdict
from kvxfer.backends.file.maintenance.gc import GarbageCollection, RemovedCounts
from kvxfer.backends.file.maintenance.inspect import Inspection, inspect_file, split_path
from kvxfer.backends.file.maintenance.ls import NamespaceUsage, measure_usage

__all__ = [
    "DESCRIPTIONS",
    "BlockCheck",
    "BlockStore",
    "Finding",
    "FolderStore",
    "GarbageCollection",
    "Inspection",
    "NamespaceUsage",
    "OpenBlock",
    "OtherEntry",
    "RemovedCounts",
    "StoreCheck",
    "StoredNamespace",
    "Verdict",
    "inspect_file",
    "measure_usage",
    "split_path",
]

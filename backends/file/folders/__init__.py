"""Folders of a store, and the small files in them: texts, claims and the ledger."""

from kvxfer.backends.file.folders.block_tree import BlockTree, refuse_partial_walk
from kvxfer.backends.file.folders.ledger import Ledger
from kvxfer.backends.file.folders.namespace_folder import NamespaceFolder

__all__ = ["BlockTree", "Ledger", "NamespaceFolder", "refuse_partial_walk"]

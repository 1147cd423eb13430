"""File backend: blocks in safetensors files."""

from kvxfer.backends.file.backend import FileBackend
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.folders import BlockTree, FoundBlock, refuse_partial_walk
from kvxfer.backends.file.folders.ledger import read_count
from kvxfer.backends.file.folders.namespace_file import load_namespace, read_namespaces
from kvxfer.pages.digest import Digester
from kvxfer.pages.header import BlockFileError, BlockHeader
from kvxfer.storage.integrity import Integrity

__all__ = [
    "BlockFileError",
    "BlockHeader",
    "BlockTree",
    "Digester",
    "FileBackend",
    "FileConfig",
    "FoundBlock",
    "Integrity",
    "load_namespace",
    "read_count",
    "read_namespaces",
    "refuse_partial_walk",
]

"""File backend: blocks in safetensors files."""

from kvxfer.backends.file.backend import FileBackend
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.folders import BlockTree, refuse_partial_walk
from kvxfer.backends.file.folders.ledger import read_count
from kvxfer.pages.digest import Digester
from kvxfer.storage.integrity import Integrity

__all__ = [
    "BlockTree",
    "Digester",
    "FileBackend",
    "FileConfig",
    "Integrity",
    "read_count",
    "refuse_partial_walk",
]

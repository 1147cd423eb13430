"""Blocks in files."""

from kvxfer.backends.file.backend import FileBackend
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.digest import Digester, Integrity
from kvxfer.backends.file.header import BlockFileError, BlockHeader
from kvxfer.backends.file.tree import BlockTree, FoundBlock

__all__ = [
    "BlockFileError",
    "BlockHeader",
    "BlockTree",
    "Digester",
    "FileBackend",
    "FileConfig",
    "FoundBlock",
    "Integrity",
]

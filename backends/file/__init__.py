"""File backend: blocks in safetensors files."""

from kvxfer.backends.file.backend import FileBackend
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.digest import Digester
from kvxfer.backends.file.header import BlockFileError, BlockHeader
from kvxfer.backends.file.tree import BlockTree, FoundBlock
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
]

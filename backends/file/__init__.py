"""File backend: blocks in safetensors files."""

from kvxfer.backends.file.backend import FileBackend
from kvxfer.backends.file.config import FileConfig
from kvxfer.backends.file.folders.block_tree import BlockTree, FoundBlock, refuse_partial_walk
from kvxfer.backends.file.folders.namespace_file import load_namespace
from kvxfer.backends.file.format.digest import Digester
from kvxfer.backends.file.format.header import BlockFileError, BlockHeader
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
    "refuse_partial_walk",
]

"""Engines that move bytes between files and memory, and the choice of one for a machine."""

from kvxfer.backends.file.io.file_io import FileIO, IOVector, NamedFile, NewFile, Result
from kvxfer.backends.file.io.selection import EngineName, open_engine, probe_direct
from kvxfer.backends.file.io.uring import UringFileIO

__all__ = [
    "EngineName",
    "FileIO",
    "IOVector",
    "NamedFile",
    "NewFile",
    "Result",
    "UringFileIO",
    "open_engine",
    "probe_direct",
]

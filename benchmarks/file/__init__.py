"""Benchmark `make bench NAME=file`: blocks in files on a disk."""

from benchmarks.file.cases import FOLDER_VARIABLE, run

__all__ = ["FOLDER_VARIABLE", "run"]

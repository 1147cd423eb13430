"""Benchmark `kvxfer bench file`: blocks in files on a disk."""

from kvxfer.bench.file.cases import FOLDER_VARIABLE, run

__all__ = ["FOLDER_VARIABLE", "run"]

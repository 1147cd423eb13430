"""Benchmarks `kvxfer bench NAME`: each speed claim as a ratio to a baseline of the same run."""

from kvxfer.bench.command import main

__all__ = ["main"]

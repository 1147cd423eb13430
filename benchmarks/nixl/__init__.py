"""Benchmark `make bench NAME=nixl`: blocks at a peer."""

from benchmarks.nixl.cases import run

__all__ = ["run"]

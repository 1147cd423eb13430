"""Benchmark `kvxfer bench nixl`: blocks at a peer."""

from kvxfer.bench.nixl.cases import run

__all__ = ["run"]

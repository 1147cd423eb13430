"""Benchmark `make bench NAME=vllm`: a real engine, with and without offloading."""

from benchmarks.vllm.cases import run

__all__ = ["run"]

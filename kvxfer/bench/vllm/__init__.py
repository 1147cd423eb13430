"""Benchmark `kvxfer bench vllm`: a real engine, with and without offloading."""

from kvxfer.bench.vllm.cases import run

__all__ = ["run"]

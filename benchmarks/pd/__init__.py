"""Benchmark `make bench NAME=pd`: prompts handed from prefill to decode engines."""

from benchmarks.pd.engines import run

__all__ = ["run"]

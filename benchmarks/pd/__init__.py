"""Benchmark `make bench NAME=pd`: blocks of prompts handed from prefill to decode engines."""

from benchmarks.pd.cases import run

__all__ = ["run"]

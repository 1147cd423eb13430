"""Benchmark `kvxfer bench pd`: blocks of prompts handed from prefill to decode engines."""

from kvxfer.bench.pd.cases import run

__all__ = ["run"]

"""Blocks on their way: the transfer engine, its polled face, and jobs."""

from kvxfer.transfer.engine import PolledEngine, TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from kvxfer.transfer.load_or_compute import LoadOrCompute

__all__ = ["FinishedJob", "JobId", "LoadOrCompute", "PolledEngine", "TransferEngine"]

"""Transfer of blocks: the transfer engine, its polled interface, and jobs."""

from kvxfer.transfer.engine import PolledEngine, TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from kvxfer.transfer.load_or_compute import LoadOrCompute

__all__ = ["FinishedJob", "JobId", "LoadOrCompute", "PolledEngine", "TransferEngine"]

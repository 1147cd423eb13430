"""Batches of blocks on their way: the transfer engine and its jobs."""

from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId

__all__ = ["FinishedJob", "JobId", "TransferEngine"]

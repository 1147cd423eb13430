"""Batches of blocks on their way: the transfer engine, its polled face, and jobs."""

from kvxfer.transfer.begun_jobs import Slices
from kvxfer.transfer.engine import TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from kvxfer.transfer.polled_engine import PolledEngine

__all__ = ["FinishedJob", "JobId", "PolledEngine", "Slices", "TransferEngine"]

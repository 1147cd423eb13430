"""Blocks on their way: the transfer engine, its polled face, jobs, and exchanges of prompts."""

from kvxfer.transfer.engine import PolledEngine, TransferEngine
from kvxfer.transfer.job import FinishedJob, JobId
from kvxfer.transfer.load_or_compute import LoadOrCompute
from kvxfer.transfer.mover import Slices
from kvxfer.transfer.prompt_exchange import PromptExchange
from kvxfer.transfer.reader import Fetched

__all__ = [
    "Fetched",
    "FinishedJob",
    "JobId",
    "LoadOrCompute",
    "PolledEngine",
    "PromptExchange",
    "Slices",
    "TransferEngine",
]

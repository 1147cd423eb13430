"""`kvxfer bench NAME`: every speed claim, as a ratio against something measured beside it."""

from kvxfer.bench.command import main

__all__ = ["main"]

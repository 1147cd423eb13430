"""Hand-over of prompts between engines: blocks are offered under tickets, read, and released."""

from kvxfer.lending.prompt_exchange import PromptExchange
from kvxfer.lending.reader import Fetched

__all__ = ["Fetched", "PromptExchange"]

"""Live picture of what metrics count, for a terminal."""

from kvxfer.top.figures import Moves, TierFigures, tier_figures
from kvxfer.top.picture import WIDTH, picture
from kvxfer.top.scrape import Scrape, Window, parse_scrape
from kvxfer.top.watched import WatchedProcess, ask_all

__all__ = [
    "WIDTH",
    "Moves",
    "Scrape",
    "TierFigures",
    "WatchedProcess",
    "Window",
    "ask_all",
    "parse_scrape",
    "picture",
    "tier_figures",
]

"""Planner: what a cache of which policy, capacity and tiers would have had of a trace's blocks."""

from kvxfer.replay.lru_curve import LRUCurve, Order, lru_curve
from kvxfer.replay.simulated_store import Medium
from kvxfer.replay.simulation import Simulation, TierPlan, TierUse, simulate
from kvxfer.replay.trace import Trace, TraceError, make_trace, read_trace, write_trace

__all__ = [
    "LRUCurve",
    "Medium",
    "Order",
    "Simulation",
    "TierPlan",
    "TierUse",
    "Trace",
    "TraceError",
    "lru_curve",
    "make_trace",
    "read_trace",
    "simulate",
    "write_trace",
]

"""Planner: what a cache of which policy, capacity and tiers would have had of a trace's blocks."""

from kvxfer.replay.block_size import bytes_per_token, plan_tiers
from kvxfer.replay.chart import draw, require_picture
from kvxfer.replay.lru_curve import LRUCurve, Order, lru_curve
from kvxfer.replay.plan import (
    DEFAULT_BANDWIDTHS,
    Machine,
    Prices,
    parse_prices,
    plan_capacities,
    plan_grid,
    plan_list,
)
from kvxfer.replay.real import RealRow, compare_real, replay_on, replay_real
from kvxfer.replay.recommendation import parse_budget, recommend
from kvxfer.replay.report import Report, format_report, summarise
from kvxfer.replay.simulation import Medium, TierPlan, simulate
from kvxfer.replay.synthetic import make_synthetic
from kvxfer.replay.trace import Trace, TraceError, make_trace, read_trace, write_trace
from kvxfer.replay.workload import WORKLOADS, Agentic, MultiTurn, Rag, Workload, parse_workload

__all__ = [
    "DEFAULT_BANDWIDTHS",
    "WORKLOADS",
    "Agentic",
    "LRUCurve",
    "Machine",
    "Medium",
    "MultiTurn",
    "Order",
    "Prices",
    "Rag",
    "RealRow",
    "Report",
    "TierPlan",
    "Trace",
    "TraceError",
    "Workload",
    "bytes_per_token",
    "compare_real",
    "draw",
    "format_report",
    "lru_curve",
    "make_synthetic",
    "make_trace",
    "parse_budget",
    "parse_prices",
    "parse_workload",
    "plan_capacities",
    "plan_grid",
    "plan_list",
    "plan_tiers",
    "read_trace",
    "recommend",
    "replay_on",
    "replay_real",
    "require_picture",
    "simulate",
    "summarise",
    "write_trace",
]

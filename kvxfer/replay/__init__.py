"""Planner: what a cache of which policy, capacity and tiers would have had of a trace's blocks."""

from kvxfer.replay.block_size import bytes_per_token, plan_tiers
from kvxfer.replay.chart import draw, require_picture
from kvxfer.replay.lru_curve import LRUCurve, Order, lru_curve
from kvxfer.replay.object_costs import ObjectCosts, ObjectUse, Prices, parse_prices
from kvxfer.replay.plan import (
    BYTES_NEEDED,
    DEFAULT_BANDWIDTHS,
    CapacityRow,
    GridRow,
    Machine,
    TierRow,
    TiersRow,
    plan_capacities,
    plan_grid,
    plan_list,
)
from kvxfer.replay.real import replay_on, replay_real
from kvxfer.replay.recommendation import Recommendation, parse_budget, recommend
from kvxfer.replay.report import RealRow, Report, TraceSummary, format_report, summarise
from kvxfer.replay.simulation import Medium, SimulatedTier, Simulation, TierPlan, simulate
from kvxfer.replay.synthetic import make_synthetic
from kvxfer.replay.trace import (
    Trace,
    TraceError,
    make_trace,
    read_trace,
    write_trace,
)
from kvxfer.replay.workload import (
    WORKLOADS,
    Agentic,
    MultiTurn,
    Rag,
    Workload,
    parse_workload,
)

__all__ = [
    "BYTES_NEEDED",
    "DEFAULT_BANDWIDTHS",
    "WORKLOADS",
    "Agentic",
    "CapacityRow",
    "GridRow",
    "LRUCurve",
    "Machine",
    "Medium",
    "MultiTurn",
    "ObjectCosts",
    "ObjectUse",
    "Order",
    "Prices",
    "Rag",
    "RealRow",
    "Recommendation",
    "Report",
    "SimulatedTier",
    "Simulation",
    "TierPlan",
    "TierRow",
    "TiersRow",
    "Trace",
    "TraceError",
    "TraceSummary",
    "Workload",
    "bytes_per_token",
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

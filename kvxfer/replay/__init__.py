"""Planner: the hits that a cache of some policy, capacity and tiers would have had on a trace."""

from kvxfer.replay.block_size import bytes_per_token, plan_tiers
from kvxfer.replay.plan import (
    DEFAULT_BANDWIDTHS,
    Machine,
    parse_budget,
    plan_capacities,
    plan_list,
    recommend,
)
from kvxfer.replay.report import Report, format_report, summarise
from kvxfer.replay.simulation import Medium, TierPlan, simulate
from kvxfer.replay.synthetic import (
    WORKLOADS,
    Agentic,
    MultiTurn,
    Rag,
    make_synthetic,
    parse_workload,
)
from kvxfer.replay.trace import (
    Trace,
    TraceError,
    count_ceiling,
    make_trace,
    read_trace,
)

__all__ = [
    "DEFAULT_BANDWIDTHS",
    "WORKLOADS",
    "Agentic",
    "Machine",
    "Medium",
    "MultiTurn",
    "Rag",
    "Report",
    "TierPlan",
    "Trace",
    "TraceError",
    "bytes_per_token",
    "count_ceiling",
    "format_report",
    "make_synthetic",
    "make_trace",
    "parse_budget",
    "parse_workload",
    "plan_capacities",
    "plan_list",
    "plan_tiers",
    "read_trace",
    "recommend",
    "simulate",
    "summarise",
]

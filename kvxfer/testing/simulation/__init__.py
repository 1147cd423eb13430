"""Simulation: the real code on a clock, threads, a disk and a network that one seed controls."""

from kvxfer.testing.simulation.campaign import cut_down, main
from kvxfer.testing.simulation.engine_scenario import EngineRun, EngineScenario, Opened
from kvxfer.testing.simulation.faults import FaultyTier, TierFault
from kvxfer.testing.simulation.process import ProcessRun
from kvxfer.testing.simulation.runtime import SimulatedRuntime
from kvxfer.testing.simulation.scenario import Scenario, Simulation, Step, Violation, run_seed

__all__ = [
    "EngineRun",
    "EngineScenario",
    "FaultyTier",
    "Opened",
    "ProcessRun",
    "Scenario",
    "SimulatedRuntime",
    "Simulation",
    "Step",
    "TierFault",
    "Violation",
    "cut_down",
    "main",
    "run_seed",
]

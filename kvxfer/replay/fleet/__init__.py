"""Fleets in simulation: many engines above many holders, by a clock instead of a network."""

from kvxfer.replay.fleet.report import format_fleet
from kvxfer.replay.fleet.settings import Fleet, parse_fleet
from kvxfer.replay.fleet.study import FleetReport, study_fleet

__all__ = ["Fleet", "FleetReport", "format_fleet", "parse_fleet", "study_fleet"]

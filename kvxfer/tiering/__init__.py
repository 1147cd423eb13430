"""Tiers: a fast backend with larger, slower ones below it, and the policy between them."""

from kvxfer.tiering.isolated_tier import TierTimeouts
from kvxfer.tiering.tiered_backend import TieredBackend

__all__ = ["TierTimeouts", "TieredBackend"]

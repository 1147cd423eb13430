"""Tiers: a fast backend with larger, slower ones below it, and the policy between them."""

from kvxfer.tiering.tiered_backend import TieredBackend
from kvxfer.tiering.timeouts import TierTimeouts

__all__ = ["TierTimeouts", "TieredBackend"]

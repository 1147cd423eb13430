"""NIXL backend: blocks at peers, in other processes and on other machines."""

from kvxfer.backends.nixl.agents.nixl_module import choose_carrier, has_active_port, identify_host
from kvxfer.backends.nixl.backend import NixlBackend, rank
from kvxfer.backends.nixl.client import Client
from kvxfer.backends.nixl.config import (
    SECRET_VARIABLE,
    IntegrityGrade,
    NixlConfig,
    Transport,
    tls_contexts,
)
from kvxfer.backends.nixl.connection import Connection
from kvxfer.backends.nixl.discovery import Announcement
from kvxfer.backends.nixl.exchange import Exchange
from kvxfer.backends.nixl.local_node import LocalNode, why_not_straight
from kvxfer.backends.nixl.probe import PeerProbe, probe_peer
from kvxfer.backends.nixl.standalone import StandalonePeer
from kvxfer.endpoint import Endpoint

__all__ = [
    "SECRET_VARIABLE",
    "Announcement",
    "Client",
    "Connection",
    "Endpoint",
    "Exchange",
    "IntegrityGrade",
    "LocalNode",
    "NixlBackend",
    "NixlConfig",
    "PeerProbe",
    "StandalonePeer",
    "Transport",
    "choose_carrier",
    "has_active_port",
    "identify_host",
    "probe_peer",
    "rank",
    "tls_contexts",
    "why_not_straight",
]

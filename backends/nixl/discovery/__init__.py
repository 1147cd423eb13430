"""Discovery of peers: holders announce themselves in etcd, and engines find them there."""

from kvxfer.backends.nixl.discovery.announcement import Announcement, decode_announcement
from kvxfer.backends.nixl.discovery.discovery import Discovery
from kvxfer.backends.nixl.discovery.etcd import LEASE_S, EtcdDiscovery, look_once
from kvxfer.backends.nixl.discovery.etcd_config import EtcdConfig
from kvxfer.backends.nixl.discovery.etcd_session import EtcdError, EtcdSession, open_session
from kvxfer.backends.nixl.discovery.roster import MAX_PEERS, Roster

__all__ = [
    "LEASE_S",
    "MAX_PEERS",
    "Announcement",
    "Discovery",
    "EtcdConfig",
    "EtcdDiscovery",
    "EtcdError",
    "EtcdSession",
    "Roster",
    "decode_announcement",
    "look_once",
    "open_session",
]

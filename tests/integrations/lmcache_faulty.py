"""Adapter of LMCache over a backend that injects faults, which LMCache's factory can make."""

from collections.abc import Sequence

from kvxfer.integrations.lmcache import KVXferL2Adapter
from kvxfer.storage.backend import Backend
from kvxfer.storage.keys import Namespace
from kvxfer.storage.observer import Observer
from kvxfer.testing import DictBackend, DictConfig, FaultRates, FaultyBackend


class FaultyAdapter(KVXferL2Adapter):
    """Adapter over a backend that injects faults, and tells nobody what it has."""

    faulty: FaultyBackend

    def open_backend(self, namespace: Namespace, observers: Sequence[Observer]) -> Backend:
        inner = DictBackend(DictConfig(), namespace)
        self.faulty = FaultyBackend(inner, seed=1, rates=FaultRates())
        return self.faulty

"""Test kit for backends of third parties; needs pytest and hypothesis."""

from kvxfer.storage.observer import Operation
from kvxfer.testing.backend_tests import BackendTests
from kvxfer.testing.block_memory import BlockMemory
from kvxfer.testing.conformance.wrapping import WrapperTests
from kvxfer.testing.dict_backend import DictBackend, DictConfig
from kvxfer.testing.fake_nixl_agent import FakeNixlAgent
from kvxfer.testing.faulty_backend import Fault, FaultRates, FaultyBackend, InjectedFault
from kvxfer.testing.state_machine import BackendStateMachine

__all__ = [
    "BackendStateMachine",
    "BackendTests",
    "BlockMemory",
    "DictBackend",
    "DictConfig",
    "FakeNixlAgent",
    "Fault",
    "FaultRates",
    "FaultyBackend",
    "InjectedFault",
    "Operation",
    "WrapperTests",
]

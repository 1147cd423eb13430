"""Check of Mooncake Store: a real master, one that is frozen, and none."""

import time

import pytest

from kvxfer.doctor import Check, Finding, Severity, examine
from kvxfer.endpoint import free_ports
from tests import needs
from tests.backends.mooncake_servers import mooncake_cluster
from tests.doctor.test_machine import is_complete

pytestmark = needs.mooncake

TIMEOUT_S = 20.0


def find(address: str, timeout_s: float = TIMEOUT_S) -> Finding:
    findings = examine([f"mooncake://{address}"], timeout_s=timeout_s)
    (finding,) = (each for each in findings if each.check is Check.MOONCAKE)
    assert is_complete(finding)
    assert finding.subject == f"mooncake://{address}"
    return finding


@pytest.mark.processes
def test_a_master_answers_and_a_frozen_one_does_not() -> None:
    with mooncake_cluster() as cluster:
        assert find(cluster.address).severity is Severity.OK
        cluster.master.freeze()
        began = time.monotonic()
        finding = find(cluster.address, 1.0)
        assert time.monotonic() - began < TIMEOUT_S
    assert finding.severity is Severity.ERROR


def test_a_master_that_is_not_there_is_named_with_the_command_that_starts_it() -> None:
    port = free_ports()
    finding = find(f"127.0.0.1:{port}")
    assert finding.severity is Severity.ERROR
    assert "refused" in finding.found
    assert finding.mend.startswith(f"mooncake_master -rpc_port={port}")

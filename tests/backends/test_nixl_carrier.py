"""Carrier of bytes from a peer: chosen correctly before NIXL's first read."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvxfer.backends.nixl import choose_carrier, identify_host
from kvxfer.backends.nixl.wire.messages import OLDEST_VERSION, PROTOCOL_VERSION, Hello


@pytest.fixture
def ours() -> Hello:
    boot_id, pid, pid_namespace = identify_host()
    assert (bool(boot_id), pid, bool(pid_namespace)) == (True, os.getpid(), True)
    return Hello(
        version=PROTOCOL_VERSION,
        oldest_version=OLDEST_VERSION,
        incarnation=bytes(16),
        nonce=bytes(32),
        namespace=None,
        boot_id=boot_id,
        pid=pid,
        pid_namespace=pid_namespace,
    )


def test_the_kernel_carries_to_processes_that_it_lets_us_reach(ours: Hello, tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    theirs = msgspec.structs.replace(ours, pid=child.pid)
    assert choose_carrier(ours, theirs, tmp_path) == "cma"
    child.kill()
    child.wait()
    assert choose_carrier(ours, theirs, tmp_path) == "socket"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.processes
def test_the_kernel_does_not_carry_to_processes_of_other_users(ours: Hello) -> None:
    code = f"""
import ctypes, os
from kvxfer.backends.nixl.agents.carrier import _may_reach
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(_may_reach({os.getpid()}), _may_reach(os.getpid()))
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout == "False True\n"


@pytest.mark.parametrize("field", ["boot_id", "pid_namespace"])
def test_a_number_means_nothing_on_another_machine_or_in_another_container(
    ours: Hello, field: str, tmp_path: Path
) -> None:
    assert choose_carrier(ours, ours, tmp_path) == "cma"
    for value in ("another", ""):
        changed = msgspec.structs.replace(ours, **{field: value})
        assert choose_carrier(ours, changed, tmp_path) == "socket"
        assert choose_carrier(changed, ours, tmp_path) == "socket"
        assert choose_carrier(changed, changed, tmp_path) == ("cma" if value else "socket")


@pytest.mark.parametrize(("state", "expected"), [("4: ACTIVE\n", "rdma"), ("1: DOWN\n", "socket")])
def test_a_network_card_carries_to_other_machines_while_it_is_up(
    ours: Hello, tmp_path: Path, state: str, expected: str
) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(state)
    theirs = msgspec.structs.replace(ours, boot_id="another")
    assert choose_carrier(ours, theirs, tmp_path) == expected


def test_without_nixl_there_are_sockets(ours: Hello, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    assert choose_carrier(ours, ours) == "socket"

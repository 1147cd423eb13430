"""Check of a host pool: a socket that is missing, left behind, another user's, or served."""

import socket
from pathlib import Path

import pytest

from kvxfer.backends.pool import PoolConfig
from kvxfer.doctor import Check, Result, Severity, examine, places
from tests.backends.pool_servers import running_pool
from tests.doctor.test_machine import is_complete


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sock"


def check(path: Path) -> Result:
    finding = places.check_pool(PoolConfig(path=str(path)))
    assert is_complete(finding)
    return finding


def test_a_pool_that_nobody_serves_is_named_with_the_command_that_serves_it(path: Path) -> None:
    missing = check(path)
    with socket.socket(socket.AF_UNIX) as abandoned:
        abandoned.bind(str(path))
    left_behind = check(path)
    for finding in (missing, left_behind):
        assert finding.severity is Severity.ERROR
        assert f"nobody serves {path}" in finding.found
        assert f"--pool {path}" in finding.mend
    assert "No such file" in missing.found
    assert "refused" in left_behind.found


def test_a_pool_that_is_served_is_sound_and_notices_no_more_than_a_connection(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_pool(path):
        assert check(path).severity is Severity.OK
        found = examine([f"pool://{path}"], timeout_s=30)
        assert [each.severity for each in found if each.check is Check.POOL] == [Severity.OK]
    assert "refused" not in caplog.text

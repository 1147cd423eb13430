"""Memory of `kvxfer serve` is checked before it listens: the machine's, and that of its group."""

import contextlib
import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer.cli import main
from tests.cli import peers

pytestmark = pytest.mark.processes

GROUPS = Path("/sys/fs/cgroup")
GROUP = "kvxfer-test-serve-memory"
LIMIT_BYTES = 640 << 20
LISTEN = ["serve", "--listen", f"{peers.HOST}:0"]
IN_GROUP = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"']


@pytest.fixture
def limit() -> Iterator[Path]:
    """Make a control group; return the file with its limit of memory."""
    for path in (
        GROUPS / GROUP / "memory.max",
        GROUPS / "memory" / GROUP / "memory.limit_in_bytes",
    ):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            path.parent.mkdir()
            stack.callback(path.parent.rmdir)
            if path.exists():
                path.write_text(str(LIMIT_BYTES))
                stack.pop_all()
                break
    else:
        pytest.skip("no control group with a limit of memory can be made here")
    yield path
    path.parent.rmdir()


def test_more_than_the_machine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*LISTEN, "--capacity", "4TiB"]) == 2
    finally:
        logging.getLogger("kvxfer").setLevel(logging.NOTSET)
    said = capsys.readouterr().err
    assert said.startswith("kvxfer serve: capacity and staging memory within the limit of /")
    assert ": needs 4398650490880 bytes, " in said
    assert said.count("\n") == 1


def test_more_than_its_control_group_may_have_is_refused(limit: Path) -> None:
    capacity = ["--capacity", str(LIMIT_BYTES)]
    command = [*IN_GROUP, str(limit.parent), *peers.COMMAND, *LISTEN, *capacity]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=15)
    assert ended.returncode == 2, f"{ended.returncode}: {ended.stderr}"
    assert f"capacity and staging memory within the limit of {limit}: needs " in ended.stderr

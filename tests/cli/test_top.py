"""`kvxfer top`: one picture for logs, and a live one in a real terminal of a real peer."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kvxfer.backends.nixl import NixlConfig
from kvxfer.cli import main
from kvxfer.cli.command_line import INTERRUPTED
from kvxfer.cli.top import TERMINATED
from kvxfer.endpoint import free_ports
from tests.cli import peers
from tests.cli.peers import HOST, LIMIT_S, ServeProcess, serving

pytestmark = pytest.mark.processes

LINES, COLUMNS = 24, 80
FRAME = "\x1b[H"
ENTER_SCREEN, LEAVE_SCREEN = "\x1b[?1049h", "\x1b[?1049l"
# The first terminal that the leader of a session opens is the one whose Ctrl-C it gets.
IN_TERMINAL = """
import os, sys
os.open(os.ttyname(1), os.O_RDWR)
from kvxfer.cli import main
sys.exit(main())
"""


class Terminal:
    """Pseudo-terminal of 80 columns and 24 lines in which `kvxfer top` runs."""

    def __init__(self, *arguments: str, term: str = "xterm") -> None:
        self.said = ""
        self._until_s = time.monotonic() + LIMIT_S
        self._fd, inner = os.openpty()
        termios.tcsetwinsize(inner, (LINES, COLUMNS))
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, "top", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env=os.environ | {"TERM": term, "PYTHONWARNINGS": "error"},
        )
        os.close(inner)

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def frames(self) -> list[list[str]]:
        """Split what was written into whole pictures, each a list of lines without colours."""
        parts = self.said.split(FRAME)[2:-1]  # before the first one the cursor is hidden
        return [re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", part).splitlines() for part in parts]

    def wait_for(self, pattern: str) -> list[str]:
        """Read up to the first new picture with a pattern; return its lines."""
        seen = len(self.frames())
        while True:
            for frame in self.frames()[seen:]:
                seen += 1
                if re.search(pattern, "\n".join(frame)):
                    return frame
            assert self._read(), f"{pattern!r} is not in:\n{self.said[-4000:]!r}"

    def end(self) -> int:
        """Read the rest; return the exit status."""
        while self._read():
            pass
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def _read(self) -> bool:
        try:
            part = os.read(self._fd, 1 << 16) if time.monotonic() < self._until_s else b""
        except OSError:  # the other end is closed
            return False
        self.said += part.decode()
        return bool(part)


@pytest.fixture
def terminals() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*arguments: str, term: str = "xterm") -> Terminal:
        opened.append(Terminal(*arguments, term=term))
        return opened[-1]

    yield open_terminal
    for terminal in opened:
        terminal.close()


def free_address() -> str:
    return f"{HOST}:{free_ports()}"


def options(metrics: str) -> Sequence[str]:
    return "--capacity", "1MiB", "--transport", "socket", "--metrics", metrics


async def use(peer: ServeProcess) -> None:
    """Store blocks at a peer and load them."""
    config = NixlConfig(address=str(peer.endpoint), transport="socket")
    async with peers.connected(config) as backend:
        assert all(outcome.done for outcome in await peers.store(backend))
        assert await peers.load(backend) == peers.PAYLOADS


def test_a_peer_is_shown_live_dies_and_comes_back(
    terminals: Callable[..., Terminal],
) -> None:
    metrics = free_address()
    with serving(*options(metrics)) as peer:
        terminal = terminals(metrics, "--interval", "0.2s")
        terminal.wait_for(rf"{metrics}\s+answered in ")
        asyncio.run(use(peer))
        frame = terminal.wait_for(r"host +64\.0 KiB 1008\.0 KiB +6% +8 ")
        assert any(line.startswith("peers    connected: ") for line in frame)
        assert any(line.startswith("trouble  no block corrupt") for line in frame)
    terminal.wait_for(r"no metrics for \d+ s: Connection refused")
    with serving(*options(metrics)):
        terminal.wait_for(r"restarted \d+ s ago: counters began anew")
        terminal.type("\x03")
        assert terminal.end() == INTERRUPTED
    assert "Traceback" not in terminal.said
    assert terminal.said.count(ENTER_SCREEN) == terminal.said.count(LEAVE_SCREEN) == 1
    assert {len(frame) for frame in terminal.frames()} == {LINES}
    assert max(len(line) for frame in terminal.frames() for line in frame) <= COLUMNS


def test_a_killed_picture_leaves_the_terminal_as_it_was(
    terminals: Callable[..., Terminal],
) -> None:
    terminal = terminals(free_address(), "--interval", "0.2s")
    terminal.wait_for("no metrics for")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == TERMINATED
    assert "Traceback" not in terminal.said
    assert terminal.said.count(LEAVE_SCREEN) == 1


def test_a_terminal_that_can_move_no_cursor_gets_one_picture(
    terminals: Callable[..., Terminal],
) -> None:
    terminal = terminals(free_address(), "--interval", "0.1s", term="dumb")
    assert terminal.end() == 1
    assert "\x1b" not in terminal.said
    assert "no metrics for" in terminal.said


def test_one_picture_has_rates_and_its_status_says_whether_all_answered() -> None:
    with serving(*options(f"{HOST}:0")) as peer:
        asyncio.run(use(peer))
        found = re.search(r"metrics at http://(\S+)/metrics", "".join(peer.said))
        assert found is not None
        command = [*peers.COMMAND, "top", "--interval", "0.1s", found[1]]
        for more, status in ([], 0), ([free_address()], 1):
            ended = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
            assert (ended.returncode, ended.stderr) == (status, "")
            lines = ended.stdout.splitlines()
            assert max(map(len, lines)) <= COLUMNS
            assert "\x1b" not in ended.stdout
            assert ("Connection refused" in ended.stdout) == bool(more)
            rows = [line.split() for line in lines if line.startswith("host ")]
            assert rows[0][-5] == str(peers.NUM_BLOCKS)
            assert rows[1][1:] == ["0", "0", "B", "-", "0", "0", "B", "-"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["here"], "address is 'here'; expected a host and a port"),
        (["http://node-1:80"], "expected a host and a port"),
        (["node-1:0"], "expected ports from 1 on"),
        (["node-1:80", "--interval", "often"], "interval is 'often'"),
        (["node-1:80", "--interval", "0s"], "interval is '0s'; expected from 0.1 s to 1 d"),
        (["node-1:80", "--interval", "2d"], "interval is '2d'; expected from 0.1 s to 1 d"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client", "rich"])
def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(package: str) -> None:
    hidden = f"import sys; sys.modules[{package!r}] = None; " + peers.COMMAND[-1]
    command = [sys.executable, "-c", hidden, "top", f"{HOST}:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert "pip install 'kvxfer[top]'" in ended.stderr
    assert package in ended.stderr


def test_top_needs_no_torch() -> None:
    code = (
        "import sys; from kvxfer.cli import main; status = main(); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "top", free_address(), "--interval", "0.1s"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1

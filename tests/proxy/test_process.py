"""`python -m examples.proxy`: its start, its log, its end, and arguments that it refuses."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest

from examples.proxy.__main__ import PROGRAM, main
from kvxfer.cli.command_line import run_command
from tests.cli.peers import LIMIT_S
from tests.proxy.fake_engines import BODY, COMPLETIONS, HOST, PIECES, FakeEngine

pytestmark = pytest.mark.processes

WITHOUT_AIOHTTP = """
import sys
sys.modules["aiohttp"] = None
import runpy
runpy.run_module("examples.proxy", run_name="__main__", alter_sys=False)
"""


ENGINES = ("--prefill", "http://p:8000", "--decode", "http://d:8000")


class ProxyProcess:
    """Running proxy, observed through its log."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: list[str] = []

    async def wait_for(self, pattern: str) -> re.Match[str]:
        """Read the log up to the first line with a pattern."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while line := (await self.process.stderr.readline()).decode():
                self.said.append(line)
                if found := re.search(pattern, line):
                    return found
        raise AssertionError(f"{pattern!r} is not in:\n{''.join(self.said)}")

    async def wait(self) -> int:
        """Read the rest of the log; return the exit status."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            self.said += (await self.process.stderr.read()).decode().splitlines(keepends=True)
            return await self.process.wait()


@contextlib.asynccontextmanager
async def proxy_process(
    *options: str, num_descriptors: int | None = None
) -> AsyncIterator[ProxyProcess]:
    within = () if num_descriptors is None else ("prlimit", f"--nofile={num_descriptors}")
    command = *within, sys.executable, "-m", "examples.proxy", "--listen", f"{HOST}:0", *options
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    proxy = ProxyProcess(process)
    try:
        yield proxy
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await proxy.wait()
    assert "Traceback" not in "".join(proxy.said), "".join(proxy.said)


async def test_a_request_under_way_is_finished_after_sigterm_and_the_status_is_0() -> None:
    prefill, decode = FakeEngine(), FakeEngine()
    async with prefill, decode, aiohttp.ClientSession() as session:
        engines = ("--prefill", prefill.url, "--decode", decode.url)
        async with proxy_process(*engines) as proxy:
            url = (await proxy.wait_for(r"listening at (\S+) \(prefill: 1, decode: 1\)"))[1]
            decode.may_go_on.clear()
            body = json.dumps({**BODY, "stream": True})
            async with session.post(url + COMPLETIONS, data=body) as response:
                proxy.process.send_signal(signal.SIGTERM)
                await proxy.wait_for("draining: requests under way: 1")
                with pytest.raises(aiohttp.ClientConnectorError):
                    await session.get(url + "/health")
                decode.may_go_on.set()
                assert await response.read() == b"".join(PIECES)
            assert await proxy.wait() == 0
        log = "".join(proxy.said)
        assert log.endswith("INFO ended\n")
        assert BODY["prompt"] not in log


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((*ENGINES[:3], "d:8000"), "decode[0] is 'd:8000'"),
        (("--prefill", "http://p/v1", *ENGINES[2:]), "prefill[0] is 'http://p/v1'"),
        (("--prefill", "http://p:99999", *ENGINES[2:]), "prefill[0] is 'http://p:99999'"),
        (("--prefill", "http://u:secret@p", *ENGINES[2:]), "prefill[0] is 'http://p'"),
        ((*ENGINES, "http://D:8000/"), "decode is 'http://d:8000'; expected each engine once"),
        ((*ENGINES, "--listen", "8000"), "listen is '8000'"),
        ((*ENGINES, "--timeout", "soon"), "timeout is 'soon'"),
        ((*ENGINES, "--max-body", "-1"), "max-body is '-1'"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(PROGRAM, lambda: main(arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{PROGRAM}: {complaint}")
    assert said.count("\n") == 1


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def test_without_aiohttp_one_line_says_how_to_install_it() -> None:
    result = run(WITHOUT_AIOHTTP, *ENGINES)
    assert result.returncode == 2
    wanted = "needs the package aiohttp: pip install aiohttp prometheus_client"
    assert result.stderr == f"{PROGRAM}: {wanted}\n"

"""`python -m examples.proxy`: its start, its log, its end, and arguments that it refuses."""

import asyncio
import contextlib
import json
import re
import signal
import subprocess
import sys

import aiohttp
import pytest

from examples.proxy.__main__ import PROGRAM, main
from kvxfer.cli.command_line import run_command
from tests.cli.peers import LIMIT_S
from tests.interpreter import run_python
from tests.proxy.fake_engines import BODY, COMPLETIONS, HOST, PIECES, FakeEngine

pytestmark = pytest.mark.processes

WITHOUT_AIOHTTP = """
import sys
sys.modules["aiohttp"] = None
import runpy
runpy.run_module("examples.proxy", run_name="__main__", alter_sys=False)
"""


ENGINES = ("--prefill", "http://p:8000", "--decode", "http://d:8000")


async def test_a_request_under_way_is_finished_after_sigterm_and_the_status_is_0() -> None:
    said = ""

    async def wait_for(pattern: str) -> re.Match[str]:
        nonlocal said
        assert proxy.stderr is not None
        while not (found := re.search(pattern, said)):
            line = (await proxy.stderr.readline()).decode()
            assert line, f"{pattern!r} is not in:\n{said}"
            said += line
        return found

    prefill, decode = FakeEngine(), FakeEngine()
    async with asyncio.timeout(LIMIT_S), prefill, decode, aiohttp.ClientSession() as session:
        engines = ("--prefill", prefill.url, "--decode", decode.url, "--listen", f"{HOST}:0")
        command = sys.executable, "-m", "examples.proxy", *engines
        proxy = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
        try:
            url = (await wait_for(r"listening at (\S+) \(prefill: 1, decode: 1\)"))[1]
            decode.may_go_on.clear()
            body = json.dumps({**BODY, "stream": True})
            async with session.post(url + COMPLETIONS, data=body) as response:
                proxy.send_signal(signal.SIGTERM)
                await wait_for("draining for 20 s; requests: 1")
                with pytest.raises(aiohttp.ClientConnectorError):
                    await session.get(url + "/health")
                decode.may_go_on.set()
                assert await response.read() == b"".join(PIECES)
            await wait_for("INFO the proxy has ended\n$")
            assert await proxy.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                proxy.kill()
            await proxy.wait()
    assert BODY["prompt"] not in said
    assert "Traceback" not in said


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


def test_without_aiohttp_one_line_says_how_to_install_it() -> None:
    result = run_python("-c", WITHOUT_AIOHTTP, *ENGINES)
    assert result.returncode == 2
    wanted = "needs the package aiohttp: pip install aiohttp prometheus_client"
    assert result.stderr == f"{PROGRAM}: {wanted}\n"


def test_a_signal_before_it_listens_ends_it_with_status_0() -> None:
    script = """
import os, signal, sys
from examples.proxy import __main__ as proxy
signal.signal(signal.SIGTERM, signal.SIG_DFL)
proxy.raise_descriptor_limit = lambda: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(proxy.main(["--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2"]))
"""
    ended = run_python("-c", script)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")

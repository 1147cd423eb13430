"""Forged parameters, which a client or a broken router may send.

None of them may stop an engine, give wrong tokens, or take longer than an answer may. The values of
single fields are tested without engines, in `tests/integrations/test_prefill_decode_ticket.py`.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

from examples.proxy.legs import LEND
from tests.e2e.prefill_decode.deployment import Deployment, Prompt
from tests.e2e.prefill_decode.engines import HOST, TIMEOUT_S, Engine, Failure
from tests.e2e.prefill_decode.scenarios import require_clean, require_works

PROMPT_TOKENS = 140
LIMIT_S = TIMEOUT_S + 10.0
WRONG: Any = [[-1, 10**9], None, {"a": "no such thing \x00\n\u2028"}]
HOSTS = ("192.0.2.1", "no.such.host.invalid", "", "::1", "0.0.0.0")  # noqa: S104


async def forged(deployment: Deployment) -> str:
    """All of them, one after the other, each for a prompt that P offers."""
    prefill, decode = deployment.prefills[0], deployment.decodes[0]
    other = await deployment.prefill(deployment.prompt(PROMPT_TOKENS))
    if not other:
        raise Failure(f"{prefill.name} offers nothing")
    problems: dict[str, str] = {}
    async with _strangers() as ports:
        ports |= {"P's server": prefill.port, "D's": decode.port + 1}
        names = [(decode, name) for name in _forgeries(other, other, ports)]
        names += [(prefill, field) for field in LEND]
        for engine, name in names:
            prompt = deployment.prompt(PROMPT_TOKENS)
            try:
                told = {**LEND, name: WRONG}
                if engine is decode:
                    params = await deployment.prefill(prompt)
                    told = _forgeries(params, other, ports)[name]
                await _send(deployment, engine, prompt, told)
            except Failure as exc:
                problems[f"{engine.name}: {name}"] = str(exc)
                await deployment.start(
                    [each for each in deployment.engines if not await each.is_healthy()]
                )
    if problems:
        raise Failure(f"{len(problems)} of {len(names)}: {problems}")
    note = await require_clean(deployment)
    await require_works(deployment)
    return f"{len(names)} of them{note}"


async def _send(
    deployment: Deployment, engine: Engine, prompt: Prompt, told: dict[str, Any]
) -> None:
    """Send one forgery, and check that the answer is correct."""
    answer = await deployment.decode(prompt, told, engine=engine, limit_s=LIMIT_S)
    await deployment.require_true([prompt], [answer])
    if not await engine.is_healthy():
        raise Failure(f"{engine.name} dies after its answer")


def _forgeries(
    params: Mapping[str, Any], other: Mapping[str, Any], ports: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Make forged parameters to send to D in place of those of its prompt, by name."""
    told = dict(params)
    return {
        "another request's": dict(other),
        **{f"another request's {field}": told | {field: other[field]} for field in other},
        **{f"unknown {field}": told | {field: "0" * 32} for field in other if "_id" in field},
        **{f"wrong {field}": told | {field: WRONG} for field in told},
        **{f"no {field}": {key: told[key] for key in told if key != field} for field in told},
        **{f"port: {name}": told | {"remote_port": port} for name, port in ports.items()},
        **{f"host: {host!r}": told | {"remote_host": host} for host in HOSTS},
        "do_remote_prefill alone": {"do_remote_prefill": True},
        "both flags": {"do_remote_prefill": True, "do_remote_decode": True},
        "unknown fields": told | {"x" * 50: 1, "": None, "kv": {"a": [[]] * 100}},
    }


@contextlib.asynccontextmanager
async def _strangers() -> AsyncIterator[dict[str, int]]:
    """Open ports: without a listener, with a silent one, and with one that sends too much."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read(-1)
        writer.close()

    async def babble(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(bytes(range(256)) * 4096)
            await writer.drain()
        writer.close()

    with socket.create_server((HOST, 0)) as free:
        closed = int(free.getsockname()[1])
    silent = await asyncio.start_server(say_nothing, HOST, 0)
    babbling = await asyncio.start_server(babble, HOST, 0)
    async with silent, babbling:
        yield {
            "closed": closed,
            "silent": silent.sockets[0].getsockname()[1],
            "babbling": babbling.sockets[0].getsockname()[1],
        }

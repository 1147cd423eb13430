"""Parameters that no engine has given: what a client or a broken router may send.

None of them may stop an engine, give wrong tokens, or take longer than an answer may.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.prefill_decode.deployment import ASK, Deployment, Prompt
from tests.e2e.prefill_decode.engines import HOST, TIMEOUT_S, Failure
from tests.e2e.prefill_decode.scenarios import require_clean, require_works

PROMPT_TOKENS = 140
LIMIT_S = TIMEOUT_S + 10.0
MOST_DEATHS = 2
MOST_NAMED = 6
SAMPLE_EVERY = 13
WRONG: Mapping[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "0": 0,
    "-1": -1,
    "10**9": 10**9,
    "2**64 - 1": 2**64 - 1,
    "0.5": 0.5,
    "''": "",
    "long text": "x" * 100_000,
    "text": "no such thing \x00\n\u2028",
    "[]": [],
    "[[0]]": [[0]],
    "[[-1, 10**9]]": [[-1, 10**9]],
    "[None]": [None],
    "{}": {},
    "{'a': 1}": {"a": 1},
}
"""What each field is replaced with, by name."""
MISSING = object()


@dataclass(frozen=True, slots=True)
class Forgery:
    """Parameters in place of those that P gave.

    Attributes:
        name: What is forged.
        params: All that D, or P, is told.
        for_prefill: They are for P.
    """

    name: str
    params: dict[str, Any]
    for_prefill: bool = False


def replaced(params: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Parameters with another value of one field, or without it."""
    others = {key: old for key, old in params.items() if key != name}
    return others if value is MISSING else others | {name: value}


def wrong_values(params: Mapping[str, Any], *, for_prefill: bool) -> Iterator[Forgery]:
    """Each field with each wrong value, or missing."""
    leg = "P leg " if for_prefill else ""
    for field in params:
        for name, value in [("missing", MISSING), *WRONG.items()]:
            yield Forgery(f"{leg}{field} {name}", replaced(params, field, value), for_prefill)


def other_places(params: Mapping[str, Any], ports: Mapping[str, int]) -> Iterator[Forgery]:
    """Hosts and ports at which there is no engine."""
    for name, port in ports.items():
        yield Forgery(f"port: {name}", replaced(params, "remote_port", port))
    for host in ("192.0.2.1", "no.such.host.invalid", "", "::1", "0.0.0.0"):  # noqa: S104
        yield Forgery(f"host: {host!r}", replaced(params, "remote_host", host))


def other_requests(params: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Forgery]:
    """All of another request's parameters, and each field of them; nothing but flags."""
    yield Forgery("another request's", dict(other))
    for field, value in other.items():
        yield Forgery(f"another request's {field}", replaced(params, field, value))
    for field in ("remote_request_id", "remote_engine_id"):
        yield Forgery(f"unknown {field}", replaced(params, field, "0" * 32))
    yield Forgery("do_remote_prefill alone", {"do_remote_prefill": True})
    yield Forgery("both flags", {"do_remote_prefill": True, "do_remote_decode": True})
    yield Forgery("unknown fields", {**params, "x" * 50: 1, "": None, "kv": {"a": [[]] * 100}})
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    yield Forgery("deep lists", dict.fromkeys(params, deep) | {"do_remote_prefill": True})


async def forged(deployment: Deployment) -> str:
    """All of them, one after the other, each for a prompt that P offers."""
    return await _forged(deployment, every=1)


async def forged_some(deployment: Deployment) -> str:
    """All but most of the wrong values."""
    return await _forged(deployment, every=SAMPLE_EVERY)


async def _forged(deployment: Deployment, *, every: int) -> str:
    other = await deployment.prefill(deployment.prompt(PROMPT_TOKENS))
    if not other:
        raise Failure(f"{deployment.prefills[0].name} offers nothing")
    problems: dict[str, str] = {}
    deaths = 0
    async with _strangers() as ports:
        ports |= {"P's server": deployment.prefills[0].port, "D's": deployment.decodes[0].port + 1}
        names = list(_forgeries(other, other, ports, every=every))
        for number, name in enumerate(names, 1):
            prompt = deployment.prompt(PROMPT_TOKENS)
            try:
                params = await deployment.prefill(prompt)
                forgery = _forgeries(params, other, ports, every=every)[name]
                await _send(deployment, prompt, forgery)
            except Failure as exc:
                problems[name] = str(exc)
                dead = [one for one in deployment.engines if not await one.is_healthy()]
                deaths += len(dead)
                if dead:
                    problems[name] += f"; {', '.join(one.name for one in dead)} died"
                if deaths >= MOST_DEATHS:
                    summary = _summary(problems, number)
                    raise Failure(f"{summary}; no more were tried") from exc
                if dead:
                    await deployment.start(dead)
    if problems:
        raise Failure(_summary(problems, len(names)))
    note = await require_clean(deployment)
    await require_works(deployment)
    return f"{len(names)} of them{note}"


def _forgeries(
    params: Mapping[str, Any], other: Mapping[str, Any], ports: Mapping[str, int], *, every: int
) -> dict[str, Forgery]:
    values = [*wrong_values(params, for_prefill=False), *wrong_values(ASK, for_prefill=True)]
    chosen = [*other_requests(params, other), *other_places(params, ports), *values[::every]]
    return {forgery.name: forgery for forgery in chosen}


async def _send(deployment: Deployment, prompt: Prompt, forgery: Forgery) -> None:
    """Send one forgery, and see that the answer is true."""
    engine = (deployment.prefills if forgery.for_prefill else deployment.decodes)[0]
    answer = await deployment.decode(prompt, forgery.params, engine=engine, limit_s=LIMIT_S)
    await deployment.require_true([prompt], [answer])
    if not await engine.is_healthy():
        raise Failure(f"{engine.name} dies after its answer")


def _summary(problems: Mapping[str, str], number: int) -> str:
    named = [f"{name}: {why}" for name, why in problems.items()][:MOST_NAMED]
    more = f"; and {len(problems) - len(named)} more" if len(problems) > len(named) else ""
    return f"{len(problems)} of {number}: {'; '.join(named)}{more}"


@contextlib.asynccontextmanager
async def _strangers() -> AsyncIterator[dict[str, int]]:
    """Ports at which there is nobody, one that says nothing, and one that says too much."""

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
    try:
        yield {
            "closed": closed,
            "silent": silent.sockets[0].getsockname()[1],
            "babbling": babbling.sockets[0].getsockname()[1],
        }
    finally:
        silent.close()
        babbling.close()

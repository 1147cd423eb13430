"""Idle data connections that are cut cost no store and no load: others are opened in time."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.nixl import NixlBackend
from kvxfer.backends.nixl.agents import (
    MAX_LINES,
    Line,
)
from tests.backends.nixl_proven import asking, holding, require_served, until_alone
from tests.backends.nixl_wire import Authority

ROUNDS = 8
"""More than the holder takes data connections of one peer."""

QUICK: dict[str, Any] = {"transport": "socket", "timeout_s": 3.0}


@pytest.fixture(params=["plain", "TLS"])
def tls(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Parameters of TLS, or none."""
    config = Authority(tmp_path / "tls").config()
    names = ("tls_cert", "tls_key", "tls_ca")
    return {name: getattr(config, name) for name in names} if request.param == "TLS" else {}


@pytest.fixture
async def pair(
    tmp_path: Path, tls: dict[str, Any]
) -> AsyncIterator[tuple[NixlBackend, NixlBackend]]:
    async with (
        holding(tmp_path, **QUICK, **tls) as holder,
        asking(tmp_path, holder, **QUICK, **tls) as client,
    ):
        yield holder, client


def lines(backend: NixlBackend, *, serving: bool) -> list[Line]:
    """List the data connections that the other side reads through, or this one."""
    agent = backend._exchange._node.sockets
    if serving:
        return list(agent._serving)
    return [line for remote in agent._remotes.values() for line in remote._lines]


@pytest.mark.parametrize("num", range(1, MAX_LINES + 1))
@pytest.mark.parametrize("side", ["holder", "client"])
@pytest.mark.parametrize("serving", [True, False], ids=["of the reads", "of the other's reads"])
async def test_a_cut_of_idle_connections_fails_no_store_and_no_load(
    pair: tuple[NixlBackend, NixlBackend], side: str, num: int, *, serving: bool
) -> None:
    holder, client = pair
    for round_ in range(ROUNDS):
        await require_served(client, first_key=4 * round_)
        for line in lines(holder if side == "holder" else client, serving=serving)[:num]:
            with contextlib.suppress(OSError):  # the other side may have cut it by now
                socket.socket.shutdown(line.connection._socket, socket.SHUT_RDWR)
    await require_served(client, first_key=4 * ROUNDS)


async def test_the_end_of_an_idle_connection_is_noticed_on_both_sides(
    pair: tuple[NixlBackend, NixlBackend],
) -> None:
    holder, client = pair
    await require_served(client)
    for line in lines(client, serving=True):
        socket.socket.shutdown(line.connection._socket, socket.SHUT_RDWR)
    async with asyncio.timeout(3):
        while lines(holder, serving=False) or lines(client, serving=True):  # noqa: ASYNC110 - it notices by itself
            await asyncio.sleep(0)
    await client.aclose()
    await until_alone(holder)

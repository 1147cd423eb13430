"""Relay between a peer and a holder, which a test may cut."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

CANARY = 0x5A
Edit = Callable[[bytes], bytes]


class Relay:
    """Proxy between a peer and a holder, which changes or cuts passing bytes."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.edit: Edit | None = None

    @property
    def endpoint(self) -> str:
        """Endpoint of the proxy."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cut(self) -> None:
        """End every connection at once."""
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._join(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        self._writers -= both

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.edit is not None:
                    data = self.edit(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

"""Processes that are watched: an address of metrics each, asked again and again."""

import asyncio
import os
import time
from collections.abc import Iterable
from http import HTTPStatus

import aiohttp

from kvxfer.endpoint import Endpoint
from kvxfer.errors import KVXferError
from kvxfer.text import printable
from kvxfer.top.scrape import Scrape, Window, parse_scrape

MAX_BYTES = 32 << 20
"""Bytes of an answer at most; vLLM's has a few hundred KiB."""
MAX_ERROR_CHARACTERS = 200


class WatchedProcess:
    """Process at an address of metrics, with its last two scrapes.

    Args:
        endpoint: Its address.

    Attributes:
        endpoint: As given.
        latest: Its present metrics; None before the first answer, and while it does not answer.
        window: From the scrape before to the present one; None where there is no such pair of one
            run of the process.
        error: Why it does not answer; empty while it does.
        failing_since_s: Time since which it does not; of `time.monotonic`, as all times here.
        restarted_at_s: Time at which its latest restart was noticed.
        answered_in_s: Time that its latest answer took.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.latest: Scrape | None = None
        self.window: Window | None = None
        self.error = ""
        self.failing_since_s = 0.0
        self.restarted_at_s: float | None = None
        self.answered_in_s = 0.0
        self._before: Scrape | None = None

    async def ask(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Ask for the metrics, and note them or the reason why there are none.

        Args:
            session: Session that asks.
            timeout_s: Deadline of the whole request.
        """
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                text = await _get(session, self.endpoint)
            scrape = parse_scrape(text, time.monotonic())
        except TimeoutError:
            self.fail(f"no answer within {timeout_s:g} s", began_s)
        except (aiohttp.ClientError, OSError, UnicodeError, KVXferError) as exc:
            self.fail(_reason(exc), began_s)
        else:
            self.answered_in_s = scrape.at_s - began_s
            self.note(scrape)

    def note(self, scrape: Scrape) -> None:
        """Note an answer."""
        pair = Window(self._before, scrape) if self._before is not None else None
        is_restart = pair is not None and pair.is_restart
        if is_restart:
            self.restarted_at_s = scrape.at_s
        # After an outage, a rate since the answer before would not be one of now.
        self.window = None if is_restart or self.error else pair
        self.error = ""
        self.latest = self._before = scrape

    def fail(self, error: str, at_s: float) -> None:
        """Note that there is no answer.

        Args:
            error: Why.
            at_s: When it was asked.
        """
        if not self.error:
            self.failing_since_s = at_s
        self.error = printable(error, MAX_ERROR_CHARACTERS)
        self.latest = self.window = None


async def ask_all(
    processes: Iterable[WatchedProcess], session: aiohttp.ClientSession, timeout_s: float
) -> None:
    """Ask processes at once; returns when each has answered or is late.

    Args:
        processes: The processes.
        session: Session that asks.
        timeout_s: Deadline of each request.
    """
    async with asyncio.TaskGroup() as group:
        for process in processes:
            group.create_task(process.ask(session, timeout_s))


async def _get(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    body = bytearray()
    async with session.get(f"http://{endpoint}/metrics") as response:
        if response.status != HTTPStatus.OK:
            raise KVXferError(f"answers GET /metrics with {response.status} {response.reason}")
        async for part in response.content.iter_any():
            body += part
            if len(body) > MAX_BYTES:
                raise KVXferError(f"its answer has more than {MAX_BYTES} bytes")
    return body.decode(errors="replace")


def _reason(exc: Exception) -> str:
    """Say in a few words why a request failed; aiohttp quotes addresses and tuples."""
    cause = exc.os_error if isinstance(exc, aiohttp.ClientConnectorError) else exc
    if isinstance(cause, OSError) and (cause.errno or 0) > 0:
        return os.strerror(cause.errno or 0)
    if isinstance(cause, OSError) and cause.strerror:  # of names that are not found
        return cause.strerror
    return str(cause) or type(cause).__name__

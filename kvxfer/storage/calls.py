"""Calls of backend methods: errors become outcomes, and drains that raise are retried."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from typing import Any, Protocol

from kvxfer import runtime
from kvxfer.copy_engine.engine import pause_of_look
from kvxfer.errors import BackendUnavailableError, DeviceLostError, KVXferError
from kvxfer.kvcache.descriptors import Descriptors, StreamMark
from kvxfer.runtime import LogPause, Pause, await_call
from kvxfer.storage.backend import DONE, Backend, Begun, Outcome, Status, TellsKept, WrappingBackend
from kvxfer.storage.keys import BlockKey
from kvxfer.text import printable

logger = logging.getLogger(__name__)
_log_pause = LogPause()

FIRST_DRAIN_PAUSE_S = 0.1
LAST_DRAIN_PAUSE_S = 10.0
"""First and longest pause after a drain that raised; they double in between."""

MARK_PAUSE_S = 100e-6
"""Shortest pause between two polls of a mark: no driver reports when a device has reached it."""

Move = Callable[[Sequence[BlockKey], Descriptors], Awaitable[Sequence[Outcome]]]
"""`store` or `load` of a backend."""

Drain = Callable[[], Awaitable[object]]
"""`drain` of a backend."""

Begin = Callable[[Sequence[BlockKey], Descriptors], Begun | None]
"""`begin_store` or `begin_load` of a backend."""


class Place(Protocol):
    """Place of blocks that looks up and deletes keys: a backend, or a peer."""

    async def lookup(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.lookup`."""

    async def delete(self, keys: Sequence[BlockKey]) -> list[bool]:
        """See `Backend.delete`."""


def _find_telling(place: Place) -> TellsKept | None:
    return place.provide(TellsKept) if isinstance(place, Backend) else None


async def delete_from(
    place: Place, keys: Sequence[BlockKey]
) -> tuple[set[BlockKey], set[BlockKey]]:
    """Delete keys in a place, which may be one of several.

    Returns the keys whose blocks were removed, and the keys whose blocks stay, e.g. because they
    are in use, or may stay. The blocks of the other keys were not there.
    """
    if (telling := _find_telling(place)) is not None:
        return await telling.delete_or_keep(keys)
    deleted = await place.delete(keys)
    removed = {key for key, is_gone in zip(keys, deleted, strict=True) if is_gone}
    unsure = [key for key in keys if key not in removed]
    there = await place.lookup(unsure) if unsure else []
    return removed, {key for key, stays in zip(unsure, there, strict=True) if stays}


async def delete_for_others(place: Place, keys: Sequence[BlockKey]) -> list[bool]:
    """Delete keys for a caller that is told which were removed, and looks up the rest itself.

    Raises `BackendUnavailableError` if blocks may stay that no lookup finds; others may be gone.
    """
    if (telling := _find_telling(place)) is None:
        return await place.delete(keys)
    removed, left = await telling.delete_or_keep(keys)
    kept = [key for key in keys if key in left]
    if kept and not all(await place.lookup(kept)):
        reason = f"up to {len(kept)} of {len(keys)} blocks may remain where no lookup finds them"
        raise BackendUnavailableError(reason)
    return [key in removed for key in keys]


async def call_backend(
    move: Move, keys: Sequence[BlockKey], blocks: Descriptors, *, name: str = ""
) -> list[Outcome]:
    """Store or load a batch; every block is `FAILED` if the backend raises or answers wrongly.

    If the device is lost, or something other than the caller cancels the call, the outcomes are not
    memory-safe: the device, or whatever was cancelled, may still write. Log and reasons name the
    call by `name`, by default the name of the method.
    """
    name = name or getattr(move, "__name__", "transfer")
    try:
        return _one_each(name, await await_call(move(keys, blocks)), len(keys))
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return _failed(name, exc, len(keys))


@contextlib.contextmanager
def naming(of: Backend | str) -> Iterator[None]:
    """Make what foreign code raises a `BackendUnavailableError` that names the backend."""
    try:
        yield
    except KVXferError:
        raise
    except Exception as exc:
        while isinstance(of, WrappingBackend):
            of = of.inner
        name = type(of).__name__ if isinstance(of, Backend) else of
        raise BackendUnavailableError(f"{name}: {exc!r}") from exc


def begin_call(begin: Begin, keys: Sequence[BlockKey], blocks: Descriptors) -> Begun | None:
    """Begin a transfer; errors become outcomes as in `call_backend`. None if it takes a thread."""
    try:
        return begin(keys, blocks)
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return Begun(_failed(begin.__name__, exc, len(keys)))


def poll_begun(begun: Begun, name: str, num_keys: int) -> list[Outcome] | None:
    """Poll a transfer that was begun for its outcomes; None while bytes are on their way.

    Errors and the name are treated as in `call_backend`.
    """
    try:
        outcomes = begun.poll()
        return None if outcomes is None else _one_each(name, outcomes, num_keys)
    except Exception as exc:  # noqa: BLE001 - logged, and in the outcomes
        return _failed(name, exc, num_keys)


async def wait_for_begun(begun: Begun) -> list[Outcome]:
    """Wait for the outcomes of a transfer that was begun, even if cancelled; uses no thread."""
    cancelled: asyncio.CancelledError | None = None
    began = runtime.monotonic()
    try:
        while (outcomes := begun.poll()) is None:
            try:  # not in a task of its own, which the end of the loop would cancel
                await asyncio.sleep(pause_of_look(began, MARK_PAUSE_S))
            except asyncio.CancelledError as exc:
                cancelled = exc
    finally:
        if cancelled is not None:
            raise cancelled
    return list(outcomes)


def _failed(name: str, exc: Exception, num_keys: int) -> list[Outcome]:
    line = "%s of %d blocks failed: %s", name, num_keys, printable(exc)
    is_ours = isinstance(exc, KVXferError)  # its text says in one line what the user can do
    error = None if is_ours else exc
    _log_pause.log(logger, logging.WARNING, *line, subject=name, error=error)
    is_cancelled = isinstance(exc.__cause__, asyncio.CancelledError)
    safe = not (is_cancelled or isinstance(exc, DeviceLostError))
    reason = f"{name}: {exc!r}"
    return [Outcome(Status.FAILED, memory_safe=safe, reason=reason, logged=True)] * num_keys


def log_failed(
    pause: LogPause,
    call: str,
    outcomes: Sequence[Outcome],
    *,
    unit: str = "blocks",
    statuses: Container[Status] = (Status.FAILED,),
) -> list[Outcome]:
    """Log how many blocks of a call failed, with the first reason, unless the log is paused.

    Returns the outcomes, marked as logged: a plug does not log again what a tier has logged.
    """
    failed = [each for each in outcomes if each.status in statuses and not each.logged]
    if not failed:
        return list(outcomes)
    reason = failed[0].reason or failed[0].status.value
    text = f"{call.replace('%', '%%')} of %d of %d {unit} failed: %s"
    pause.log(logger, logging.WARNING, text, len(failed), len(outcomes), reason, subject=reason)
    return [_plain(each, logged=True) if each.status in statuses else each for each in outcomes]


def _plain(outcome: Outcome, *, logged: bool) -> Outcome:
    """Copy an outcome, whose class may be a backend's own, and take other arguments."""
    return Outcome(outcome.status, outcome.memory_safe, outcome.reason, logged=logged)


def _one_each(name: str, given: Sequence[Outcome], num_keys: int) -> list[Outcome]:
    outcomes: list[Any] = list(given)
    reason = ""
    if len(outcomes) != num_keys:
        reason = f"{name} returned {len(outcomes)} outcomes for {num_keys} keys"
    elif outcomes.count(DONE) < num_keys:
        others = [type(each).__name__ for each in outcomes if not isinstance(each, Outcome)]
        reason = f"{name} returned a {others[0]} in place of an Outcome" if others else ""
        if not others and {*map(type, outcomes)} != {Outcome}:  # only plain ones can be replaced
            outcomes = [_plain(each, logged=each.logged) for each in outcomes]
    return [Outcome(Status.FAILED, reason=reason)] * num_keys if reason else outcomes


async def drain_in_the_end(drain: Drain, what: str, gives_up: asyncio.Event) -> bool:
    """Drain, and retry after a pause if the drain raises; return whether memory is quiet.

    Once `gives_up` is set, nobody waits for the memory any longer: the next failure is the last,
    and the memory is not quiet.
    """
    pause = Pause(FIRST_DRAIN_PAUSE_S, LAST_DRAIN_PAUSE_S)
    while True:
        try:
            await await_call(drain())
        except Exception:
            if gives_up.is_set():
                logger.exception("%s cannot be drained, and is not used again", what)
                return False
            if not pause.num_failures:
                logger.warning("%s stays in use until it can be drained", what, exc_info=True)
        else:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause.next_s()):
                await gives_up.wait()


async def wait_for_mark(mark: StreamMark | None) -> None:
    """Wait until a device has reached a mark; for transfers that the device does not order."""
    if mark is None:
        return
    began = runtime.monotonic()
    while not mark.has_passed():  # noqa: ASYNC110 - see `MARK_PAUSE_S`
        await asyncio.sleep(pause_of_look(began, MARK_PAUSE_S))

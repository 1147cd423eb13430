"""Bulk transfer of blocks over a blocking socket, straight from and to the described memory."""

import socket
import ssl
import time

import numpy as np

from kvxfer.errors import PeerClosedError, PeerError, PeerTimeoutError
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.raw_memory import view_fragments

MAX_FRAGMENTS = 1024
"""Most fragments of one system call. Source: IOV_MAX in limits.h."""


def send_blocks(connection: socket.socket, peer: str, blocks: Descriptors, stop: float) -> None:
    """Send the bytes of blocks, one after the other; blocks the thread.

    Args:
        connection: Connected socket, plain or TLS.
        peer: Name of the other side, for errors.
        blocks: Blocks to send.
        stop: Deadline, in seconds of `time.monotonic`.

    Raises:
        PeerTimeoutError: The other side did not read the bytes in time.
        PeerClosedError: The connection is gone.
    """
    for views in _views(blocks):
        _move_all(connection, peer, views, stop, send=True)


def receive_blocks(connection: socket.socket, peer: str, blocks: Descriptors, stop: float) -> None:
    """Receive the bytes of blocks, one after the other; arguments and errors as `send_blocks`."""
    for views in _views(blocks):
        _move_all(connection, peer, views, stop, send=False)


def _views(blocks: Descriptors) -> list[list[memoryview]]:
    views = view_fragments(blocks)
    return [views[start : start + MAX_FRAGMENTS] for start in range(0, len(views), MAX_FRAGMENTS)]


def _move_all(
    connection: socket.socket, peer: str, views: list[memoryview], stop: float, *, send: bool
) -> None:
    ends = np.cumsum([len(view) for view in views])
    total, done = int(ends[-1]), 0
    began = time.monotonic()
    try:
        while done < total:
            connection.settimeout(max(stop - time.monotonic(), 1e-6))
            first = int(np.searchsorted(ends, done, side="right"))
            left = int(ends[first]) - done
            rest = [views[first][-left:], *views[first + 1 :]]
            count = _move(connection, rest, send=send)
            if not count:
                raise PeerClosedError(peer, "ended the connection in the middle of a block")
            done += count
    except PeerError:
        raise
    except TimeoutError as exc:
        raise PeerTimeoutError(peer, "the bytes of blocks", stop - began) from exc
    except OSError as exc:
        raise PeerClosedError(peer, f"connection lost: {exc}") from exc


def _move(connection: socket.socket, views: list[memoryview], *, send: bool) -> int:
    if isinstance(connection, ssl.SSLSocket):  # knows no lists of buffers
        return connection.send(views[0]) if send else connection.recv_into(views[0])
    if send:
        return connection.sendmsg(views)
    return connection.recvmsg_into(views)[0]

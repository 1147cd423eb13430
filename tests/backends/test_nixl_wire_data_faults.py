"""Faults of data connections: bytes that are late, changed, cut or of another are an error."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from kvxfer import runtime
from kvxfer.backends.nixl.wire.frames import HEADER_BYTES
from kvxfer.backends.nixl.wire.handshake import Role
from kvxfer.backends.nixl.wire.messages import Reading
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import PeerClosedError, PeerError, PeerTimeoutError, ProtocolError
from kvxfer.runtime import OrdinaryRuntime
from tests.backends.nixl_data import (
    LIMIT_S,
    MEMORY_BYTES,
    ONE,
    Ends,
    a_read,
    address,
    both_ends,
    frames,
    wait_until,
    words,
)
from tests.backends.nixl_wire import Authority

TIMEOUT_S = 0.2


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(params=["plain", "TLS"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Ends]:
    with both_ends(authority if request.param == "TLS" else None) as both:
        yield both


def test_a_side_that_is_told_of_too_much_says_so_at_once(ends: Ends) -> None:
    ends.client_socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="announced a frame of 4294967295 bytes"):
        ends.serve().result(LIMIT_S)
    ends.server_socket.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="announced a frame of 4294967295 bytes"):
        ends.read([0], [1])


@pytest.mark.parametrize("reads", [True, False], ids=["reader", "holder"])
def test_a_frame_that_was_changed_is_an_error(ends: Ends, *, reads: bool) -> None:
    asked = frames(Role.ASKING, a_read(ends.memories[Role.SERVING], 1))
    changed = bytearray(frames(Role.SERVING, Reading()) if reads else asked)
    changed[-1] ^= 1
    (ends.server_socket if reads else ends.client_socket).sendall(changed)
    with pytest.raises(ProtocolError, match="was changed"):
        ends.read([0], [1]) if reads else ends.serve().result(LIMIT_S)


def test_a_frame_that_is_sent_back_or_repeated_is_an_error(ends: Ends) -> None:
    ends.server_socket.sendall(frames(Role.ASKING, Reading()))
    with pytest.raises(ProtocolError, match="was changed"):
        ends.read([0], [1])
    again = frames(Role.ASKING, a_read(ends.memories[Role.SERVING], 1))
    ends.client_socket.sendall(again)  # `read` has sent one already
    with pytest.raises(ProtocolError, match="repeated"):
        ends.serve().result(LIMIT_S)


@pytest.mark.parametrize("reads", [True, False], ids=["reader", "holder"])
def test_another_message_is_an_error(ends: Ends, *, reads: bool) -> None:
    role = Role.SERVING if reads else Role.ASKING
    ends.sockets[role].sendall(frames(role, ONE))
    with pytest.raises(ProtocolError, match="not legal"):
        ends.read([0], [1]) if reads else ends.serve().result(LIMIT_S)


@pytest.mark.parametrize("length", [*range(1, HEADER_BYTES + 3), -1])
def test_a_read_that_is_cut_short_is_an_error(ends: Ends, length: int) -> None:
    frame = frames(Role.ASKING, a_read(ends.memories[Role.SERVING], 1))
    ends.client_socket.sendall(frame[:length])
    ends.client.close()
    with pytest.raises(ProtocolError, match="in the middle of a frame"):
        ends.serve().result(LIMIT_S)


@pytest.mark.parametrize("length", [*range(1, HEADER_BYTES + 3), -1, None])
def test_an_answer_that_is_cut_short_is_an_error(ends: Ends, length: int | None) -> None:
    answer = frames(Role.SERVING, Reading())
    said = answer + bytes(99) if length is None else answer[:length]
    ends.server_socket.sendall(said)
    ends.server_socket.shutdown(socket.SHUT_WR)
    with pytest.raises(ProtocolError, match="in the middle of a frame"):
        ends.read([0], [100])


def test_a_peer_that_closes_between_frames_is_gone_for_all_calls(ends: Ends) -> None:
    serving = ends.serve()
    ends.read([0], [1])
    ends.client.close()
    with pytest.raises(PeerClosedError):
        serving.result(LIMIT_S)
    ends.server.close()
    with pytest.raises(PeerClosedError, match="closed on this side"):
        ends.serve().result(LIMIT_S)


@pytest.mark.parametrize("said", ["", "\0\0", "\0\0\0\x40", "\0\0\0\x40half", None])
def test_a_holder_that_is_silent_is_given_up_in_time(ends: Ends, said: str | None) -> None:
    """The last one answers, and sends half of the bytes."""
    answer = frames(Role.SERVING, Reading()) + bytes(50)
    ends.server_socket.sendall(answer if said is None else said.encode())
    ends.client.begin(TIMEOUT_S)
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=r"took longer than 0\.2 s"):
        ends.read([0], [100])
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.parametrize("said", ["\0\0\0\x40", "\0\0\0\x40half"])
def test_a_reader_that_does_not_end_a_frame_is_given_up_in_time(ends: Ends, said: str) -> None:
    ends.client_socket.sendall(said.encode())
    ends.server.begin(TIMEOUT_S)
    with pytest.raises(PeerTimeoutError, match=r"took longer than 0\.2 s"):
        ends.serve().result(LIMIT_S)


def test_a_reader_that_asks_nothing_is_waited_for(ends: Ends) -> None:
    ends.server.begin(TIMEOUT_S)
    serving = ends.serve()
    for _ in range(2):
        wait_until(lambda: ends.server_socket.gettimeout() is None)
        ends.read([0], [1])
    assert not serving.done()


def test_a_reader_that_takes_no_bytes_is_given_up_in_time(ends: Ends) -> None:
    memory = np.zeros(64 << 20, np.uint8)
    regions = Regions([(address(memory), len(memory))])
    ends.server.begin(TIMEOUT_S)
    ends.client_socket.sendall(frames(Role.ASKING, a_read(memory, len(memory))))
    with pytest.raises(PeerTimeoutError):
        ends.executor.submit(ends.server.serve, lambda: regions).result(LIMIT_S)


def test_a_peer_that_always_sends_something_does_not_get_more_time(ends: Ends) -> None:
    target = np.zeros(64 << 20, np.uint8)
    ends.server_socket.sendall(frames(Role.SERVING, Reading()))
    sending = ends.executor.submit(ends.server_socket.sendall, bytes(len(target)))
    ends.client.begin(2e-3)
    one = words([address(target)])
    with pytest.raises(PeerTimeoutError):
        ends.client.read(one, one, words([len(target)]))
    ends.client.close()
    assert isinstance(sending.exception(LIMIT_S), OSError)


@pytest.mark.parametrize("side", Role, ids=lambda role: str(role.name))
def test_closing_wakes_up_who_waits(ends: Ends, side: Role) -> None:
    begun = threading.Event()

    def read() -> None:
        begun.set()
        ends.read([0], [1])

    if side is Role.ASKING:
        waiting: Future[None] = ends.executor.submit(read)
        begun.wait(LIMIT_S)  # whether it waits by now or not, it must end
    else:
        waiting = ends.serve()
        wait_until(lambda: ends.server_socket.gettimeout() is None)
    ends.connections[side].close()
    ends.connections[side].close()
    with pytest.raises(PeerClosedError):
        waiting.result(LIMIT_S)
    wait_until(lambda: ends.sockets[side].fileno() == -1)


def test_a_socket_keeps_its_number_while_a_thread_uses_it(ends: Ends) -> None:
    """The number of a closed socket is that of the next one, whose bytes the thread would take."""
    in_call, go_on = threading.Event(), threading.Event()

    def regions() -> Regions:
        in_call.set()
        go_on.wait(LIMIT_S)
        return Regions([(address(ends.memories[Role.SERVING]), MEMORY_BYTES)])

    serving = ends.executor.submit(ends.server.serve, regions)
    ends.client_socket.sendall(frames(Role.ASKING, a_read(ends.memories[Role.SERVING], 9)))
    in_call.wait(LIMIT_S)
    number = ends.server_socket.fileno()
    ends.server.close()
    assert ends.server_socket.fileno() == number
    go_on.set()
    with pytest.raises(PeerError):
        serving.result(LIMIT_S)
    assert ends.server_socket.fileno() == -1


@pytest.mark.parametrize("step", range(7))
def test_a_read_that_is_closed_at_any_step_takes_the_right_bytes_or_none(
    ends: Ends, step: int
) -> None:
    """With TLS, encrypted ones lie in the kernel's buffer, and can be received all the same."""
    there = ends.memories[Role.SERVING][:1000]
    for said in (frames(Role.SERVING, Reading()), there.tobytes()):
        ends.server_socket.sendall(said)
    steps = itertools.count()

    class Closing(OrdinaryRuntime):
        def monotonic(self) -> float:
            if next(steps) == step:
                ends.client.close()
            return time.monotonic()

    into = np.zeros(1000, np.uint8)
    with contextlib.suppress(PeerError), runtime.use(Closing()):
        ends.client.read(words([address(into)]), words([address(there)]), words([1000]))
        assert np.array_equal(into, there)
    assert not into.any() or np.array_equal(into, there)

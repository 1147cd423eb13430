"""Data connections: registered bytes are read, all that were asked for, and no other ones."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvxfer import runtime
from kvxfer.backends.nixl.wire.data import MAX_VIEWS
from kvxfer.backends.nixl.wire.handshake import Role
from kvxfer.backends.nixl.wire.messages import Reading
from kvxfer.backends.nixl.wire.regions import Regions
from kvxfer.errors import (
    PeerClosedError,
    PeerError,
    ProtocolError,
    TransferFailedError,
)
from kvxfer.runtime import OrdinaryRuntime
from tests.backends.nixl_data import (
    LIMIT_S,
    MEMORY_BYTES,
    Ends,
    a_read,
    address,
    both_ends,
    frames,
    words,
)
from tests.backends.nixl_wire import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(params=["plain", "TLS"])
def ends(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Ends]:
    with both_ends(authority if request.param == "TLS" else None) as both:
        yield both


@pytest.mark.parametrize("reader", Role, ids=lambda role: str(role.name))
def test_the_bytes_of_any_number_of_fragments_arrive_either_way(ends: Ends, reader: Role) -> None:
    serving = ends.serve(reader.other)
    there = ends.memories[reader.other]
    rng = np.random.default_rng(3)
    for num_fragments in (1, MAX_VIEWS - 1, MAX_VIEWS, 3 * MAX_VIEWS + 5):
        bounds = np.sort(rng.choice(MEMORY_BYTES, 2 * num_fragments, replace=False))
        offsets, stops = bounds[::2], bounds[1::2]
        order = rng.permutation(num_fragments)
        lengths = (stops - offsets)[order].tolist()
        arrived = ends.read(offsets[order].tolist(), lengths, reader)
        wanted = np.zeros_like(there)
        for start, stop in zip(offsets, stops, strict=True):
            wanted[start:stop] = there[start:stop]
        assert np.array_equal(arrived, wanted)
    assert np.array_equal(ends.read([0], [MEMORY_BYTES], reader), there)
    ends.connections[reader].close()
    with pytest.raises(PeerClosedError):
        serving.result(LIMIT_S)


def test_more_than_the_buffers_of_the_kernel_arrives(ends: Ends) -> None:
    source = np.random.default_rng(1).integers(0, 256, 48 << 20, np.uint8)
    target = np.zeros_like(source)
    regions = Regions([(address(source), len(source))])
    ends.client.begin(20)
    ends.server.begin(20)
    ends.executor.submit(ends.server.serve, lambda: regions)
    ends.client.read(words([address(target)]), words([address(source)]), words([len(source)]))
    assert np.array_equal(source, target)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (-1, 1),
        (-1, 2),
        (MEMORY_BYTES, 1),
        (MEMORY_BYTES - 1, 2),
        (0, MEMORY_BYTES + 1),
        (0, 0),
        (0, 2**64 - 1),
        (1, 2**64 - 1),  # ends before it begins, within the memory
        (MEMORY_BYTES - 1, 2**64 - MEMORY_BYTES),
        (None, 1),
        (None, 2**64 - 1),
    ],
)
@pytest.mark.parametrize("others", [0, 3, 2 * MAX_VIEWS])
def test_a_read_of_other_bytes_is_refused_and_the_next_one_is_not(
    ends: Ends, offset: int | None, length: int, others: int
) -> None:
    ends.serve()
    start = address(ends.memories[Role.SERVING])
    wrong = 2**64 - 1 if offset is None else start + offset
    into = np.zeros(MEMORY_BYTES, np.uint8)
    local = words([address(into)] * (others + 1))
    with pytest.raises(TransferFailedError, match="expected"):
        ends.client.read(local, words([start] * others + [wrong]), words([1] * others + [length]))
    assert not into.any()
    assert np.array_equal(ends.read([3], [5])[3:8], ends.memories[Role.SERVING][3:8])


@pytest.mark.parametrize(
    ("addresses", "lengths"),
    [(0, 8), (8, 0), (8, 16), (16, 8), (7, 7), (9, 9), (8, 7)],
)
def test_arrays_that_do_not_fit_are_refused_and_the_next_read_is_not(
    ends: Ends, addresses: int, lengths: int
) -> None:
    ends.serve()
    into = np.zeros(64, np.uint8)
    remote, sizes = np.zeros(addresses, np.uint8), np.ones(lengths, np.uint8)
    with pytest.raises(TransferFailedError, match="8 for each fragment"):
        ends.client.read(words([address(into)]), remote, sizes)  # type: ignore[arg-type]
    assert not into.any()
    assert np.array_equal(ends.read([3], [5])[3:8], ends.memories[Role.SERVING][3:8])


def test_bytes_between_two_regions_are_refused(ends: Ends) -> None:
    start = address(ends.memories[Role.SERVING])
    regions = Regions([(start, 100), (start + 200, 100)])
    ends.executor.submit(ends.server.serve, lambda: regions)
    for offset, length in ((0, 201), (100, 1), (150, 10), (199, 2)):
        with pytest.raises(TransferFailedError, match="inside one registered region"):
            ends.read([offset], [length])
        with pytest.raises(TransferFailedError, match=r"addresses\[1\]"):
            ends.read([200, offset], [100, length])
    assert ends.read([200], [100])[200:300].any()


def test_the_text_of_a_refusal_is_fit_for_a_log(ends: Ends) -> None:
    refusal = Reading(refusal="\x1b[2Jno\nreally " + "x" * 10_000)
    ends.server_socket.sendall(frames(Role.SERVING, refusal))
    with pytest.raises(TransferFailedError) as caught:
        ends.read([0], [1])
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("reads", [True, False], ids=["reader", "holder"])
def test_a_frame_that_was_changed_is_an_error(ends: Ends, *, reads: bool) -> None:
    asked = frames(Role.ASKING, a_read(ends.memories[Role.SERVING], 1))
    changed = bytearray(frames(Role.SERVING, Reading()) if reads else asked)
    changed[-1] ^= 1
    (ends.server_socket if reads else ends.client_socket).sendall(changed)
    with pytest.raises(ProtocolError, match="was changed"):
        ends.read([0], [1]) if reads else ends.serve().result(LIMIT_S)


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

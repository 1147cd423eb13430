"""Handover: engines in processes of their own, which die, stop and lie."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvxfer.backends.nixl.agents.nixl_module import import_nixl
from kvxfer.errors import CacheMismatchError, InvalidArgumentError
from kvxfer.kvcache.portable import CacheDescription, WorkerShard
from tests.transfer.handover_engines import LIMIT_S, Engine, EngineProcess, get, prompt

pytestmark = pytest.mark.processes

TICKET = "0123456789abcdef"
TOKENS = prompt(22)
OURS, THEIRS = [3, 9, 4, 12, 7, 1], [11, 2, 8, 5, 6, 10]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import NIXL beforehand: it would block an event loop for too long."""
    import_nixl(otherwise="skip these tests")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start(stack: ExitStack, tokens_per_block: int = 4, **options: object) -> EngineProcess:
    process = EngineProcess(tokens_per_block, **options)
    stack.callback(process.end)
    return process


def open_engine(stack: ExitStack, **options: object) -> Engine:
    engine = Engine(**options)  # type: ignore[arg-type]
    stack.callback(engine.close)
    return engine


@pytest.mark.parametrize("their_size", [4, 8])
def test_a_prompt_goes_from_process_to_process_by_nixl(their_size: int, stack: ExitStack) -> None:
    theirs = start(stack, their_size, transport="nixl")
    ours = open_engine(stack, transport="nixl")
    theirs.tell("lend", TICKET, TOKENS, [THEIRS])
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert not any(fetched.bad_blocks)
    assert ours.all_good(TOKENS, [OURS])
    theirs.tell("alter", THEIRS[0])
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert fetched.bad_blocks == [OURS[: their_size // 4]]
    ours.release(theirs.endpoint, TICKET)
    stop = time.monotonic() + LIMIT_S
    while theirs.tell("take_ended") != [[TICKET]]:
        assert time.monotonic() < stop


@pytest.mark.parametrize("transport", ["socket", "nixl"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lender_that_dies_or_stops_during_a_fetch_ends_it(
    number: signal.Signals, transport: str, stack: ExitStack
) -> None:
    theirs = start(stack, transport=transport)
    ours = open_engine(stack, transport=transport, timeout_s=1.5)
    theirs.tell("lend", TICKET, TOKENS, [THEIRS], num_tokens=8, is_complete=False)
    found = ours.ask(theirs.endpoint, TICKET, TOKENS, waits=True)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS], waits_for=TICKET)
    stop = time.monotonic() + LIMIT_S
    while not all(ours.good(TOKENS, [OURS])[0][0][:2]):
        assert time.monotonic() < stop
    theirs.signal(number)
    fetched = get(loading)
    assert set(fetched.bad_blocks[0]) >= set(OURS[2:])
    good = ours.good(TOKENS, [OURS])[0][0]
    bad = set(fetched.bad_blocks[0])
    assert all(is_good or b in bad for b, is_good in zip(OURS, good, strict=True))


def lying(stack: ExitStack, description: bytes) -> Engine:
    """Engine whose description of its caches is another one."""
    theirs = open_engine(stack)
    lender = theirs.workers[0]._lender
    assert lender is not None
    lender.description = description
    theirs.lend(TICKET, TOKENS, [THEIRS])
    return theirs


@pytest.mark.parametrize("description", [b"", b"garbage", b"\xc1", bytes(1000)])
def test_a_description_that_is_none_is_refused(description: bytes, stack: ExitStack) -> None:
    theirs, ours = lying(stack, description), open_engine(stack)
    with pytest.raises(InvalidArgumentError, match="a CacheDescription"):
        ours.ask(theirs.endpoint, TICKET, TOKENS)


@pytest.mark.parametrize("tp_size", [1 << 10, 1 << 40])
def test_a_lender_that_claims_too_many_workers_is_refused(tp_size: int, stack: ExitStack) -> None:
    ours = open_engine(stack)
    described = ours.workers[0]._description
    shard = WorkerShard(num_kv_heads=4, tp_size=tp_size)
    claim = msgspec.structs.replace(described, shard=shard)
    theirs = lying(stack, claim.encode())
    with pytest.raises(CacheMismatchError, match=r"num_workers.*at most 128.*theirs is"):
        ours.ask(theirs.endpoint, TICKET, TOKENS)


def test_a_lender_of_another_shape_than_it_says_gives_nothing(stack: ExitStack) -> None:
    """Its blocks have 4 tokens; it says 8, so that half of what we would read is another's."""
    ours, real = open_engine(stack), open_engine(stack, tokens_per_block=8)
    described: CacheDescription = real.workers[0]._description
    theirs = lying(stack, described.encode())
    assert ours.ask(theirs.endpoint, TICKET, TOKENS).num_tokens == 0
    [fetched] = ours.fetch(theirs.endpoint, TICKET, TOKENS, [OURS])
    assert fetched.bad_blocks == [OURS]
    assert ours.is_untouched([[]])


def test_blocks_that_do_not_fit_into_staging_memory_are_refused_by_both_sizes(
    stack: ExitStack,
) -> None:
    theirs, ours = open_engine(stack, tokens_per_block=128), open_engine(stack, staging=1)
    theirs.lend(TICKET, TOKENS, [[3]])
    found = ours.ask(theirs.endpoint, TICKET, TOKENS)
    [loading] = ours.begin_fetch(theirs.endpoint, found, TOKENS, [OURS])
    their_bytes = 2 * 2 * 128 * 4 * 3 * 4
    with pytest.raises(CacheMismatchError, match=f"payload_size_bytes.*at most.*{their_bytes}"):
        get(loading)


AT_THE_END = """
import atexit, sys, threading
from tests.transfer.handover_engines import Engine, prompt

transport, how = sys.argv[1:]
tokens, ids = prompt(22), [[3, 9, 4, 12, 7, 1]]
prefill, decode = Engine(transport=transport), Engine(transport=transport, lends=False)
prefill.lend("0123456789abcdef", tokens, ids)
if transport == "socket":
    decode.fetch(prefill.endpoint, "0123456789abcdef", tokens, ids)
    assert decode.all_good(tokens, ids)

def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def close():
    if how == "without new threads":  # as Python 3.12 and later
        threading.Thread.start = refuse
    decode.close()
    prefill.close()
    print("closed")

atexit.register(close)
"""


@pytest.mark.parametrize("how", ["", "without new threads"])
@pytest.mark.parametrize("transport", ["socket", "nixl"])
def test_a_hand_over_can_be_closed_when_the_interpreter_ends(transport: str, how: str) -> None:
    """Its leases run still, and its connections are open."""
    command = [sys.executable, "-c", AT_THE_END, transport, how]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")

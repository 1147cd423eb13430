"""Rules for every test: fixed seeds, no blocked event loop, no GPU test without a GPU."""

import asyncio
import logging
import math
import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvxfer import runtime
from kvxfer.testing import BlockMemory
from tests import examples, needs
from tests.clock import Clock

MAX_CALLBACK_S = 5.0  # wall time: a busy machine stops for a second now and then
E2E_TIMEOUT_S = 600
SEED = 20

examples.load_profile()

# Processes that a shell starts in the background ignore SIGINT, and so would children in tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Event loops of this process run in debug mode: they watch their callbacks and threads. Two costly
# parts are off, since they take half of the time of asynchronous tests: debug mode in children, and
# tracebacks of where futures and handles were made (`PYTHONASYNCIODEBUG=1` brings them back).
# Source: asyncio/base_events.py (`_run_once`, `call_soon`), asyncio/events.py (`Handle`).
if not os.environ.get("PYTHONASYNCIODEBUG"):
    asyncio.coroutines._is_debug_mode = lambda: True  # type: ignore[attr-defined]
    asyncio.BaseEventLoop.get_debug = lambda self: False  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests without a GPU, mark properties, and give engines the time they need."""
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("property")
        if any(
            needs.REASON.match(mark.kwargs.get("reason", ""))
            for mark in item.iter_markers("skipif")
        ):
            item.add_marker("needs")
        if item.get_closest_marker("property"):
            item.add_marker(pytest.mark.timeout(examples.LIMIT_S), append=False)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
        if item.get_closest_marker("e2e"):
            # An engine's own dependencies warn, and not about our code.
            item.add_marker(pytest.mark.filterwarnings("default"), append=False)
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(E2E_TIMEOUT_S))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option that fails a run if a test was skipped because something is missing."""
    text = "fail if a test was skipped for want of a program or library"
    parser.addoption("--nothing-missing", action="store_true", help=text)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with that option if anything was missing."""
    if session.config.getoption("--nothing-missing") and needs.missing(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """List what skipped tests were missing, each with the command that installs it."""
    missing = needs.missing(config)
    if missing:
        terminalreporter.section("skipped for want of")
    for (what, command), count in missing.items():
        terminalreporter.line(f"{count:5} tests need {what}: {command}")


class _LoopComplaints(logging.Handler):
    """Log handler for asyncio's complaints: blocked loops, lost exceptions and destroyed tasks."""

    def __init__(self, max_callback_s: float) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        self._max_callback_s = max_callback_s

    def emit(self, record: logging.LogRecord) -> None:
        slow = str(record.msg).startswith("Executing")
        if slow and isinstance(record.args, tuple):
            # Source: asyncio/base_events.py, `_run_once`: the last argument is the duration.
            duration_s = record.args[-1]
            slow = isinstance(duration_s, float) and duration_s >= self._max_callback_s
        # Several loops with gRPC wake for one event, which one of them takes; nothing is lost.
        # Source: https://github.com/grpc/grpc/issues/25364
        spurious = record.exc_info and isinstance(record.exc_info[1], BlockingIOError)
        if spurious and "PollerCompletionQueue._handle_events" in record.getMessage():
            return
        if slow or record.levelno >= logging.ERROR:
            error = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            self.messages.append(record.getMessage() + error)


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory([[4096]], num_blocks=16)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Clock of the runtime while the test runs, which the test sets."""
    with runtime.use(Clock()) as clock:
        yield clock


@pytest.fixture(autouse=True)
def _event_loop_is_never_blocked(request: pytest.FixtureRequest) -> Iterator[None]:
    # Engines are processes of their own, which stall their client on a machine with few cores.
    is_client = request.node.get_closest_marker("e2e") is not None
    complaints = _LoopComplaints(math.inf if is_client else MAX_CALLBACK_S)
    logger = logging.getLogger("asyncio")
    logger.addHandler(complaints)
    logger.propagate = False  # slow callbacks of a busy machine are no records of the tested code
    yield
    logger.propagate = True
    logger.removeHandler(complaints)
    if complaints.messages:
        pytest.fail("event loop blocked or misused: " + "; ".join(complaints.messages))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - seeds code under test that uses the global generator
    torch.manual_seed(SEED)

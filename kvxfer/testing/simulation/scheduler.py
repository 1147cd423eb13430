"""Scheduler of simulated threads: one thread runs at a time, and a seed decides which."""

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Generic, TypeVar

FIRST_TIME_S = 1000.0
_PACKAGE = Path(__file__).parents[2]
_ROOTS = (f"{_PACKAGE}/", f"{_PACKAGE.parent}/backends/")
_NOT_TRACED = (f"{_PACKAGE}/testing/", f"{_PACKAGE}/runtime/")
MOST_REAL_S = 30.0
"""Maximum real time between two steps."""
STEP_S = 1e-6
"""Virtual time that each step takes, so that a loop that never waits reaches its deadline."""


F = TypeVar("F")


class SimulationEnded(BaseException):
    """Raised in the threads that a simulation leaves behind, to end them."""


class StuckError(KeyboardInterrupt):
    """Deadlock, or a loop without end; the text shows the stack of every thread.

    A `KeyboardInterrupt`, so that no task takes it for the failure of a call.
    """


class FaultWindows(Generic[F]):
    """Windows of virtual time in which a share of the calls of some kinds has a fault."""

    def __init__(self) -> None:
        self._windows: list[tuple[F, float, float, Collection[str]]] = []

    def begin(self, fault: F, ends_at: float, share: float, calls: Collection[str]) -> None:
        """Begin a window now."""
        self._windows.append((fault, ends_at, share, calls))

    def draw(self, now: float, call: str, random: Random) -> Iterator[tuple[F, float]]:
        """Draw the faults of a call, each with the time at which its window ends."""
        self._windows = [each for each in self._windows if each[1] > now]
        for fault, ends_at, share, calls in self._windows:
            if call in calls and random.random() < share:
                yield fault, ends_at


class SimulatedProcess:
    """Process of a simulation: threads that are stopped (as by SIGSTOP) and ended together.

    After a restart, the new process has the name of the old one. A killed process `has_ended`, and
    its threads stay stopped.
    """

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.is_stopped = self.has_ended = False


class SimulatedThread:
    """Thread of a simulation: a thread of the operating system that runs when it is its turn.

    Attributes:
        waits_for: Object that the thread waits for; None while it could run.
        due: Virtual time until which it waits; None for no limit.
    """

    def __init__(self, scheduler: "Scheduler", name: str, process: SimulatedProcess) -> None:
        self.name = name
        self.process = process
        self.ident: int | None = None
        self.waits_for: object | None = None
        self.due: float | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.turn = threading.Lock()
        self.turn.acquire()
        self._scheduler = scheduler

    def join(self, timeout: float | None = None) -> None:
        """See `threading.Thread.join`."""
        self._scheduler.wait_until(lambda: self.ended, self, timeout)

    def is_alive(self) -> bool:
        """See `threading.Thread.is_alive`."""
        return not self.ended


class Scheduler:
    """Scheduler of the threads of one simulation, and their clock.

    A thread runs until it waits, or reaches a point at which the seed switches to another thread.
    When all threads wait, the clock jumps to the first deadline.

    Attributes:
        now: Virtual time in seconds.
        num_steps: Points and waits so far; after `max_steps`, a simulation counts as stuck.
        current: Thread whose turn it is.
        is_ending: Whether the remaining threads are being ended, or have ended.
        is_over: Whether the simulation has ended, so that waits return at once.
        stuck_at: Stacks at the moment when a thread had run too long without a step, else empty.
    """

    def __init__(self, random: Random) -> None:
        self.now = FIRST_TIME_S
        self.random = random
        self.num_steps = 0
        self.stuck_at = ""
        self.describe_waiting: Callable[[], str] = str
        self.max_steps = 300_000
        self._switch_rate = random.choice((0.0, 0.02, 0.1, 0.4))
        self._main = SimulatedThread(self, "main", SimulatedProcess("main", 1))
        self._threads = [self._main]
        self._started: list[threading.Thread] = []
        self._by_line = 0.0
        self._ready: list[SimulatedThread] = []
        self.current = self._main
        self.is_ending = self.is_over = False

    def alive(self) -> list[SimulatedThread]:
        """Return the threads that have not ended, without the main one."""
        return self._threads[1:]

    def run(self, main: Callable[[], None]) -> None:
        """Run a function on the calling thread as the main one, then end all others."""
        self._main.ident = threading.get_ident()
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(ended,), daemon=True).start()
        try:
            main()
        finally:
            ended.set()
            self.is_ending = True
            default_hook = sys.unraisablehook
            sys.unraisablehook = lambda unraisable: (
                # A generator that is collected as its thread ends raises it without a caller.
                isinstance(unraisable.exc_value, SimulationEnded) or default_hook(unraisable)
            )
            for thread in self.alive():
                self._run_to_end(thread)
            for started in self._started:  # wait until their last frames hold nothing
                started.join()
            self.is_over, sys.unraisablehook = True, default_hook

    def start(
        self, target: Callable[[], object], name: str, process: SimulatedProcess | None = None
    ) -> SimulatedThread:
        """Start a thread, of the running process by default; it runs when it is its turn."""
        if self.is_ending and self.current is not self._main:
            raise SimulationEnded
        thread = SimulatedThread(self, name, process or self.current.process)

        def run() -> None:
            thread.ident = threading.get_ident()
            thread.turn.acquire()
            try:
                if not self.is_ending:
                    if self._by_line:  # else keep the tracer of a coverage tool
                        sys.settrace(self._trace)
                    target()
            except SimulationEnded:
                pass
            except BaseException as exc:  # noqa: BLE001 - the main thread raises it
                thread.error = exc
                self._fail(f"thread {name} ended by {exc!r}")
            sys.settrace(None)
            thread.ended = True
            self._threads.remove(thread)
            if self.is_ending:
                self.current = self._main
                self._main.turn.release()
            else:
                self.wake(thread)
                self.current = self._choose()
                self.current.turn.release()

        self._threads.append(thread)
        self._ready.append(thread)
        self._started.append(threading.Thread(target=run, name=name, daemon=True))
        self._started[-1].start()
        self.point()
        return thread

    def switch_by_line(self, share: float) -> None:
        """Switch threads after a share of the lines of kvxfer, in threads started from now on.

        This also finds missing locks. Tracing lines makes the code ten times as slow.
        """
        self._by_line = share

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        """Trace the lines of kvxfer, except while importing: that holds a lock of Python."""
        del argument
        code = frame.f_code
        if event == "call":
            is_ours = code.co_filename.startswith(_ROOTS) and code.co_name != "<module>"
            is_ours = is_ours and not code.co_filename.startswith(_NOT_TRACED)
            return self._trace if is_ours else None
        if event == "line" and self.random.random() < self._by_line and not self.is_ending:
            self._step()
            if self._ready_now():
                self._ready.append(self.current)
                self._switch()
        return self._trace

    def point(self) -> None:
        """Switch to another thread, if the seed says so."""
        if self.is_over:
            return
        self._step()
        if self._ready_now() and self.random.random() < self._switch_rate:
            self._ready.append(self.current)
            self._switch()

    def wait_until(
        self, is_true: Callable[[], bool], on: object, timeout_s: float | None = None
    ) -> bool:
        """Wait until a condition holds, checked at each `wake(on)`; return whether it holds."""
        due = None if timeout_s is None else self.now + timeout_s
        while not is_true():
            if self.is_over or (due is not None and self.now >= due):
                return False
            self._step()
            self.current.waits_for, self.current.due = on, due
            self._switch()
        return True

    def sleep(self, seconds: float) -> None:
        """Wait for some virtual time."""
        self.wait_until(lambda: False, object(), max(0.0, seconds))

    def wake(self, on: object) -> None:
        """Wake the threads that wait for an object."""
        for thread in self._threads:
            if thread.waits_for is on:
                self._make_ready(thread)

    def stacks(self) -> str:
        """Describe the stack of every thread, and where tasks are waiting."""
        frames = sys._current_frames()  # noqa: SLF001 - the only way to another thread's stack
        parts = []
        for thread in self._threads:
            frame = frames.get(thread.ident or -1)
            if thread.ended or frame is None:
                continue
            lines = traceback.format_stack(frame)
            ours = [line.rstrip() for line in lines if "/simulation/scheduler" not in line]
            parts.append("\n".join([f"thread {thread.name}:", *ours[-6:]]))
        return "\n".join([*parts, self.describe_waiting()])

    def _watch(self, ended: threading.Event) -> None:
        """Raise a `StuckError` in a thread that runs for `MOST_REAL_S` without a step."""
        num_steps = -1
        while not ended.wait(MOST_REAL_S):
            if num_steps == self.num_steps:
                self.stuck_at = self.stuck_at or self.stacks()
                ident = ctypes.c_ulong(self.current.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(StuckError))
            num_steps = self.num_steps

    def _make_ready(self, thread: SimulatedThread) -> None:
        thread.waits_for = thread.due = None
        self._ready.append(thread)

    def _step(self) -> None:
        if self.is_ending and self.current is not self._main:
            raise SimulationEnded
        self.now += STEP_S
        self.num_steps += 1
        if self.num_steps == self.max_steps:
            self._fail(f"no end after {self.num_steps} steps")

    def _fail(self, why: str) -> None:
        """Let the main thread raise an error, at once or in its next turn."""
        error = StuckError(f"{why}\n{self.stacks()}")
        if self.current is self._main:
            raise error
        self._main.error = self._main.error or error
        if self._main.waits_for is not None:
            self._make_ready(self._main)

    def _ready_now(self) -> list[SimulatedThread]:
        for thread in self._threads:
            if thread.due is not None and thread.due <= self.now:
                self._make_ready(thread)
        return self._ready

    def _choose(self) -> SimulatedThread:
        while not (runnable := [each for each in self._ready_now() if not each.process.is_stopped]):
            if due := [each.due for each in self._threads if each.due is not None]:
                self.now = max(self.now, min(due))
            elif self._main.waits_for is not None:
                self._main.error = StuckError(f"all threads wait for ever\n{self.stacks()}")
                self._make_ready(self._main)
            else:
                raise AssertionError("no thread can run")
        chosen = runnable[self.random.randrange(len(runnable)) if len(runnable) > 1 else 0]
        self._ready.remove(chosen)
        return chosen

    def _switch(self) -> None:
        """Run the next thread, and wait for the turn of this one."""
        me = self.current
        chosen = self._choose()
        if chosen is not me:
            self.current = chosen
            chosen.turn.release()
            me.turn.acquire()
        if self.is_ending and me is not self._main:
            raise SimulationEnded
        if me is self._main and me.error is not None:
            error, me.error = me.error, None
            raise error

    def _run_to_end(self, thread: SimulatedThread) -> None:
        """Let a thread run until it has ended; called by the main thread."""
        thread.waits_for = thread.due = None
        self.current = thread
        thread.turn.release()
        self._main.turn.acquire()

"""Ports for the servers of tests and benchmarks."""

import contextlib
import socket

from kvxfer import runtime


def free_ports(number: int = 1) -> int:
    """Find `number` consecutive free ports below the ephemeral ones; return the first.

    No outgoing connection takes one of them before its server does.
    """
    while True:
        first = runtime.random().randrange(10_000, 32_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + number):
                at = "127.0.0.1", port
                stack.enter_context(runtime.listen(at, family=socket.AF_INET, backlog=1))
            return first

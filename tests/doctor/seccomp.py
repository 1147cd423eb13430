"""Run a `kvxfer` command in a process in which io_uring is forbidden, as Docker forbids it."""

import ctypes
import struct
import sys

from kvxfer.cli import main

IO_URING_SETUP = 425  # on every architecture
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of a word; to a constant; a constant
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # the latter with EPERM


class Program(ctypes.Structure):
    """Filter of system calls. Source: Linux, include/uapi/linux/filter.h, `sock_fprog`."""

    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))


def forbid_io_uring() -> None:
    """Let `io_uring_setup` fail in this process from now on."""
    steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, IO_URING_SETUP), (RETURN, 0, 0, REFUSE)]
    steps.append((RETURN, 0, 0, ALLOW))
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    program = Program(len(steps), code)
    assert prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) == 0


if __name__ == "__main__":
    forbid_io_uring()
    sys.exit(main(sys.argv[1:]))

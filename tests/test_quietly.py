"""Commands whose output goes to a file: what the screen says, and what it does not."""

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

QUIETLY = Path(__file__).with_name("quietly.py")
NOISY = "import sys; print(*range(100), sep='\\n'); sys.exit(int(sys.argv[1]))"


def command(log: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(QUIETLY), str(log), "Counting", *arguments]


@pytest.mark.parametrize("status", [0, 3])
def test_the_output_goes_to_the_log_and_only_its_end_is_shown_after_a_failure(
    tmp_path: Path, status: int
) -> None:
    log = tmp_path / "logs" / "count.log"
    ended = subprocess.run(
        command(log, sys.executable, "-c", NOISY, str(status)),
        capture_output=True,
        text=True,
        check=False,
    )
    shown = ended.stdout.splitlines()
    assert ended.returncode == status
    assert log.read_text().splitlines() == [str(number) for number in range(100)]
    assert shown[0] == f"Counting ... (log: {log})"
    assert shown[1].startswith("Counting: failed in" if status else "Counting: done in")
    assert shown[2:-1] == [str(number) for number in range(80, 100)] * bool(status)
    assert (str(log) in shown[-1]) is bool(status)


def test_a_terminal_is_shown_what_was_printed_last_on_one_line(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    # It goes on only when the screen has shown what it printed.
    waits = "import sys; print('counted to a hundred', flush=True); open(sys.argv[1]).read()"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    arguments = command(tmp_path / "log", sys.executable, "-c", waits, str(fifo))
    with subprocess.Popen(arguments, stdout=theirs, stdin=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"counted to a hundred" not in shown:
            shown += os.read(ours, 4096)
        fifo.write_text("go on")
        with contextlib.suppress(OSError):  # how Linux reports the end of a terminal
            while True:
                shown += os.read(ours, 4096)
        assert process.wait() == 0
    os.close(ours)
    assert b"done in" in shown
    assert shown.count(b"\n") == 1

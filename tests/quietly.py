"""Runner of commands: their output goes to a file, their progress to one line of the screen.

`python quietly.py LOG TITLE COMMAND ...`: on a terminal, the line shows the seconds so far and the
command's last output; elsewhere, one line says that it began and another how it ended. If the
command fails, the end of its output and the path of the log follow. Needs only Python.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

REFRESH_S = 0.2
TAIL_LINES = 20
TAIL_BYTES = 1 << 16
CLEAR_LINE = "\r\x1b[K"


def main(arguments: list[str]) -> int:
    log, title, *command = arguments
    return run(Path(log), title, command)


def run(log: Path, title: str, *commands: list[str]) -> int:
    """Run commands at the same time; return the largest exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    live = sys.stdout.isatty()
    if not live:
        print(f"{title} ... (log: {log})", flush=True)
    start_s = time.monotonic()
    with log.open("ab") as output:
        output.truncate(0)
        processes = [
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            for command in commands
        ]
        status = 0
        for process in processes:
            while process.returncode is None:
                try:
                    process.wait(REFRESH_S if live else None)
                except subprocess.TimeoutExpired:
                    _show(f"{title} {time.monotonic() - start_s:4.0f} s  {_last_line(log)}")
                except KeyboardInterrupt:  # the commands were interrupted, too
                    status = 1
            status = max(status, abs(process.returncode))
    ended = "failed" if status else "done"
    print(f"{CLEAR_LINE if live else ''}{title}: {ended} in {time.monotonic() - start_s:.0f} s")
    if status:
        print(*_tail(log)[-TAIL_LINES:], sep="\n")
        print(f"These are the last lines of {log}")
    return status


def _show(line: str) -> None:
    """Write over the line of the terminal, and not beyond its width."""
    columns = shutil.get_terminal_size().columns
    print(CLEAR_LINE + line[: columns - 1], end="", flush=True)


def _last_line(path: Path) -> str:
    """Return the last line of progress: neither an indented line nor a warning."""
    lines = [line for line in _tail(path) if not line.startswith((" ", "WARNING"))]
    return "".join(filter(str.isprintable, next(filter(None, reversed(lines)), "")))


def _tail(path: Path) -> list[str]:
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

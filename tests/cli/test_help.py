"""`kvxfer --help`: its text, its few imports, and the package's names in spite of them."""

import os
import re
import subprocess
from pathlib import Path
from typing import get_args

import pytest

from kvxfer.backends.nixl import Transport
from kvxfer.cli import _COMMANDS, main
from kvxfer.cli.serve import TRANSPORTS
from tests.cli.peers import COMMAND
from tests.interpreter import run_python

pytestmark = pytest.mark.processes

COMMANDS = sorted(_COMMANDS)
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
"""Environment of a shell; images of containers and CI often set this variable."""

SHOW_HELP = """
import sys
from kvxfer.cli import main
for command in sys.argv[1:]:
    assert main([*command.split(), "--help"]) == 0
    assert "torch" not in sys.modules, f"{command} imports torch"
"""

USE_NAMES = """
import sys
import kvxfer
assert "torch" not in sys.modules
from kvxfer.connect import open_backend
assert kvxfer.connect.__name__ == "connect" and callable(kvxfer.connect)
import kvxfer.public
assert len(kvxfer.__all__) == len(kvxfer.public.__all__)
assert all(getattr(kvxfer, name) is getattr(kvxfer.public, name) for name in kvxfer.__all__)
assert {"canonicalize", "connect", "errors"} <= set(dir(kvxfer))
assert not hasattr(kvxfer, "nothing") and not hasattr(kvxfer, "__wrapped__")
from kvxfer import *
assert canonicalize is kvxfer.canonicalize
"""

FAIL_TO_IMPORT = """
import signal, sys
from kvxfer.cli import main
class Failing:
    def find_spec(self, name, *_):
        if name == "kvxfer.cli.stores":
            {}
sys.meta_path.insert(0, Failing())
sys.exit(main(["fsck", "/"]))
"""


def run(code: str, *arguments: str) -> str:
    result = run_python("-W", "error", "-c", code, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_help_needs_no_torch_and_says_what_exit_statuses_mean() -> None:
    said = run(SHOW_HELP, "", *COMMANDS).split("usage: ")[1:]
    assert len(said) == 1 + len(COMMANDS)
    assert all("exit status:" in each and "2 when" in each for each in said)


@pytest.mark.parametrize(
    "arguments",
    [[], ["--nothing"], ["nothing"], ["two\nlines"], *([name, "--nothing"] for name in COMMANDS)],
)
def test_what_cannot_be_parsed_is_one_line_and_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    name = " ".join(["kvxfer", *arguments[:-1]])
    assert re.fullmatch(rf"{name}: .+; see {name} --help\n", printed.err)
    assert not printed.out


@pytest.mark.parametrize("output", ["a pipe that nobody reads", "/dev/full"])
def test_an_error_has_its_status_also_where_it_cannot_be_said(output: str) -> None:
    reads, writes = os.pipe() if output.startswith("a pipe") else (os.dup(0), os.open(output, 1))
    os.close(reads)
    command = [*COMMAND, "ls", "/nonexistent"]
    result = subprocess.run(command, env=BUFFERED, stderr=writes, check=False)
    os.close(writes)
    assert result.returncode == 2


@pytest.mark.parametrize("arguments", ["--help", "--version", "ls --help"])
@pytest.mark.parametrize(("output", "status"), [("/dev/full", 2), ("a pipe nobody reads", 141)])
@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
def test_a_text_that_cannot_be_printed_is_no_success_and_no_traceback(
    arguments: str, output: str, status: int, unbuffered: dict[str, str]
) -> None:
    reads, writes = os.pipe() if status == 141 else (os.dup(0), os.open(output, os.O_WRONLY))
    os.close(reads)
    result = subprocess.run(
        [*COMMAND, *arguments.split()],
        env=BUFFERED | unbuffered,
        stdout=writes,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writes)
    assert result.returncode == status
    said = b": [Errno 28] No space left on device\n" if status == 2 else b""
    assert result.stderr.removeprefix(b"kvxfer").removeprefix(b" ls") == said


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        ("signal.raise_signal(signal.SIGINT)", 130, ""),
        ("raise ImportError('no memory')", 2, "ImportError: no memory"),  # 1 would be a bad block
    ],
)
def test_a_command_that_cannot_be_imported_has_a_status_of_its_own(
    fault: str, status: int, said: str
) -> None:
    result = run_python("-c", FAIL_TO_IMPORT.format(fault))
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr.strip().split("\n")[-1] == said


def test_public_names_are_there_when_they_are_asked_for() -> None:
    run(USE_NAMES)


def test_the_transports_that_can_be_named_are_those_that_there_are() -> None:
    assert get_args(Transport) == TRANSPORTS


@pytest.mark.parametrize("name", COMMANDS)
def test_a_path_with_a_nul_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "a\0b"]) == 2
    said = capsys.readouterr().err
    assert said == "kvxfer: 'a\\x00b' has a NUL, which no path or address has; see kvxfer --help\n"


@pytest.mark.parametrize(
    ("command", "page", "example"),
    [
        ("serve", "peers.md", "--capacity"),
        ("doctor", "cli.md", "--json"),
        ("explain", "cli.md", "--journal"),
        ("replay", "fleets.md", "--budget"),
    ],
)
def test_every_option_is_in_the_table_of_a_page(
    command: str, page: str, example: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    explained = "\n".join(line for line in text.splitlines() if line.startswith("| `--"))
    assert main([command, "--help"]) == 0
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert example in options
    assert not [option for option in sorted(options) if f"`{option}" not in explained]

"""Files named by users: pipes with a writer are read, and others give up in time."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer import named_files
from kvxfer.backends.nixl import NixlConfig, tls_contexts
from kvxfer.doctor import compare, is_comparable, read_backends
from kvxfer.errors import InvalidArgumentError
from kvxfer.named_files import read_named_file
from kvxfer.pages.texts import load_namespace
from kvxfer.storage.integrity import read_secret


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a pipe, and shorten the time limit for reading it."""
    monkeypatch.setattr(named_files, "TIMEOUT_S", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_a_pipe_is_read_to_its_end_in_time(pipe: Path) -> None:
    data = bytes(300_000)
    writer = threading.Thread(target=pipe.write_bytes, args=[data])
    writer.start()
    assert read_named_file(pipe).data == data
    writer.join()
    half = os.open(pipe, os.O_RDWR)
    os.write(half, b"half")
    with pytest.raises(TimeoutError, match="the pipe did not end"):
        read_named_file(pipe)
    os.close(half)


@pytest.mark.parametrize(
    "read",
    [read_secret, load_namespace, read_backends, lambda path: compare([path] * 2, timeout_s=30)],
    ids=["a secret", "a namespace", "a configuration", "two to compare"],
)
def test_a_pipe_that_nobody_writes_to_is_named(pipe: Path, read: Callable[[str], object]) -> None:
    assert is_comparable(str(pipe))
    with pytest.raises(InvalidArgumentError, match=f"{pipe}.*the pipe did not end within 0.2 s"):
        read(str(pipe))


def test_a_pipe_is_no_certificate_and_neither_is_what_cannot_be_looked_at(pipe: Path) -> None:
    for path, said in ((str(pipe), "expected regular files"), ("c" * 256, "name too long")):
        config = NixlConfig(address="127.0.0.1:1", tls_cert=path, tls_key=path, tls_ca=path)
        with pytest.raises(InvalidArgumentError, match=f"'{path[:99]}.*{said}"):
            tls_contexts(config)


def test_what_is_too_large_or_a_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_files, "MAX_BYTES", 4)
    (tmp_path / "file").write_bytes(b"12345")
    with pytest.raises(OSError, match="too large"):
        read_named_file(tmp_path / "file")
    with pytest.raises(IsADirectoryError):
        read_named_file(tmp_path)

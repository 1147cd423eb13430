"""Opening: a file backend that cannot be opened says why, and leaves nothing open."""

import mmap
from pathlib import Path

import pytest

from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from tests.backends.file_store import fail_to_open, one_page_memory, open_store


def open_descriptors() -> list[str]:
    """List the descriptors of this process, without those that are closed meanwhile."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(str(path.readlink()) for path in links)


@pytest.mark.parametrize("pattern", ["*.safetensors.tmp", "*.claim", "usage.ledger"])
@pytest.mark.parametrize("engine", ["auto", "posix"])
def test_a_backend_that_cannot_be_opened_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, engine: str
) -> None:
    before = open_descriptors()
    fail_to_open(monkeypatch, pattern, OSError(28, "No space left on device"))
    with pytest.raises(BackendUnavailableError, match="No space left"):
        open_store(tmp_path, one_page_memory().namespace(), engine=engine)
    assert open_descriptors() == before
    assert list(tmp_path.glob("*.claim")) == []


def test_an_engine_that_the_machine_lacks_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    before = open_descriptors()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(InvalidArgumentError, match="an engine that this machine has"):
        open_store(tmp_path, one_page_memory().namespace(), engine="uring", direct="off")
    assert open_descriptors() == before
    assert list(tmp_path.glob("*.claim")) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_path_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="path"):
        open_store(tmp_path / name, one_page_memory().namespace())


@pytest.mark.parametrize("name", ["rescan_factor", "close_timeout_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_pause_that_cannot_be_is_named(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} is .*; expected 0 or more"):
        open_store(tmp_path, one_page_memory().namespace(), **{name: value})

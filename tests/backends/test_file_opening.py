"""Opening: a file backend that cannot be opened says why, and leaves nothing open."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.file import backend as backend_module
from kvxfer.backends.file.folders import ledger as ledger_module
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError, KVXferError
from tests.backends.file_store import one_page_memory, open_store


def open_descriptors() -> list[str]:
    """List the descriptors of this process, without those that are closed meanwhile."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(str(path.readlink()) for path in links)


def fail(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def refuse(*_: object, **__: object) -> None:
    raise InvalidArgumentError("engine", "uring", "an engine that this machine has")


@pytest.mark.parametrize(
    ("module", "name", "instead", "error"),
    [
        (backend_module, "write_namespace", fail, BackendUnavailableError),
        (ledger_module, "ProcessClaim", fail, BackendUnavailableError),
        (backend_module, "Ledger", fail, BackendUnavailableError),
        (backend_module, "open_engine", refuse, InvalidArgumentError),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "posix"])
def test_a_backend_that_cannot_be_opened_leaves_nothing_open(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: object,
    name: str,
    instead: Callable[..., None],
    error: type[KVXferError],
    engine: str,
) -> None:
    before = open_descriptors()
    monkeypatch.setattr(module, name, instead)
    with pytest.raises(error):
        open_store(tmp_path, one_page_memory().namespace(), engine=engine)
    assert open_descriptors() == before
    assert list(tmp_path.glob("*.claim")) == []


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_path_that_cannot_be_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="path"):
        open_store(tmp_path / name, one_page_memory().namespace())

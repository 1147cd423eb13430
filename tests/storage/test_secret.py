"""A file with a secret: read for every user of it by one function, which looks at its mode."""

import logging
from pathlib import Path

import pytest

from kvxfer.storage.integrity import read_secret

SECRET = bytes(range(32))


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o777])
def test_a_secret_that_everybody_can_read_or_replace_is_taken_with_a_warning(
    secret_file: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    secret_file.chmod(mode)
    assert read_secret(str(secret_file)) == SECRET
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{secret_file} has mode {mode:04o}" in record.getMessage()


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640, 0o660])
def test_a_secret_of_its_owner_and_group_is_taken_without_a_word(
    secret_file: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    secret_file.chmod(mode)
    assert read_secret(str(secret_file)) == SECRET
    assert not caplog.records

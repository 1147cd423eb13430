"""checksum_blocks: XXH3-64 of the bytes of a block, however they are cut."""

from pathlib import Path

import pytest
import xxhash

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.integrity import checksum_blocks, read_secret
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads


@pytest.mark.parametrize(
    "pages", [[7, 512, 64], [4096], [128 << 10, 96 << 10], [1 << 20], [3 << 20, 1]]
)
def test_the_checksum_is_that_of_the_bytes_in_a_row(pages: list[int]) -> None:
    memory = BlockMemory([pages], num_blocks=12)
    blocks = memory.describe(0, [3, 1, 2, 9, 7])
    keys = make_keys(5)
    write_payloads(blocks, [make_payload(key, sum(pages)) for key in keys])
    engine = CPUCopyEngine()
    try:
        checksums = checksum_blocks(blocks, engine)
    finally:
        engine.close()
    assert checksums == [xxhash.xxh3_64_intdigest(payload) for payload in read_payloads(blocks)]


@pytest.mark.parametrize("mode", [0o644, 0o602, 0o777, 0o400, 0o660])
def test_a_secret_that_everybody_can_read_or_replace_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    path, secret = tmp_path / "secret", bytes(range(32))
    path.write_bytes(secret)
    path.chmod(mode)
    assert read_secret(str(path)) == secret
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == bool(mode & 0o006)
    assert all(f"{path} has mode {mode:04o}" in each for each in said)

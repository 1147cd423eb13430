"""checksum_blocks: XXH3-64 of the bytes of a block, however they are cut."""

import pytest
import xxhash

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.storage.integrity import checksum_blocks
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


@pytest.mark.parametrize(("fragment", "gathered"), [(4 << 10, 1), (64 << 10, 1), (65 << 10, 0)])
def test_fragments_are_gathered_that_xxhash_would_hash_under_the_interpreter_lock(
    fragment: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, engine = BlockMemory([[fragment] * 8], num_blocks=2), CPUCopyEngine()
    copies: list[object] = []
    copy = engine.copy
    monkeypatch.setattr(engine, "copy", lambda *sides: [copies.append(sides), copy(*sides)])
    checksum_blocks(memory.describe(0, [1]), engine)
    engine.close()
    assert len(copies) == gathered

"""checksum_blocks: XXH3-64 of the bytes of a block, however they are cut."""

import os

import pytest
import xxhash

from kvxfer.copy_engine.cpu import CPUCopyEngine
from kvxfer.kvcache.descriptors import Descriptors
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


@pytest.mark.parametrize(("fragment", "gathered"), [(4 << 10, 1), (5 << 10, 0), (65 << 10, 0)])
def test_fragments_are_gathered_that_are_no_longer_than_a_page(
    fragment: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, engine = BlockMemory([[fragment] * 8], num_blocks=2), CPUCopyEngine()
    original, num_copies = engine.copy, 0

    def copy(source: Descriptors, destination: Descriptors) -> None:
        nonlocal num_copies
        num_copies += 1
        original(source, destination)

    monkeypatch.setattr(engine, "copy", copy)
    checksum_blocks(memory.describe(0, [1]), engine)
    engine.close()
    assert num_copies == gathered


@pytest.mark.parametrize(("fragment", "num_turns"), [(4 << 10, 0), (64 << 10, 4), (65 << 10, 0)])
def test_other_threads_get_the_interpreter_lock_where_xxhash_keeps_it(
    fragment: int, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, engine = BlockMemory([[fragment] * 16], num_blocks=8), CPUCopyEngine()
    blocks = memory.describe(0, range(8))
    turns: list[None] = []
    expected = [xxhash.xxh3_64_intdigest(payload) for payload in read_payloads(blocks)]
    monkeypatch.setattr(os, "sched_yield", lambda: turns.append(None))
    assert checksum_blocks(blocks, engine) == expected
    engine.close()
    assert len(turns) == num_turns

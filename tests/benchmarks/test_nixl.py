"""`make bench NAME=nixl`: it moves the bytes that it reports."""

import json
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.nixl import raw
from benchmarks.nixl.cases import MODELS
from benchmarks.nixl.far import FarProcess
from benchmarks.nixl.near import Near
from benchmarks.nixl.raw import TOTAL_BYTES, PlainClient, PlainServer, RawAgent, allocate
from kvxfer.kvcache.fragment_pairs import pair_fragments

BLOCK_BYTES = 2 << 20


@pytest.fixture
def near() -> Near:
    return Near(None, BLOCK_BYTES)  # type: ignore[arg-type] # nothing is asked of it


def test_pages_of_layers_cover_the_same_memory_as_whole_blocks_and_do_not_merge(near: Near) -> None:
    page_bytes, num_pages = MODELS["Llama-3.1-8B"]
    assert page_bytes * num_pages == BLOCK_BYTES
    pages, whole = near.described(page_bytes), near.described(BLOCK_BYTES)
    assert (len(whole), len(pages)) == (near.num_blocks, near.num_blocks * num_pages)
    starts = np.sort(pages.addresses)
    assert (np.diff(starts) == page_bytes).all()
    assert starts[0] == whole.addresses.min()
    assert pages.num_bytes == whole.num_bytes == TOTAL_BYTES
    assert len(pair_fragments(pages, whole)[2]) == len(pages)


def test_fragments_of_both_sides_are_all_of_them_and_hardly_any_touch_on_both(near: Near) -> None:
    ours, theirs = near.fragments(32 << 10)
    everything = np.arange(TOTAL_BYTES // (32 << 10))
    assert (np.sort(ours) == everything).all()
    assert (np.sort(theirs) == everything).all()
    touching = (np.diff(ours) == 1) & (np.diff(theirs) == 1)
    assert touching.sum() < len(everything) // 16


def test_a_transfer_that_never_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw, "LIMIT_S", 0.05)
    agent = RawAgent.__new__(RawAgent)
    agent.agent = Mock()
    agent.agent.transfer.return_value = agent.agent.check_xfer_state.return_value = "PROC"
    agent._lists = {4096: (None, None)}
    nothing = np.zeros(0, np.int32)
    with pytest.raises(RuntimeError, match="READ in state PROC"):
        agent.move("READ", 4096, nothing, nothing)
    agent.agent.check_xfer_state.assert_called()


@pytest.mark.slow
def test_a_plain_connection_moves_blocks_in_the_given_order() -> None:
    block_bytes = TOTAL_BYTES // 4
    theirs, ours = allocate(1), allocate(2)
    sent = ours.copy()
    client = PlainClient(
        PlainServer(theirs, block_bytes).port, ours, block_bytes, order=[3, 1, 0, 2]
    )
    client.store()
    rows, sent_rows = theirs.reshape(4, -1), sent.reshape(4, -1)
    assert (rows == sent_rows[[3, 1, 0, 2]]).all()
    ours[:] = 0
    client.load()
    assert (ours == sent).all()
    client.close()


@pytest.mark.processes
def test_what_fails_in_the_other_process_is_told() -> None:
    with FarProcess() as far, pytest.raises(RuntimeError, match=r"move_raw failed.*Assertion"):
        far.ask("move_raw", "READ", 4096, [], [])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_benchmark_runs() -> None:
    command = [sys.executable, "-m", "benchmarks", "nixl", "--quick", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(printed)
    assert len(rows) == 38
    assert all(each["value"] > 0 and each["baseline"] > 0 for each in rows)

"""Audit of the end-to-end tests: it passes what is right, and finds each planted fault."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.backends.nixl.client import Client
from kvxfer.endpoint import free_ports
from kvxfer.kvcache.portable import describe_caches
from kvxfer.kvcache.portable.cache_description import STATE_TOKENS
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Fetched
from kvxfer.storage.prompt_keys import PromptKeys
from tests.e2e import audit
from tests.e2e.handover_audit import BLOCK, AuditedHandover, Sign, planted, read
from tests.storage.portable_workers import NAMESPACE, make_engine, make_values

TOKENS = list(range(30))
TICKET = "0123456789abcdef"
LIMIT_S = 20.0
NHD, HND = "block kv token head dim", "block kv head token dim"
BLOCKS = {16: [1, 3], 32: [1]}
"""Blocks of the prompt, by the tokens of a block."""


class Engine:
    """Engine whose workers hand over under audit."""

    def __init__(
        self, stack: ExitStack, layout: str, *, tp_size: int = 1, tokens_per_block: int = 16
    ) -> None:
        self.tokens_per_block = tokens_per_block
        self.workers = make_engine(layout, tp_size=tp_size, tokens_per_block=tokens_per_block)
        self.endpoint = Endpoint("127.0.0.1", free_ports(tp_size))
        self.handovers: list[Any] = []
        for rank, worker in enumerate(self.workers):
            listen = str(Endpoint(self.endpoint.host, self.endpoint.port + rank))
            config = NixlConfig(listen=listen, transport="socket", timeout_s=5.0)
            description = describe_caches(worker.caches, worker.shard)
            handover = Handover(config, NAMESPACE, description, worker.caches)
            stack.enter_context(handover)
            self.handovers.append(AuditedHandover(handover, worker.caches, description))

    def offer(self) -> None:
        """Compute the prompt, and offer it."""
        values = make_values()
        for worker, handover in zip(self.workers, self.handovers, strict=True):
            worker.fill(values)
            keys = PromptKeys(TOKENS).block_keys(0, self.tokens_per_block, len(TOKENS))
            handover.offer(TICKET, keys, BLOCKS[self.tokens_per_block])

    def fetch(self, endpoint: Endpoint) -> list[Fetched]:
        """Fetch the prompt on every worker."""
        first, prompt = self.handovers[0], PromptKeys(TOKENS)
        found = first.submit(first.ask(endpoint, TICKET, prompt)).result(LIMIT_S)
        wanted = found.wanted(prompt, 0, len(TOKENS), [BLOCKS[self.tokens_per_block]])
        loads = [each.submit(each.fetch(endpoint, wanted)) for each in self.handovers]
        return [load.result(LIMIT_S) for load in loads]


@pytest.fixture(autouse=True)
def _sound_reader_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what the audit plants in the class of all readers of this process."""
    monkeypatch.setattr(Client, "_read_proven", Client._read_proven)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setenv(audit.DIRECTORY, str(tmp_path))
    with ExitStack() as stack:
        yield stack


def hand_over(stack: ExitStack, theirs: dict[str, Any], ours: dict[str, Any]) -> list[Fetched]:
    first, second = (Engine(stack, **each) for each in (theirs, ours))
    first.offer()
    return second.fetch(first.endpoint)


SHAPES: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("equal", {"layout": NHD}, {"layout": NHD}),
    ("layouts", {"layout": NHD}, {"layout": HND}),
    ("larger blocks", {"layout": NHD, "tokens_per_block": 32}, {"layout": NHD}),
    ("smaller blocks", {"layout": NHD}, {"layout": NHD, "tokens_per_block": 32}),
    ("TP 2 to 1", {"layout": HND, "tp_size": 2}, {"layout": NHD}),
    ("TP 1 to 2", {"layout": NHD}, {"layout": NHD, "tp_size": 2}),
]
each_shape = pytest.mark.parametrize(
    ("theirs", "ours"), [pytest.param(*pair, id=name) for name, *pair in SHAPES]
)


@each_shape
def test_every_page_that_is_loaded_is_compared(
    theirs: dict[str, Any], ours: dict[str, Any], stack: ExitStack, tmp_path: Path
) -> None:
    hand_over(stack, theirs, ours)

    report = read(tmp_path)
    num_workers = ours.get("tp_size", 1)
    assert report.num_pages == len(BLOCKS[ours.get("tokens_per_block", 16)]) * num_workers
    assert report.num_tokens == len(TOKENS)
    assert report.ranks == set(range(num_workers))
    assert not report.problem


@each_shape
def test_a_reader_that_verifies_nothing_is_found_out(
    theirs: dict[str, Any], ours: dict[str, Any], stack: ExitStack, tmp_path: Path
) -> None:
    with planted(tmp_path, Sign.ALTER_LENT, Sign.SKIP_VERIFICATION):
        fetched = hand_over(stack, theirs, ours)

    assert not any(each.missing for each in fetched)
    assert read(tmp_path).different


def test_pages_that_nobody_offered_are_found_out(stack: ExitStack, tmp_path: Path) -> None:
    hand_over(stack, {"layout": NHD}, {"layout": NHD})
    for path in tmp_path.glob("handover*.jsonl"):
        lines = [line for line in path.read_text().splitlines() if '"load"' in line]
        path.write_text("".join(f"{line}\n" for line in lines))

    assert len(read(tmp_path).unknown) == len(BLOCKS[16])


@each_shape
def test_a_page_that_lands_altered_is_not_loaded(
    theirs: dict[str, Any], ours: dict[str, Any], stack: ExitStack, tmp_path: Path
) -> None:
    with planted(tmp_path, Sign.ALTER_LENT):
        fetched = hand_over(stack, theirs, ours)

    assert all(each.missing["corrupt"] == 1 for each in fetched if each.num_verified == 1)
    assert sum(each.missing["corrupt"] for each in fetched) > 0
    assert all(each.bad_blocks[0] for each in fetched)
    assert not read(tmp_path).problem


def test_blocks_that_were_swapped_are_not_loaded(stack: ExitStack, tmp_path: Path) -> None:
    with planted(tmp_path, Sign.SWAP_LENT):
        [fetched] = hand_over(stack, {"layout": NHD}, {"layout": NHD})

    assert fetched.missing == {"corrupt": len(BLOCKS[16])}
    assert fetched.bad_blocks == [BLOCKS[16]]
    assert read(tmp_path).num_pages == 0


@pytest.mark.parametrize("first_token", [0, 4])
def test_an_altered_state_is_found_out_wherever_the_load_begins(
    first_token: int, tmp_path: Path
) -> None:
    offer = {"event": "offer", "blocks": [("key", STATE_TOKENS, {BLOCK: [1]})]}
    group = {"keys": ["key"], "first_block": 0, "blocks": [(0, {BLOCK: [2]})]}
    load = {"event": "load", "rank": 0, "tokens": (first_token, 9), "groups": [group]}
    lines = (json.dumps(line) + "\n" for line in (offer, load))
    (tmp_path / "handover0-1.jsonl").write_text("".join(lines))

    assert len(read(tmp_path).different) == 1

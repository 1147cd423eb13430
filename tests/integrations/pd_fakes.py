"""Fakes for tests of prefill and decode: requests of vLLM, and a hand-over of the test."""

from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, Self

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import ClosedError
from kvxfer.kvcache.portable.cache_description import STATE_TOKENS
from kvxfer.lending.reader import Fetched, Found, Wanted
from kvxfer.storage.observer import Reports
from kvxfer.storage.prompt_keys import PromptKeys

LEASE = "0123456789abcdef0123456789abcdef"
BLOCK = 4
"""Tokens of a block."""


def ticket_params(**changes: Any) -> dict[str, Any]:
    """Parameters of a request at D."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "p",
        "remote_request_id": LEASE,
        "remote_host": "127.0.0.1",
        "remote_port": 7200,
        "remote_block_ids": [[0]],
        "tp_size": 1,
    }
    return params | changes


def make_request(params: Any, *, name: str = "r", tokens: int = 10, **fields: Any) -> Any:
    """Make what the connector uses of a `vllm.v1.request.Request`."""
    prompt = list(range(tokens))
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=prompt,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_preemptions=0,
        **fields,
    )


def make_found(
    tokens: int, *, is_complete: bool = True, num_groups: int = 1, num_states: int = 0
) -> Found:
    """Answer of a P with the blocks of this module; the last groups have states."""
    has_states = (False,) * (num_groups - num_states) + (True,) * num_states
    sizes = tuple(STATE_TOKENS if each else BLOCK for each in has_states)
    return Found(tokens, is_complete, sizes, sizes, has_states)


def make_blocks(*groups: Sequence[int], hashed: Sequence[int] = ()) -> Any:
    """Make what the connector uses of vLLM's `KVCacheBlocks`; 0 is the null block."""
    return SimpleNamespace(
        blocks=[
            [
                SimpleNamespace(
                    block_id=each, is_null=each == 0, block_hash=b"#" if each in hashed else None
                )
                for each in ids
            ]
            for ids in groups
        ]
    )


class FakeHandover:
    """Hand-over whose answers the test gives."""

    num_expired = 0
    is_on_device = False
    way = ""
    port = 7100

    def __init__(self) -> None:
        self.asked: dict[str, Future[Found]] = {}
        self.fetches: list[tuple[Wanted, str | None, Future[Fetched]]] = []
        self.drains: list[Future[None]] = []
        self.released: Counter[str] = Counter()
        self.offers: list[tuple[str, list[Any], list[int], bool]] = []
        self.revoked: list[str] = []
        self.given_up: list[str] = []
        self.ended: list[str] = []
        self.is_closed = False
        self.reports: Reports | None = None
        self._next: tuple[str, Any] | None = None

    @property
    def reader(self) -> Self:
        """What is asked of others."""
        return self

    def submit(self, call: Coroutine[Any, Any, Any]) -> "Future[Any]":
        call.close()
        if self.is_closed:
            raise ClosedError("hand-over")
        assert self._next is not None
        (kind, value), self._next = self._next, None
        future: Future[Any] = Future()
        if kind == "ask":
            self.asked[value] = future
        elif kind == "release":
            self.released[value] += 1
            future.set_result(None)
        elif kind == "drain":
            self.drains.append(future)
        else:
            self.fetches.append((*value, future))
        return future

    def ask(
        self,
        endpoint: Endpoint,
        ticket: str,
        prompt: PromptKeys,
        windows: Sequence[int | None] = (),
        *,
        waits: bool = False,
    ) -> Any:
        self._next = "ask", ticket
        return _nothing()

    def release(self, endpoint: Endpoint, ticket: str) -> Any:
        self._next = "release", ticket
        return _nothing()

    def fetch(self, endpoint: Endpoint, wanted: Wanted, *, waits_for: str | None = None) -> Any:
        self._next = "fetch", (wanted, waits_for)
        return _nothing()

    def drain(self, wanted: Wanted) -> Any:
        self._next = "drain", wanted
        return _nothing()

    def offer(
        self, ticket: str, keys: Sequence[Any], block_ids: Sequence[int], *, is_complete: bool
    ) -> None:
        self.offers.append((ticket, list(keys), list(block_ids), is_complete))

    def revoke(self, tickets: Sequence[str]) -> None:
        self.revoked += tickets

    def give_up(self, tickets: Sequence[str]) -> None:
        self.given_up += tickets

    def take_ended(self) -> list[str]:
        taken, self.ended = self.ended, []
        return taken

    def observe(self, reports: Reports) -> None:
        self.reports = reports

    def start(self) -> None:
        """Begin nothing."""

    def close(self) -> None:
        self.is_closed = True


async def _nothing() -> None:
    """Stand in for a call of the hand-over."""

"""States of recurrent layers: one for the whole prompt, found by its tokens, never by a part."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvxfer.backends.nixl import Endpoint, NixlConfig
from kvxfer.endpoint import free_ports
from kvxfer.errors import CacheMismatchError
from kvxfer.kvcache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    WorkerShard,
    canonicalize,
)
from kvxfer.kvcache.portable import describe_caches
from kvxfer.lending.handover import Handover
from kvxfer.lending.reader import Fetched, Found
from kvxfer.storage import Namespace
from kvxfer.storage.prompt_keys import PromptKeys
from tests.transfer.handover_engines import get

TICKET = "0123456789abcdef"
TOKENS = list(range(10))
WINDOWS = (None, 1)
STATE_BLOCK = 3


class Engine:
    """Engine of one worker with a group of tokens and one of states."""

    def __init__(
        self,
        stack: ExitStack,
        *,
        tokens_per_block: int = 4,
        state: tuple[int, int] = (3, 5),
        dtype: torch.dtype = torch.float16,
        tp_size: int = 1,
    ) -> None:
        heads = 2 // tp_size
        full = FullAttentionSpec(
            tokens_per_block=tokens_per_block, num_kv_heads=heads, head_dim=6, dtype=torch.float16
        )
        states = MambaSpec(tokens_per_block=4096, shapes=(state,), dtypes=(dtype,))
        groups = (KVCacheGroup(full, ("layers.0",)), KVCacheGroup(states, ("layers.1",)))
        self.tokens = torch.zeros(8, 2, tokens_per_block, heads, 6, dtype=torch.float16)
        self.states = torch.zeros(8, *state, dtype=dtype)
        caches = canonicalize(
            {"layers.0": self.tokens, "layers.1": [self.states]},
            KVCacheConfig(8, groups, null_block_id=0),
            layouts={"layers.0": "block kv token head dim"},
        )
        self.endpoint = Endpoint("127.0.0.1", free_ports())
        config = NixlConfig(listen=str(self.endpoint), transport="socket", timeout_s=5.0)
        description = describe_caches(caches, WorkerShard(num_kv_heads=2, tp_size=tp_size))
        self.size = tokens_per_block
        self.handover = Handover(config, Namespace(model="m"), description, caches)
        stack.enter_context(self.handover)

    def lend(self, num_tokens: int) -> None:
        prompt = PromptKeys(TOKENS)
        keys = prompt.block_keys(0, self.size, len(TOKENS))
        blocks = [*range(1, len(keys) + 1), STATE_BLOCK]
        keys.append(prompt.state_key(1, num_tokens))
        self.handover.offer(TICKET, keys, blocks, is_complete=True)

    def ask(self, other: "Engine", tokens: list[int] = TOKENS) -> Found:
        asking = self.handover.reader.ask(other.endpoint, TICKET, PromptKeys(tokens), WINDOWS)
        return get(self.handover.submit(asking))

    def fetch(self, other: "Engine", found: Found, blocks: list[list[int]], **how: Any) -> Fetched:
        first, stop = how.get("first_token", 0), how.get("num_tokens", len(TOKENS))
        wanted = found.wanted(PromptKeys(TOKENS), first, stop, blocks)
        return get(self.handover.submit(self.handover.reader.fetch(other.endpoint, wanted)))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("first_token", [0, 4, 8])
@pytest.mark.parametrize("their_size", [4, 8])
def test_the_state_comes_with_the_tokens(
    their_size: int, first_token: int, stack: ExitStack
) -> None:
    theirs, ours = Engine(stack, tokens_per_block=their_size), Engine(stack)
    theirs.states[STATE_BLOCK] = torch.arange(15).reshape(3, 5)
    theirs.tokens.normal_()
    theirs.lend(len(TOKENS))
    found = ours.ask(theirs)
    assert (found.num_tokens, found.has_states) == (len(TOKENS), (False, True))
    fetched = ours.fetch(theirs, found, [[5, 6, 7], [2]], first_token=first_token)
    assert fetched.bad_blocks == [[], []]
    assert torch.equal(ours.states[2], theirs.states[STATE_BLOCK])
    assert int(ours.states.count_nonzero()) == 14
    last = theirs.tokens[-(-10 // their_size), :, 8 % their_size : 8 % their_size + 2]
    assert torch.equal(ours.tokens[7, :, :2], last)


def test_a_state_after_other_tokens_is_not_there(stack: ExitStack) -> None:
    theirs, ours = Engine(stack), Engine(stack)
    theirs.lend(len(TOKENS) - 1)
    assert ours.ask(theirs).num_tokens == 0
    assert ours.ask(theirs, TOKENS[:-1]).num_tokens == 0  # its last block has one token more


def test_a_part_of_the_prompt_has_no_state(stack: ExitStack) -> None:
    theirs, ours = Engine(stack), Engine(stack)
    theirs.lend(len(TOKENS))
    fetched = ours.fetch(theirs, ours.ask(theirs), [[5, 6], [2]], num_tokens=8)
    assert fetched.bad_blocks == [[], [2]]


@pytest.mark.parametrize(
    ("theirs", "field", "values"),
    [
        ({"state": (5, 3)}, "s0", ("3 of 'layers.1.state0'", 5)),
        ({"dtype": torch.bfloat16}, "dtype of layers.1.state0", (torch.float16, torch.bfloat16)),
        ({"tp_size": 2}, "tp_size", (1, 2)),
    ],
)
def test_other_states_are_refused_by_field_and_both_values(
    theirs: dict[str, Any], field: str, values: tuple[Any, Any], stack: ExitStack
) -> None:
    other, ours = Engine(stack, **theirs), Engine(stack)
    with pytest.raises(CacheMismatchError) as caught:
        ours.ask(other)
    assert caught.value.group == 1
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, *values)

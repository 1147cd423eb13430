"""WantedBlocks: its rules one by one, and in any order against a slow, obvious model."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.storage.keys import BlockKey
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering.wanted_blocks import WantedBlocks
from tests.examples import examples

KEYS = make_keys(3)
REQUESTS = ["one", "two"]


def test_a_key_that_is_being_looked_up_is_not_asked_for_again() -> None:
    wanted, key = WantedBlocks(), KEYS[0]
    assert wanted.ask(key, "one") is None
    assert wanted.take_unasked() == [key]
    wanted.release("one")
    assert wanted.ask(key, "two") is None
    assert wanted.open == []
    wanted.tell([key], [True])
    assert wanted.ask(key, "two") is True


def test_an_answer_is_forgotten_with_the_last_request_that_wanted_it() -> None:
    wanted, key = WantedBlocks(), KEYS[0]
    for req_id in REQUESTS:
        wanted.ask(key, req_id)
    wanted.take_unasked()
    wanted.tell([key], [False])
    wanted.release("one")
    assert wanted.ask(key, "two") is False
    wanted.release("two")
    assert wanted.ask(key, "three") is None


def test_an_answer_from_before_its_key_was_forgotten_is_of_no_use() -> None:
    wanted, key = WantedBlocks(), KEYS[0]
    wanted.ask(key, "one")
    wanted.take_unasked()
    wanted.forget([key])
    assert wanted.ask(key, "one") is None
    wanted.tell([key], [False])
    assert wanted.ask(key, "one") is None
    assert wanted.take_unasked() == [key]


def test_a_slot_is_pinned_until_the_last_request_that_wants_its_block_is_released() -> None:
    wanted, (key, other) = WantedBlocks(), KEYS[:2]
    wanted.ask(other, "two")
    for req_id in REQUESTS:
        wanted.want(key, req_id).slot = 7
    assert wanted.release("one") == ([key], [])
    assert wanted.release("two") == ([key], [key])
    assert wanted.want(key, "three").slot is None


@dataclass
class Model:
    """Block of the model that was wanted."""

    asked: bool = False
    found: bool | None = None
    pinned: bool = False
    req_ids: set[str] = field(default_factory=set)

    @property
    def is_of_use(self) -> bool:
        """Whether a request wants it, or a lookup of it has not ended."""
        return bool(self.req_ids) or (self.asked and self.found is None)


class WantedBlocksMachine(RuleBasedStateMachine):
    keys = st.lists(st.sampled_from(KEYS), min_size=1, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.wanted = WantedBlocks()
        self.model: dict[BlockKey, Model] = {}
        self.open: list[BlockKey] = []  # in the order in which they were wanted

    def drop_useless(self) -> None:
        self.model = {key: each for key, each in self.model.items() if each.is_of_use}
        self.open = [key for key in self.open if key in self.model]

    @rule(key=st.sampled_from(KEYS), req_id=st.sampled_from(REQUESTS))
    def ask(self, key: BlockKey, req_id: str) -> None:
        model = self.model.setdefault(key, Model())
        model.req_ids.add(req_id)
        if not model.asked and key not in self.open:
            self.open.append(key)
        assert self.wanted.ask(key, req_id) is model.found

    @rule(key=st.sampled_from(KEYS), req_id=st.sampled_from(REQUESTS))
    def pin(self, key: BlockKey, req_id: str) -> None:
        model = self.model.setdefault(key, Model())
        model.req_ids.add(req_id)
        block = self.wanted.want(key, req_id)
        assert (block.slot is not None) is model.pinned
        model.pinned, block.slot = True, 7

    @rule()
    def take_unasked(self) -> None:
        unasked = [key for key in self.open if not self.model[key].asked]
        assert self.wanted.take_unasked() == unasked
        for key in unasked:
            self.model[key].asked = True
        self.open = []

    @rule()
    def ask_to_load(self) -> None:
        for key, model in self.model.items():
            if model.found:
                self.wanted.ask_to_load(key)
                self.open += [] if key in self.open else [key]

    @rule(keys=keys, found=st.lists(st.booleans(), min_size=len(KEYS), max_size=len(KEYS)))
    def tell(self, keys: list[BlockKey], found: list[bool]) -> None:
        self.wanted.tell(keys, found[: len(keys)])
        for key, there in zip(keys, found, strict=False):
            model = self.model.get(key)
            if model and model.asked and model.found is None:
                model.found = there
        self.drop_useless()

    @rule(keys=keys)
    def deny(self, keys: list[BlockKey]) -> None:
        self.wanted.deny(keys)
        for key in self.model.keys() & set(keys):
            self.model[key].asked, self.model[key].found = True, False
        self.open = [key for key in self.open if key not in keys]
        self.drop_useless()

    @rule(keys=keys)
    def forget(self, keys: list[BlockKey]) -> None:
        self.wanted.forget(keys)
        for key in self.model.keys() & set(keys):
            self.model[key].asked, self.model[key].found = False, None
        self.open = [key for key in self.open if key not in keys]
        self.drop_useless()

    @rule(req_id=st.sampled_from(REQUESTS))
    def release(self, req_id: str) -> None:
        used, unpinned = self.wanted.release(req_id)
        wanted = {key: each for key, each in self.model.items() if req_id in each.req_ids}
        assert set(used) == {key for key, each in wanted.items() if each.pinned}
        for each in wanted.values():
            each.req_ids.discard(req_id)
        assert set(unpinned) == {key for key in used if not self.model[key].req_ids}
        for key in unpinned:
            self.model[key].pinned = False
        self.drop_useless()

    @rule()
    def clear(self) -> None:
        self.wanted.clear()
        self.model.clear()
        self.open = []

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.wanted.open == self.open
        for key in KEYS:
            model, block = self.model.get(key, Model()), self.wanted.get(key)
            assert self.wanted.found(key) is model.found
            assert (0 if block is None else block.num_requests) == len(model.req_ids)

    @invariant()
    def keeps_nothing_that_is_of_no_use(self) -> None:
        assert self.wanted._blocks.keys() == self.model.keys()


TestWantedBlocks = WantedBlocksMachine.TestCase
TestWantedBlocks.settings = examples(200, steps=30)

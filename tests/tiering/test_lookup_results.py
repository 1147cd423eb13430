"""LookupResults: its rules one by one, and in any order against a slow, obvious model."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvxfer.storage.keys import BlockKey
from kvxfer.testing.conformance.suite import make_keys
from kvxfer.tiering.lookup_results import LookupResults
from tests.examples import examples

KEYS = make_keys(3)
REQUESTS = ["one", "two"]


def test_a_key_that_is_being_looked_up_is_not_asked_for_again() -> None:
    results, key = LookupResults(), KEYS[0]
    assert results.get(key, "one") is None
    assert results.take_unasked() == [key]
    results.release("one")
    assert results.get(key, "two") is None
    assert results.unasked == []
    results.tell([key], [True])
    assert results.get(key, "two") is True


def test_a_result_is_forgotten_with_the_last_request_that_wanted_it() -> None:
    results, key = LookupResults(), KEYS[0]
    for req_id in REQUESTS:
        results.get(key, req_id)
    results.take_unasked()
    results.tell([key], [False])
    results.release("one")
    assert results.get(key, "two") is False
    results.release("two")
    assert results.get(key, "three") is None


def test_a_result_from_before_its_key_was_forgotten_is_of_no_use() -> None:
    results, key = LookupResults(), KEYS[0]
    results.get(key, "one")
    results.take_unasked()
    results.forget([key])
    assert results.get(key, "one") is None
    results.tell([key], [False])
    assert results.get(key, "one") is None
    assert results.take_unasked() == [key]


@dataclass
class Wanted:
    """Key of the model that was wanted."""

    asked: bool = False
    found: bool | None = None
    req_ids: set[str] = field(default_factory=set)

    @property
    def is_of_use(self) -> bool:
        """Whether a request waits for it, or a lookup of it has not ended."""
        return bool(self.req_ids) or (self.asked and self.found is None)


class LookupResultsMachine(RuleBasedStateMachine):
    keys = st.lists(st.sampled_from(KEYS), min_size=1, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.results = LookupResults()
        self.wanted: dict[BlockKey, Wanted] = {}  # in the order in which they were wanted

    def drop_useless(self) -> None:
        self.wanted = {key: each for key, each in self.wanted.items() if each.is_of_use}

    @rule(key=st.sampled_from(KEYS), req_id=st.sampled_from(REQUESTS))
    def get(self, key: BlockKey, req_id: str) -> None:
        wanted = self.wanted.setdefault(key, Wanted())
        wanted.req_ids.add(req_id)
        assert self.results.get(key, req_id) is wanted.found

    @rule()
    def take_unasked(self) -> None:
        expected = [key for key, each in self.wanted.items() if not each.asked]
        assert self.results.take_unasked() == expected
        for key in expected:
            self.wanted[key].asked = True

    @rule(keys=keys, found=st.lists(st.booleans(), min_size=len(KEYS), max_size=len(KEYS)))
    def tell(self, keys: list[BlockKey], found: list[bool]) -> None:
        self.results.tell(keys, found[: len(keys)])
        for key, there in zip(keys, found, strict=False):
            wanted = self.wanted.get(key)
            if wanted and wanted.asked and wanted.found is None:
                wanted.found = there
        self.drop_useless()

    @rule(keys=keys)
    def deny(self, keys: list[BlockKey]) -> None:
        self.results.deny(keys)
        for key in self.wanted.keys() & set(keys):
            self.wanted[key].asked, self.wanted[key].found = True, False
        self.drop_useless()

    @rule(keys=keys)
    def forget(self, keys: list[BlockKey]) -> None:
        self.results.forget(keys)
        for key in keys:
            self.wanted.pop(key, None)

    @rule(req_id=st.sampled_from(REQUESTS))
    def release(self, req_id: str) -> None:
        self.results.release(req_id)
        for each in self.wanted.values():
            each.req_ids.discard(req_id)
        self.drop_useless()

    @rule()
    def clear(self) -> None:
        self.results.clear()
        self.wanted.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.results.unasked == [k for k, each in self.wanted.items() if not each.asked]
        for key in KEYS:
            wanted = self.wanted.get(key, Wanted())
            assert self.results.is_found(key) is bool(wanted.found)
            assert self.results.waiting_for(key) == wanted.req_ids

    @invariant()
    def keeps_nothing_that_is_of_no_use(self) -> None:
        assert self.results._results.keys() == self.wanted.keys()


TestLookupResults = LookupResultsMachine.TestCase
TestLookupResults.settings = examples(200, steps=30)

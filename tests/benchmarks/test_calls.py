"""`make bench NAME=calls`: what is counted is what a call does, and no more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from benchmarks import calls
from kvxfer import runtime


@contextmanager
def _known() -> Iterator[Callable[[], object]]:
    """Make a call of six functions that acquires two locks and makes two objects."""
    lock, changed = runtime.lock(), runtime.condition()

    def outer() -> None:
        with lock:
            inner()
        with changed:
            changed.notify_all()

    def inner() -> list[object]:
        return [object(), object()]

    yield outer


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    monkeypatch.setattr(calls, "CASES", {"known": _known})
    monkeypatch.setattr(calls, "LIMITS", _NoLimits())
    return {row.case: int(row.value) for row in calls.run(quick=True)}


class _NoLimits:
    def read_bytes(self) -> bytes:
        return b"{}"


def test_a_call_is_counted_as_what_it_does(counts: dict[str, int]) -> None:
    functions = ["outer", "inner", "__enter__", "__exit__", "notify_all", "notify"]
    assert counts["known, Python calls"] == len(functions)
    assert counts["known, lock operations"] == 2
    assert 2 <= counts["known, allocations"] <= 12


def test_every_case_has_limits() -> None:
    limits = msgspec.json.decode(calls.LIMITS.read_bytes(), type=dict[str, dict[str, int]])
    whats = ("Python calls", "allocations", "lock operations")
    expected = {f"{name}, {what}" for name in calls.CASES for what in whats}
    assert {release: set(found) for release, found in limits.items()} == {"3.11": expected}

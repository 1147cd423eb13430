"""Requests to a bucket that fail in the middle, with the store in memory of obstore."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore

from kvxfer.backends.object import Bucket, bucket

NAMES = [f"prefix/{number}" for number in range(7)]


class FailingList:
    """List of obstore whose second answer is an error; then it ends, as obstore's does."""

    def __init__(self, answers: Iterator[Any]) -> None:
        self._answers = answers
        self._num_asked = 0

    def __next__(self) -> Any:
        self._num_asked += 1
        if self._num_asked == 2:
            self._answers = iter(())
            raise GenericError("status code: 503")
        return next(self._answers)

    def __iter__(self) -> Iterator[Any]:
        return self


async def test_a_list_that_fails_in_the_middle_has_every_name_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bucket, "LIST_CHUNK", 2)
    store = MemoryStore()
    for name in NAMES:
        store.put(name, b"page")
    opened = Bucket(store, "bucket", timeout_s=20.0, retry_after_s=1.0, max_requests=1)

    def begin_list(*args: Any, **kwargs: Any) -> FailingList:
        return FailingList(obstore.list(*args, **kwargs))

    monkeypatch.setattr(opened, "_obstore", SimpleNamespace(list=begin_list))
    found = [each async for answer in opened.list_objects("prefix/") for each in answer]
    await opened.aclose(1.0)
    assert [each.name for each in found] == NAMES
    assert {each.size_bytes for each in found} == {4}

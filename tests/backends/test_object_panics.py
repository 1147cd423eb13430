"""Panics of obstore, which are no Exceptions: the failure of a block, and never an escape."""

import asyncio
from collections.abc import Callable
from typing import Any

import obstore
import pytest
from obstore.store import ObjectStore

from kvxfer.backends.object import (
    AZBackend,
    AZConfig,
    GSBackend,
    GSConfig,
    ObjectBackend,
    ObjectConfig,
    RequestFailedError,
    S3Backend,
    S3Config,
)
from kvxfer.errors import BackendUnavailableError
from kvxfer.storage.backend import Status
from kvxfer.testing.conformance.suite import make_keys, make_memory, statuses, store_generated
from tests.backends.object_memory import MemoryConfig, open_in_memory, plant

MEMORY = make_memory()
NAMESPACE = MEMORY.namespace()
KEYS = make_keys(4)
CALLS = ["put_async", "get_async", "get_range_async", "head_async", "delete_async", "list"]


class PanicException(BaseException):
    """As pyo3 makes it of a panic: no Exception, so that nobody catches it."""


def raising(exc: BaseException) -> Callable[..., Any]:
    def call(*_args: object, **_fields: object) -> Any:
        raise exc

    return call


async def test_a_panic_is_the_failure_of_its_block() -> None:
    async with open_in_memory(NAMESPACE) as backend:
        await store_generated(backend, KEYS[:2], MEMORY.describe(0, range(2)))
        store = backend._bucket._store
        for call in CALLS:
            plant(backend._bucket, call, raising(PanicException("no reactor, secret=1")))
        loaded = await backend.load(KEYS[:2], MEMORY.describe(0, range(2, 4)))
        stored = await backend.store(KEYS[2:], MEMORY.describe(0, range(2)))
        assert statuses(loaded) == statuses(stored) == [Status.FAILED] * 2
        assert {each.reason for each in [*loaded, *stored]} == {
            "GET: PanicException",
            "PUT: PanicException",
        }
        assert await backend.lookup(KEYS[2:]) == [False] * 2
        assert backend._listing is not None
        await backend._listing
        assert await backend.delete(KEYS[:2]) == [False] * 2
        backend._bucket._store = store
        loaded = await backend.load(KEYS[:2], MEMORY.describe(0, range(2, 4)))
        assert statuses(loaded) == [Status.DONE] * 2


async def test_one_block_that_panics_leaves_the_others_of_its_batch() -> None:
    async with open_in_memory(NAMESPACE) as backend:
        await store_generated(backend, KEYS, MEMORY.describe(0, range(4)))
        name = backend._pages.name(KEYS[1])

        async def get(store: ObjectStore, path: str, **fields: Any) -> Any:
            if path == name:
                raise PanicException
            return await obstore.get_range_async(store, path, **fields)

        plant(backend._bucket, "get_range_async", get)
        outcomes = await backend.load(KEYS, MEMORY.describe(0, range(4, 8)))
        assert statuses(outcomes) == [Status.DONE, Status.FAILED, Status.DONE, Status.DONE]


async def test_panics_say_nothing_about_the_server() -> None:
    async with open_in_memory(NAMESPACE) as backend:
        plant(backend._bucket, "head_async", raising(PanicException()))
        for _ in range(10):
            with pytest.raises(RequestFailedError, match="HEAD: PanicException"):
                await backend._bucket.head("name")
        assert backend._bucket.is_available


@pytest.mark.parametrize("end", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
async def test_what_ends_the_task_or_the_process_goes_on(end: type[BaseException]) -> None:
    async with open_in_memory(NAMESPACE) as backend:
        plant(backend._bucket, "head_async", raising(end()))
        with pytest.raises(end):
            await backend._bucket.head("name")


SECRET = "hide-and-seek"


@pytest.mark.parametrize(
    ("backend", "config", "variable", "reason"),
    [
        (S3Backend, S3Config, "AWS_ACCESS_KEY_ID", "MissingSecretAccessKey"),
        (GSBackend, GSConfig, "GOOGLE_SERVICE_ACCOUNT_KEY", "DecodeCredentials"),
        (AZBackend, AZConfig, "AZURE_STORAGE_ACCOUNT_KEY", "InvalidAccessKey"),
    ],
)
def test_credentials_that_cannot_be_are_named_and_not_shown(
    backend: type[ObjectBackend],
    config: type[ObjectConfig],
    variable: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(variable, SECRET)
    with pytest.raises(BackendUnavailableError, match=reason) as caught:
        backend(config(address="bucket"), NAMESPACE)
    assert SECRET not in str(caught.value)


def test_a_client_that_panics_is_a_backend_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryConfig, "open_store", raising(PanicException()))
    with pytest.raises(BackendUnavailableError, match="PanicException"):
        open_in_memory(NAMESPACE)

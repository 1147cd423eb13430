"""Bucket for callers that block, such as commands."""

import asyncio
import errno
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any, TypeVar

from kvxfer.backends.object.bucket import Bucket
from kvxfer.backends.object.config import ObjectConfig
from kvxfer.backends.object.object_version import ListedObject
from kvxfer.backends.object.request_failure import RequestFailedError
from kvxfer.errors import BackendUnavailableError
from kvxfer.runtime import LoopThread, end_tasks

T = TypeVar("T")


class BlockingBucket:
    """Bucket, and the event loop on which it is asked; thread-safe. To be closed.

    Args:
        config: The bucket. Credentials come from the environment.

    Raises:
        MissingExtraError: obstore is not installed.
        BackendUnavailableError: The cloud's client refuses what is in the environment.

    Attributes:
        bucket: Makes the requests, to be passed to `ask`.
    """

    def __init__(self, config: ObjectConfig) -> None:
        self.bucket = Bucket.open(config)
        self._place = config.url.rstrip("/")
        self._root = self._place.removesuffix(config.prefix.rstrip("/"))
        self._close_timeout_s = config.close_timeout_s
        self._thread = LoopThread("kvxfer-bucket")

    def ask(self, request: Coroutine[Any, Any, T], name: str = "") -> T:
        """Make a request about an object, or about the bucket where it has no name.

        Raises:
            BackendUnavailableError: The server is gone, or a request about the bucket failed.
            OSError: A request about an object failed.
        """
        try:
            return self._thread.run(request)
        except RequestFailedError as exc:
            if not name or (exc.transient and self._is_gone(name)):
                raise BackendUnavailableError(f"{self._place}: {exc}") from None
            number = errno.EACCES if exc.denied else errno.EIO
            raise OSError(number, str(exc), f"{self._root}{name}") from None

    def list_objects(self, prefix: str) -> Iterator[ListedObject]:
        """List the objects whose names begin with a prefix, in the order of names."""
        answers = self.bucket.list_objects(prefix)
        while listed := self.ask(_take(answers)):
            yield from listed

    def close(self) -> None:
        """End what is under way, and the event loop."""
        self._thread.run(self._end())
        self._thread.stop()

    def _is_gone(self, name: str) -> bool:
        """Whether the server does not even tell the size of an object."""
        try:
            self._thread.run(self.bucket.head(name))
        except RequestFailedError as exc:
            return exc.transient
        return False

    async def _end(self) -> None:
        await end_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        await self.bucket.aclose(self._close_timeout_s)


async def _take(answers: AsyncGenerator[list[ListedObject], None]) -> list[ListedObject]:
    return await anext(answers, [])

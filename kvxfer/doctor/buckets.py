"""Check of a bucket of object storage: whether it answers, and what may be done there."""

from dataclasses import dataclass

import msgspec

from kvxfer import runtime
from kvxfer.backends.object import Bucket, ObjectConfig, RequestFailedError
from kvxfer.doctor.finding import Check, Examined, Finding
from kvxfer.errors import BackendUnavailableError, InvalidArgumentError
from kvxfer.extras import MissingExtraError

PROBE = "kvxfer-doctor"
"""Object that is made and removed again below the prefix."""

_MISSES = "Every lookup there is a miss, and nothing is stored."
_CREDENTIALS = "docs/objects.md#credentials  # in the environment of the engine, never in the URL"


@dataclass(frozen=True, slots=True)
class _Access:
    """What may be done in a bucket: the reason why not, or nothing.

    Attributes:
        answer_s: Time of a list.
        store: Why nothing can be stored.
        remove: Why nothing can be removed.
        overwrites: Whether the server ignores `If-None-Match`.
    """

    answer_s: float
    store: RequestFailedError | None = None
    remove: RequestFailedError | None = None
    overwrites: bool = False


def check_bucket(config: ObjectConfig, *, timeout_s: float) -> Finding:
    """Check that a bucket can be read and written: an object is made twice, and removed.

    Args:
        config: The bucket.
        timeout_s: Time for each request.
    """
    at = Examined(Check.BUCKET, config.url)
    hurried = msgspec.structs.replace(config, timeout_s=timeout_s)
    try:
        access = runtime.run(_ask(hurried))
    except MissingExtraError as exc:
        return at.error(str(exc), why=_MISSES, mend="pip install 'kvxfer[object]'")
    except (BackendUnavailableError, InvalidArgumentError) as exc:
        return at.error(str(exc), why="An engine does not start.", mend=_CREDENTIALS)
    except RequestFailedError as exc:
        mend = _CREDENTIALS if exc.denied else f'kvxfer ls "{config.url}?..."  # when it answers'
        return at.error(str(exc), why=_MISSES, mend=mend)
    if access.store is not None:
        why = "Blocks that others stored are hits; nothing is stored."
        mend = "allow the engine's role to put objects below the prefix"
        if access.store.denied:
            return at.warning(f"may be read only: {access.store}", why=why, mend=mend)
        return at.error(f"stores nothing: {access.store}", why=why, mend="mend what it names")
    if access.remove is not None:
        return at.warning(
            f"objects cannot be removed: {access.remove}",
            why="Corrupt blocks stay, and are misses until a lifecycle rule removes them.",
            mend="allow the engine's role to delete objects below the prefix",
        )
    if access.overwrites:
        return at.warning(
            "the server ignores If-None-Match",
            why="Every store asks first, a request more for each block.",
            mend="a release of the server that honours If-None-Match: *",
        )
    return at.ok(f"answers within {access.answer_s * 1e3:.0f} ms; blocks can be read and stored")


async def _ask(config: ObjectConfig) -> _Access:
    bucket = Bucket.open(config)
    began_at = runtime.monotonic()
    try:
        await bucket.list_folder(config.prefix)
        answer_s = runtime.monotonic() - began_at
        name, text = f"{config.prefix}{PROBE}", memoryview(b"made by kvxfer doctor")
        try:
            # One that is left over is not made anew, either.
            overwrites = await bucket.create(name, text) and await bucket.create(name, text)
        except RequestFailedError as exc:
            return _Access(answer_s, store=exc)
        try:
            await bucket.delete(name)
        except RequestFailedError as exc:
            return _Access(answer_s, remove=exc, overwrites=overwrites)
        return _Access(answer_s, overwrites=overwrites)
    finally:
        await bucket.aclose(config.timeout_s)

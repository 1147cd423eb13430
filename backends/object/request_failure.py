"""Failures of requests to object storage, described without text that may have credentials."""

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.errors import BackendUnavailableError, KVXferError
from kvxfer.storage.backend import Outcome, Status

if TYPE_CHECKING:
    from obstore.store import ObjectStore

ENDS = asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit
"""Exceptions that end a task or the process, and are not failures of a request."""

CONFLICT = "<Code>ConditionalRequestConflict</Code>"
"""Answer of S3 to a store that has conflicted with another request: nothing was stored.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
"""

RETRYABLE = CONFLICT, "<Code>RequestTimeout</Code>"
"""Answers of S3 after which a request may be retried, although their status says otherwise."""

DENIED = frozenset({"PermissionDeniedError", "UnauthenticatedError"})


class RequestFailedError(KVXferError):
    """Error of a request that failed.

    Its text has only what kvxfer knows: a text of a client or a server may contain credentials.

    Attributes:
        outcome: Outcome of the block that was requested.
        denied: Whether the credentials do not allow the request.
        transient: Whether a later attempt may succeed.
        answered: Whether the server answered.
        is_empty: Whether the server answered that the object has none of the requested bytes.
    """

    def __init__(
        self,
        reason: str,
        *,
        status: Status = Status.FAILED,
        denied: bool = False,
        transient: bool,
        answered: bool = False,
        is_empty: bool = False,
    ) -> None:
        self.outcome = Outcome(status, reason=reason)
        self.denied = denied
        self.transient = transient
        self.answered = answered
        self.is_empty = is_empty
        super().__init__(reason)


def open_client(open_store: Callable[[], "ObjectStore"]) -> "ObjectStore":
    """Open the client of a cloud; a `BackendUnavailableError` says what the client refuses."""
    try:
        return open_store()
    except (KVXferError, *ENDS):
        raise
    except BaseException as exc:  # noqa: BLE001 - also a panic
        words = [type(exc).__name__, *re.findall(r"source: ([A-Z]\w{1,40})[ ,]", str(exc))]
        reason = f"the client refuses the configuration or the environment: {' '.join(words)}"
        raise BackendUnavailableError(reason) from None


def describe(exc: BaseException) -> str:
    """Describe an error of the client without text that may contain credentials.

    The error's text repeats the answer of the server, which may repeat the request: only the name
    of the error, the server's code for it, and the status are taken from it.
    """
    text = str(exc)
    codes = r"<Code>(\w{1,40})</Code>", r"code: (\w{1,40})\)", r"status code: (\d{3})"
    found = [match[1] for each in codes if (match := re.search(each, text))]
    kinds = re.findall(r"kind: (Connect|Timeout|Request|Interrupted|Decode)\b", text)
    return " ".join([type(exc).__name__, *(found or kinds[:1])])


def request_failure(what: str, exc: BaseException) -> RequestFailedError:
    """Translate an error of the client."""
    text = str(exc)
    status = next(iter(re.findall(r"status code: (\d{3})", text)), "")
    # A denied list is a `GenericError`, and a denied removal has only the code.
    denied = status in ("401", "403") or "code: AccessDenied)" in text
    denied |= type(exc).__name__ in DENIED
    passes = status[:1] in ("", "5") or status in ("408", "429")
    transient = not denied and passes and type(exc).__name__ == "GenericError"
    transient |= any(answer in text for answer in RETRYABLE)
    return RequestFailedError(
        f"{what}: {describe(exc)}",
        status=Status.TIMED_OUT if "kind: Timeout" in text else Status.FAILED,
        denied=denied,
        transient=transient,
        answered=bool(status),
        is_empty=status == "416",
    )

"""Configuration of the proxy."""

from collections.abc import Sequence

import msgspec
from yarl import URL

from kvxfer.checks import find_repeated, require_integer, require_number, require_texts
from kvxfer.endpoint import Endpoint, split_url
from kvxfer.errors import DuplicateError, InvalidArgumentError


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engines that share the requests, and limits.

    Attributes:
        prefill: Addresses of the engines that compute prompts, such as `http://node-1:8000`.
        decode: Addresses of the engines that continue them.
        listen: Host and port to listen at; port 0 chooses a free one.
        overlap: Whether both legs begin at once, if the prefill engine's lender is known.
        timeout_s: Seconds for a whole request.
        prefill_timeout_s: Seconds for its prefill leg.
        connect_timeout_s: Seconds to connect to an engine, and for a probe of its health.
        drain_timeout_s: Seconds for requests in progress when the proxy ends.
        max_body_bytes: Largest body of a request.

    Raises:
        InvalidArgumentError: A list is empty, has an engine twice, or has an element that is not
            the address of a server; `listen` is not an endpoint; or a number is out of bounds.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    listen: str = "127.0.0.1:8000"
    overlap: bool = False
    timeout_s: float = 600.0
    prefill_timeout_s: float = 60.0
    connect_timeout_s: float = 5.0
    drain_timeout_s: float = 20.0
    max_body_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Check the fields, and normalize the addresses."""
        for name in ("prefill", "decode"):
            msgspec.structs.force_setattr(self, name, _origins(name, getattr(self, name)))
        for name in ("timeout_s", "prefill_timeout_s", "connect_timeout_s", "drain_timeout_s"):
            msgspec.structs.force_setattr(self, name, require_number(name, getattr(self, name)))
        require_integer("max_body_bytes", self.max_body_bytes, minimum=1)
        Endpoint.parse("listen", self.listen)

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint to listen at."""
        return Endpoint.parse("listen", self.listen)


def _origins(argument: str, urls: Sequence[str]) -> tuple[str, ...]:
    require_texts(argument, urls)
    if not urls:
        raise InvalidArgumentError(argument, urls, "at least one address of an engine")
    origins = tuple(_origin(f"{argument}[{index}]", url) for index, url in enumerate(urls))
    if (repeated := find_repeated(origins)) is not None:
        raise DuplicateError(argument, repeated, "each engine once")
    return origins


def _origin(argument: str, text: str) -> str:
    """Parse the address of a server; refuse a name and password, a path or a query."""
    expected = "the address of an engine's server alone, such as 'http://node-1:8000'"
    try:
        split_url(text)  # refuses line breaks, which yarl would drop
        url = URL(text)
        origin = str(url.origin())
    except ValueError as exc:
        raise InvalidArgumentError(argument, text, expected) from exc
    if url.user or url.password:
        shown = str(url.with_user(None))
        raise InvalidArgumentError(argument, shown, f"{expected}, without name and password")
    is_http = url.scheme in {"http", "https"}
    if not is_http or url.path != "/" or url.query_string or url.fragment:
        raise InvalidArgumentError(argument, text, expected)
    return origin

"""Costs of object storage: requests and bytes, and what they cost at stated prices."""

from collections.abc import Mapping

import msgspec

from kvxfer.errors import InvalidArgumentError

GIB = 1 << 30
PRICES = ("put", "get", "gib-egress", "gib-month")
MAX_PRICE = 1e9


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of object storage, in any currency; what is not stated costs nothing.

    Attributes:
        put: 1,000 requests that write or list.
        get: 1,000 requests that read, HEAD included.
        gib_egress: 1 GiB that is read.
        gib_month: 1 GiB that is kept for a month.
    """

    put: float = 0.0
    get: float = 0.0
    gib_egress: float = 0.0
    gib_month: float = 0.0


class ObjectCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the requests of a trace, in the currency of the prices.

    Attributes:
        puts: Requests that write or list.
        gets: Requests that read.
        egress: Bytes that are read.
        per_1000_prompts: All of these for 1,000 requests of the trace, which are prompts.
        per_day: All of these a day, as it would be if the trace went on; None for a moment.
        kept_per_month: Bytes that are kept at the end, for a month.
    """

    puts: float
    gets: float
    egress: float
    per_1000_prompts: float
    per_day: float | None
    kept_per_month: float


class ObjectUse(msgspec.Struct, frozen=True, kw_only=True):
    """Use of object storage by a whole trace.

    Attributes:
        requests: Requests by their kind, without repetitions.
        requests_per_s: Requests a second, on average; None for a moment.
        bytes_sent: Bytes of objects sent, headers included.
        bytes_received: Bytes of objects received.
        bytes_kept: Bytes of objects that are there at the end.
        costs: What that costs; None without prices.
    """

    requests: dict[str, int]
    requests_per_s: float | None
    bytes_sent: int
    bytes_received: int
    bytes_kept: int
    costs: ObjectCosts | None


def parse_prices(text: str) -> Prices:
    """Parse prices such as `put=0.005,get=0.0004,gib-egress=0.09,gib-month=0.023`.

    Raises:
        InvalidArgumentError: It is no such text.
    """
    wanted = f"some of {', '.join(f'{name}=PRICE' for name in PRICES)}, each 0 to {MAX_PRICE:,.0f}"
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            price = float(number)
        except ValueError:
            price = -1.0
        if name not in PRICES or name in prices or not 0 <= price <= MAX_PRICE:
            raise InvalidArgumentError("prices", text, wanted)
        prices[name] = price
    return Prices(**{name.replace("-", "_"): price for name, price in prices.items()})


def price(
    prices: Prices,
    requests: Mapping[str, int],
    *,
    bytes_received: int,
    bytes_kept: int,
    num_prompts: int,
    days: float,
) -> ObjectCosts:
    """Compute what requests and bytes cost."""
    puts = prices.put * (requests["PUT"] + requests["LIST"]) / 1000
    gets = prices.get * (requests["GET"] + requests["HEAD"]) / 1000
    egress = prices.gib_egress * bytes_received / GIB
    total = puts + gets + egress
    return ObjectCosts(
        puts=puts,
        gets=gets,
        egress=egress,
        per_1000_prompts=1000 * total / num_prompts,
        per_day=total / days if days else None,
        kept_per_month=prices.gib_month * bytes_kept / GIB,
    )

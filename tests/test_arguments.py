"""Arguments: every public callable works, or names the wrong argument and its value."""

import asyncio
import copy
import functools
import importlib.metadata
import inspect
import math
import socket
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import kvxfer
from examples.proxy.config import ProxyConfig
from kvxfer.backends.host import HostConfig
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import S3Config
from kvxfer.checks import require_timeout
from kvxfer.configuration import Configuration
from kvxfer.connect import ENTRY_POINT_GROUP, parse_backend
from kvxfer.errors import InvalidArgumentError, KVXferError
from kvxfer.lending import PromptExchange
from kvxfer.transfer import PolledEngine
from kvxfer.units import ByteSize
from tests.public_calls import VALID_CALLS, public_callables

PLAIN_VALUES: tuple[Any, ...] = (
    *(None, True, np.True_, -1, 1.5, float("nan"), float("inf"), 2**70),
    *(np.int8(3), np.float32(0.5), torch.float16),
    *("5", "", "\ud800", b"", b"12345"),
    *([], (), {}, [None], ["\ud800"], [[]], [2**70], [-1]),
    *({"\ud800": None}, {None: []}, {1.5}),
)

WRONG_VALUES: dict[str, Callable[[], Any]] = {
    **{repr(value): functools.partial(copy.copy, value) for value in PLAIN_VALUES},
    "an object": object,
    "a type": lambda: int,
    "a generator": lambda: (number for number in range(3)),
    "a matrix": lambda: np.zeros((2, 2)),
    "a tensor": lambda: torch.zeros(2, 2),
    "no dimension": lambda: np.array(3),
}

OF_THE_RIGHT_KIND = {
    "np.int8(3)",
    "no dimension",
    "''",
    "[]",
    "()",
    "{}",
    "[-1]",
    "[[]]",
    "a tensor",
}
"""Values that are valid alone but conflict with another argument, which an error may name
instead."""


def pairs() -> list[Any]:
    return [
        (name, argument)
        for name, function in public_callables().items()
        for argument in inspect.signature(function).parameters
        if argument not in {"self", "cls"}
    ]


def run(name: str, arguments: dict[str, Any]) -> None:
    """Make a call on a fresh object, await its result, and close the object."""
    make = VALID_CALLS[name].of
    owner = make() if make else None
    function = getattr(owner, name.rpartition(".")[2]) if make else public_callables()[name]
    if inspect.iscoroutinefunction(arguments.get("call")):
        arguments = {"call": arguments["call"]()}  # each can be awaited once
    result = function(**arguments)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    for opened in (owner, result):
        if isinstance(opened, PolledEngine):
            opened.close()
    if isinstance(result, PromptExchange):
        asyncio.run(result.aclose())


def test_every_public_callable_has_a_valid_call() -> None:
    assert VALID_CALLS.keys() == public_callables().keys()


@pytest.mark.parametrize("name", VALID_CALLS)
def test_valid_calls_are_valid(name: str) -> None:
    run(name, VALID_CALLS[name].arguments)


@pytest.mark.parametrize(("name", "argument"), pairs())
def test_a_wrong_argument_is_used_or_named_with_its_value(name: str, argument: str) -> None:
    faults = [fault for what in WRONG_VALUES if (fault := fault_of(name, argument, what))]
    assert not faults, "\n".join(faults)


def fault_of(name: str, argument: str, what: str) -> str:
    """Describe what is wrong with a call's treatment of a wrong value; empty if nothing is."""
    wrong = WRONG_VALUES[what]()
    arguments = VALID_CALLS[name].arguments | {argument: wrong}
    try:
        run(name, arguments)
    except KVXferError as exc:
        is_other = not isinstance(exc, InvalidArgumentError)
        if what in OF_THE_RIGHT_KIND and (is_other or any(name in str(exc) for name in arguments)):
            return ""
        shown = any(repr(part) in str(exc) for part in parts_of(wrong))
        return "" if argument in str(exc) and shown else f"{what} is not named: {exc}"
    except Exception as exc:  # noqa: BLE001 - any other is what must not be
        return f"{what} raises {type(exc).__name__}: {exc}"
    return ""


def parts_of(value: Any) -> Iterator[Any]:
    """List a value, its elements and its plain number: an error may show any of them."""
    yield value
    if isinstance(value, (np.generic, np.ndarray)) and value.size == 1:
        yield value.item()
    if isinstance(value, dict):
        yield from parts_of([*value, *value.values()])
    elif isinstance(value, (list, tuple, set, bytes)) or (type(value) is np.ndarray and value.ndim):
        for part in value:
            yield from parts_of(part)


NAMESPACE = kvxfer.Namespace(model="m", parallel={"tp_size": 2})


@pytest.mark.parametrize(
    ("name", "argument", "wrong"),
    [
        ("Namespace", "model", "\ud800"),
        ("Namespace", "model", None),
        ("Namespace", "parallel", {"tp_size": 2.0}),
        ("KVCacheGroup", "layer_names", "abc"),
        ("verify_mappings", "mappings", []),
        ("TieredBackend.lookup", "keys", (key for key in VALID_CALLS["TieredBackend.lookup"])),
        ("TieredBackend.lookup", "keys", {*VALID_CALLS["TieredBackend.lookup"].arguments["keys"]}),
        ("TieredBackend.lookup", "keys", [b"ab"]),
        ("BlockTable", "tokens_per_kernel_block", 0),
        ("TokenBatch.of", "positions", [[0.5]]),
        ("MambaSpec", "dtypes", np.dtype("float32")),
        ("KVCacheGroup", "layer_names", np.dtype("float32")),
        ("make_block_key", "content_hash", "a"),
        ("make_block_key", "content_hash", b""),
        ("make_block_key", "group", 2**32),
        *(("LoadOrCompute", "max_load_ratio", each) for each in (0, 10**400)),
        ("TransferEngine.load", "timeout_s", -1),
        ("KVCacheConfig", "null_block_id", 6),
        ("Retention", "ttl_s", "soon"),
        ("group_of", "key", "text of some length"),
        ("allocate_canonical", "device", "meta"),
        ("allocate_canonical", "device", torch.device("meta", 0)),
        ("CanonicalKVCacheRef", "layer_names", "abc"),
        ("CanonicalKVCacheRef", "layout", 5),
        ("CanonicalKVCacheRef", "boxes", ["abc"]),
        ("describe", "block_ids", bytearray(b"12")),
        ("describe", "group", torch.tensor(data=False)),
        ("Outcome", "status", "done"),
        ("PromptKeys", "tokens", [1.5]),
        ("PromptKeys", "tokens", [2**63]),
        ("PromptKeys.block_keys", "num_tokens", 4),
        ("PromptKeys.block_keys", "first_token", 4),
    ],
)
def test_what_would_only_fail_later_or_mean_another_thing_is_refused(
    name: str, argument: str, wrong: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match=argument):
        run(name, VALID_CALLS[name].arguments | {argument: wrong})


def test_numbers_and_texts_of_numpy_name_the_same_blocks() -> None:
    same = kvxfer.Namespace(
        model=np.str_("m"),
        parallel={np.str_("tp_size"): np.int64(2)},  # type: ignore[dict-item]
        blocks_per_chunk=np.int8(1),  # type: ignore[arg-type]
    )
    assert same.fingerprint == NAMESPACE.fingerprint
    group = kvxfer.GroupIdentity(page_sizes_bytes=[np.int8(100)])  # type: ignore[arg-type]
    named = msgspec.structs.replace(NAMESPACE, groups=(group,), blocks_per_chunk=8)
    assert named.chunk_size_bytes(0) == 800


def test_a_timeout_is_any_real_number_and_as_long_as_can_be_waited() -> None:
    assert require_timeout("timeout_s", None) is None
    real: tuple[Any, ...] = (0, np.float32(2), np.int8(3), Fraction(1, 2))
    for timeout_s in real:
        checked = require_timeout("timeout_s", timeout_s)
        assert type(checked) is float
        assert checked == timeout_s
    for timeout_s in (float("inf"), 10**400):
        assert require_timeout("timeout_s", timeout_s) == threading.TIMEOUT_MAX


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    with pytest.raises(InvalidArgumentError, match="num_kv_heads is <int>"):
        kvxfer.WorkerShard(num_kv_heads=10**5000)


VALID_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"address": "bucket"} for name in ("az", "gs", "s3")},
    "file": {"path": "/var/cache/kv", "capacity": 1 << 20},
    "host": {"capacity": 1 << 20},
    "mooncake": {"address": "127.0.0.1:50051"},
    "nixl": {"address": "127.0.0.1:7000"},
    "pool": {"path": "/run/pool.sock"},
}


def parse_mapping(name: str, **parameters: Any) -> None:
    parse_backend({"type": name, **parameters})


@pytest.mark.parametrize("name", VALID_CONFIGS)
def test_a_configuration_made_in_python_takes_no_other_value_than_the_declared_ones(
    name: str,
) -> None:
    [entry_point] = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name)
    config_type = entry_point.load().config_type
    assert issubclass(config_type, Configuration)
    valid = VALID_CONFIGS[name]
    config_type(**valid)
    for field in msgspec.structs.fields(config_type):
        kinds = {field.type, *getattr(field.type, "__args__", ())}
        wrong: list[Any] = [object(), float("nan"), b"5", ["a"], {}, -1.5]
        wrong += ["no", 1] if bool in kinds else [True]
        wrong += [] if type(None) in kinds else [None]
        wrong += [] if field.type is str else ["mru"]
        wrong += [] if float in kinds else [1.5e300]
        wrong += ["a\nb", "a\tb", "\0a"] if str in kinds else []
        for value in wrong:
            with pytest.raises(InvalidArgumentError) as caught:
                config_type(**valid | {field.name: value})
            assert caught.value.argument == field.name
            assert repr(value) in str(caught.value)
        no_numbers: list[Any] = [math.inf, -math.inf, 10**400, -(10**400), Fraction(10**400)]
        for number in no_numbers + ([] if float in kinds else [2**63, -(2**63) - 1]):
            for make in (config_type, functools.partial(parse_mapping, name)):
                with pytest.raises(InvalidArgumentError, match=field.name):
                    make(**valid | {field.name: number})
        if field.name.endswith("timeout_s"):
            made = config_type(**valid | {field.name: 1e300})
            with socket.socket() as connection:
                connection.settimeout(getattr(made, field.name))


def test_a_backend_has_a_valid_configuration_here() -> None:
    found = {each.name for each in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    assert found == VALID_CONFIGS.keys()


def test_numbers_and_texts_of_numpy_make_the_same_configuration() -> None:
    ours = {"capacity": np.int64(1 << 20), "priority_share": np.float32(0.5), "shared": np.False_}
    made = HostConfig(**ours, eviction=np.str_("lru"))  # type: ignore[arg-type]
    assert made == HostConfig(capacity=ByteSize(1 << 20))
    assert [type(getattr(made, name)) for name in ours] == [ByteSize, float, bool]


@pytest.mark.parametrize("control", ["\n", "\t", "\0"])
def test_no_address_of_a_server_loses_a_control_character(control: str) -> None:
    with pytest.raises(InvalidArgumentError, match="discover"):
        NixlConfig(discover=f"etcd://127.0.0.1:2379/kv{control}xfer")
    with pytest.raises(InvalidArgumentError, match="endpoint"):
        S3Config(address="bucket", endpoint=f"http://127.0.0.1{control}:8333")
    with pytest.raises(InvalidArgumentError, match="prefill"):
        ProxyConfig(prefill=(f"http://127.0.0.1{control}:80",), decode=("http://127.0.0.1:81",))

"""Tickets, settings and prompts: any input from outside gets an answer."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm.distributed.kv_transfer", reason="needs vLLM")

from vllm.lora.request import LoRARequest

from kvxfer.backends.nixl import Endpoint
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.prefill_decode.groups import Groups
from kvxfer.integrations.vllm.prefill_decode.prompts import Prompts
from kvxfer.integrations.vllm.prefill_decode.settings import Settings
from kvxfer.integrations.vllm.prefill_decode.ticket import (
    lease_of_router,
    make_params,
    read_ticket,
    wants_decode,
    wants_prefill,
)
from kvxfer.lending.handover import reachable_host
from tests.integrations.pd_engine import ticket_params

FIELDS = ("remote_request_id", "remote_host", "remote_port", "tp_size", "transfer_mode")
DEEP: list[Any] = []
for _ in range(5 * sys.getrecursionlimit()):
    DEEP = [DEEP]
ABSURD: list[Any] = [
    *(None, True, -1, 0, 1 << 64, 10**5000, 1.5, float("nan")),
    *("", "\ud800", "a\nb", "x" * 100_000, b"bytes"),
    *([], {}, DEEP, object()),
]
NEARLY = [
    *product(["remote_request_id"], ["a" * 129, "a" * 32 + "\n", "é" * 32]),
    *product(["remote_host"], ["[::1]", "127.0.0.1\n", "a" * 256]),
    *[("remote_port", "7100"), ("remote_port", 65536), ("tp_size", 1025)],
]


@given(
    st.from_regex(r"[0-9A-Za-z_.:-]{16,128}", fullmatch=True),
    st.sampled_from(["127.0.0.1", "::1", "node-1", "node-1.cluster.local"]),
    st.integers(1, 65535),
    st.integers(1, 1024),
)
def test_a_ticket_comes_back_as_it_was_made(lease: str, host: str, port: int, size: int) -> None:
    endpoint = Endpoint(host, port)
    params = make_params(lease, endpoint, engine_id="p", tp_size=size, num_tokens=10)
    assert (wants_decode(params), wants_prefill(params)) == (True, False)
    ticket = read_ticket(params)
    assert (ticket.lease, ticket.endpoint, ticket.overlaps) == (lease, endpoint, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [*product(FIELDS[:4], ABSURD), *NEARLY],
    ids=lambda each: type(each).__name__,
)
def test_a_value_of_no_use_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        read_ticket(ticket_params(**{field: value}))
    assert str(refused.value).startswith(f"kv_transfer_params.{field} is ")
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)))
def test_any_parameters_make_a_ticket_or_an_error(params: Any) -> None:
    assert {wants_decode(params), wants_prefill(params)} <= {True, False}
    if isinstance(params, dict):
        assert lease_of_router(params) is None or isinstance(lease_of_router(params), str)
        try:
            assert read_ticket(params).endpoint.port
        except InvalidArgumentError as error:
            assert str(error).isprintable()  # noqa: PT017 - either is right


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: type(value).__name__)
def test_absurd_parameters_want_nothing(value: Any) -> None:
    assert {wants_decode(value), wants_prefill(value)} == {False}
    assert not wants_decode({"do_remote_prefill": value if value is not True else 1})
    assert lease_of_router({"remote_request_id": value}) is None


def test_a_transfer_mode_says_whether_p_may_be_computing() -> None:
    modes: list[Any] = ["overlap", "pull", None, [], 10**5000]
    for mode in modes:
        assert read_ticket(ticket_params(transfer_mode=mode)).overlaps is (mode == "overlap")


# Settings.


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"listen": "7100"}, "listen"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"ask_timeout_s": -1}, "ask_timeout_s"),
        ({"allow": "10.0.0.0/8"}, "allow"),
        ({"allow": ["10.0.0.1/8"]}, "allow"),
        ({"listen": "0.0.0.0:7100"}, "advertise"),
        ({"listen": "[::]:7100", "advertise": "[::]"}, "advertise"),
        ({"listen": "0:7100"}, "advertise"),
        *(
            ({"listen": "127.0.0.1:7100", "advertise": host}, "advertise")
            for host in ("0", "0x0", "::0", "[0::0]", "::ffff:0.0.0.0", "[fd00::7", "fd00::7]", "[")
        ),
        ({"listen": "127.0.0.1:7100", "advertise": "10.0.0.7:7100"}, "advertise is '10"),
        ({"listen": "127.0.0.1:7100", "advertise": "node 7"}, "advertise"),
        ({"address": "10.0.0.7:7100"}, "address"),
        ({"discover": "etcd://127.0.0.1:2379/kvxfer"}, "discover"),
        ({"purge_on_reset": True}, "purge_on_reset"),
        ({"backend": "host://", "purge_on_reset": "maybe"}, "purge_on_reset"),
    ],
)
def test_a_setting_of_no_use_is_named(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        Settings.parse(extra)


def test_an_address_in_brackets_is_advertised_as_tickets_name_it() -> None:
    exchange = Settings.parse({"listen": "127.0.0.1:7100"}).exchange
    for host in ("[fd00::7]", "fd00::7"):
        assert reachable_host(exchange, host) == "fd00::7"
    assert reachable_host(exchange, "") == "127.0.0.1"


def test_replicas_listen_after_the_workers_of_those_before_them() -> None:
    settings = Settings.parse({"listen": "127.0.0.1:7100", "data_port": 7200, "timeout_s": 3})
    assert settings.of_replica(0, 2) == settings
    third = settings.of_replica(2, 2)
    assert [third.exchange.at_rank(rank).listen[-5:] for rank in (0, 1)] == [":7104", ":7105"]
    assert (third.exchange.at_rank(1).data_port, third.exchange.timeout_s) == (7205, 3)
    assert Settings.parse({"listen": "127.0.0.1:0"}).of_replica(3, 1).exchange.listen[-2:] == ":0"
    with pytest.raises(InvalidArgumentError, match="listen"):
        Settings.parse({"listen": "127.0.0.1:65530"}).of_replica(3, 2)


@pytest.mark.parametrize(
    ("has_secret", "allow", "host", "is_allowed"),
    [
        (False, [], "127.0.0.1", True),
        (False, [], "10.0.0.1", False),
        (False, ["127.0.0.0/8"], "127.0.0.2", True),
        (False, ["10.0.0.0/8"], "127.0.0.1", False),
        (False, ["localhost"], "127.0.0.1", False),
        (True, [], "node-1", True),
        (True, ["10.0.0.0/8"], "10.1.2.3", True),
        (True, ["10.0.0.0/8"], "11.1.2.3", False),
        (True, ["node-1", "10.0.0.0/8"], "node-1", True),
        (True, ["fd00::/8"], "fd00::1", True),
    ],
)
def test_tickets_lead_to_what_is_allowed_and_without_a_secret_to_loopback_only(
    allow: list[str], host: str, tmp_path: Path, *, has_secret: bool, is_allowed: bool
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"s" * 32)
    secret = {"secret_file": str(file)} if has_secret else {}
    settings = Settings.parse({"allow": allow} | secret)
    if is_allowed:
        settings.require_allowed(Endpoint(host, 7100))
        return
    with pytest.raises(InvalidArgumentError, match=r"kv_transfer_params\.remote_host"):
        settings.require_allowed(Endpoint(host, 7100))


# Prompts.


def make_request(**fields: Any) -> Any:
    """Make what `Prompts` uses of a `vllm.v1.request.Request`."""
    return SimpleNamespace(**{"request_id": "r", "prompt_token_ids": list(range(10))} | fields)


def keys_of(**fields: Any) -> list[Any]:
    keys = Prompts().keys(make_request(**fields))
    assert keys is not None
    return list(keys.block_keys(0, 4, 10))


def image(identifier: str, offset: int = 2, length: int = 3) -> Any:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length)
    )


def write_adapter(folder: Path, weights: bytes = b"weights") -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text('{"lora_alpha": 8}')
    return str(folder)


def request_for(path: str, **fields: Any) -> Any:
    return make_request(lora_request=LoRARequest("a", 1, path, **fields))


def test_what_changes_the_bytes_of_pages_changes_their_keys(tmp_path: Path) -> None:
    one, other = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "other", b"other")
    scopes: list[dict[str, Any]] = [
        {},
        *({"cache_salt": each} for each in ("one", "other", "\ud800")),
        *({"mm_features": [image(*each)]} for each in (["one"], ["\ud800"], ["one", 3])),
        {"mm_features": [image("one"), image("other", offset=6)]},
        {"mm_features": [image("other"), image("one", offset=6)]},
        {"prompt_token_ids": [*range(9), 10]},
        *({"lora_request": LoRARequest(name, 1, one)} for name in ("a", "b")),
        {"lora_request": LoRARequest("a", 1, other)},
        {"lora_request": LoRARequest("a", 1, one, is_3d_lora_weight=True)},
        {"lora_request": LoRARequest("a", 1, one), "cache_salt": "one"},
    ]
    keys = [keys_of(**scope) for scope in scopes]
    assert [keys_of(**scope) for scope in scopes] == keys
    last = {each[-1] for each in keys}
    assert len(last) == len(scopes)
    assert len({each[0] for each in keys}) == len(scopes) - 1  # another last token


def test_adapters_are_known_by_the_bytes_of_their_files(tmp_path: Path) -> None:
    one, copy = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "copy")
    keys = keys_of(lora_request=LoRARequest("a", 1, one))
    assert keys_of(lora_request=LoRARequest("a", 7, copy)) == keys
    (tmp_path / "copy" / "README.md").write_text("of no weight")
    (tmp_path / "copy" / "checkpoint-10").mkdir()
    assert keys_of(lora_request=LoRARequest("a", 1, copy)) == keys
    for name, text in (("adapter_config.json", '{"lora_alpha": 16}'), ("\udcff", "")):
        (tmp_path / "copy" / name).write_text(text)  # the second one is not UTF-8
        before, keys = keys, keys_of(lora_request=LoRARequest("a", 1, copy))
        assert keys != before


def train_anew(prompts: Prompts, path: str, **how: Any) -> LoRARequest:
    assert prompts.keys(request_for(path)) is not None
    write_adapter(Path(path), b"other")
    return LoRARequest("a", 1, path, **how)


def train_anew_before_one_is_handed_over(prompts: Prompts, path: str) -> LoRARequest:
    """VLLM's own cache has pages of the previous weights, under the same name and folder."""
    prompts.note(request_for(path))
    write_adapter(Path(path), b"other")
    return LoRARequest("a", 2, path)


def give_its_number_to_another(prompts: Prompts, path: str) -> LoRARequest:
    assert prompts.keys(request_for(path)) is not None
    return LoRARequest("b", 1, write_adapter(Path(path).with_name("other"), b"other"))


def load_another_in_its_place(prompts: Prompts, path: str) -> LoRARequest:
    other = give_its_number_to_another(prompts, path).lora_path
    assert prompts.keys(request_for(other, load_inplace=True)) is not None
    return LoRARequest("a", 1, path)


def ask_for_both_loads_at_once(prompts: Prompts, path: str) -> LoRARequest:
    """VLLM reads the files again only if the last of a step's requests says so."""
    other = give_its_number_to_another(prompts, path).lora_path
    assert prompts.keys(request_for(other, load_inplace=True)) is not None
    assert prompts.keys(request_for(other)) is None
    return LoRARequest("a", 1, other, load_inplace=True)


def have_no_files(_: Prompts, path: str) -> LoRARequest:
    (Path(path) / "adapter_model.safetensors").unlink()
    (Path(path) / "adapter_config.json").unlink()
    return LoRARequest("a", 1, path)


class InMemory(LoRARequest):  # type: ignore[misc] # vLLM is not typed
    """Adapter of an engine for reinforcement learning, which takes its weights from memory."""

    lora_tensors: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("do", "why"),
    [
        (train_anew, "the files in .* have changed"),
        (partial(train_anew, load_inplace=True), "the files in .* have changed"),
        (train_anew_before_one_is_handed_over, "the files in .* have changed"),
        (give_its_number_to_another, "number 1 is used for .*/one and for .*/other"),
        (load_another_in_its_place, "other replaced it"),
        (ask_for_both_loads_at_once, "only some requests for .*/other say that it replaces"),
        *(
            (lambda *_, path=path: LoRARequest("a", 1, path), "a folder whose files can be read")
            for path in ("organisation/adapter", "~nobody_at_all/adapter", "a\0b")
        ),
        (have_no_files, "it has none"),
        (
            lambda _, path: InMemory("a", 1, path, lora_tensors={"weight": 1}),
            r"lora_request\.lora_tensors is 'a'",
        ),
    ],
)
def test_an_adapter_has_no_keys_where_it_is_not_known_what_is_loaded(
    do: Callable[[Prompts, str], LoRARequest], why: str, tmp_path: Path
) -> None:
    prompts = Prompts()
    request = make_request(lora_request=do(prompts, write_adapter(tmp_path / "one")))
    assert prompts.keys(request) is None
    assert re.search(why, prompts.why_not(request))
    request.lora_request = None
    assert prompts.keys(request) is not None
    assert not prompts.why_not(request)


def test_settings_of_lora_that_change_what_an_adapter_computes_count() -> None:
    @dataclass
    class LoRAConfig:
        max_loras: int = 1
        lora_dtype: str = "auto"

    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(), cache_config=SimpleNamespace(enable_prefix_caching=True)
    )
    found = []
    for config.lora_config in (LoRAConfig(), LoRAConfig(4), LoRAConfig(1, "float16")):
        found.append(Prompts.of(config, Groups((4,), (None,), (False,))))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("prompt", [None, [], [1 << 70], [1.5], ["a"], [[1]]])
def test_a_prompt_that_is_not_one_of_tokens_has_no_keys(prompt: Any) -> None:
    assert Prompts().keys(make_request(prompt_token_ids=prompt)) is None


def test_a_prompt_whose_images_vllm_only_counts_has_no_keys() -> None:
    request = make_request(mm_features=[image("renderer0-mm-1-image-0")])
    assert Prompts().keys(request) is not None
    assert Prompts(knows_images=False).keys(request) is None
    assert Prompts(knows_images=False).keys(make_request()) is not None


@pytest.mark.parametrize(
    ("has_prefix_caching", "cache_gb", "knows_images"),
    [(True, 0, True), (False, 4, True), (False, 0, False), (False, None, False)],
)
def test_vllm_knows_images_by_their_content_where_it_caches_them(
    *, has_prefix_caching: bool, cache_gb: int | None, knows_images: bool
) -> None:
    images = None if cache_gb is None else SimpleNamespace(mm_processor_cache_gb=cache_gb)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=images),
        cache_config=SimpleNamespace(enable_prefix_caching=has_prefix_caching),
    )
    groups = Groups((4,), (None,), (False,))
    assert Prompts.of(config, groups) == Prompts(knows_images=knows_images)

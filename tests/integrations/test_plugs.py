"""Plugs: a release of an engine that wants more of them is refused in a sentence."""

import importlib
import runpy
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import UnsupportedEngineError
from tests.integrations.grown import NAME, grown

OFFLOADING = "kvxfer.integrations.vllm.offloading"
PLUGS = [
    ("lmcache", "kvxfer.integrations.lmcache", "KVXferL2Adapter", "L2AdapterInterface"),
    ("vllm", "kvxfer.integrations.vllm", "KVXferOffloadingSpec", "OffloadingSpec"),
    ("vllm", "kvxfer.integrations.vllm", "KVXferTier", "SecondaryTierManager"),
    ("vllm", f"{OFFLOADING}.manager", "KVXferOffloadingManager", "OffloadingManager"),
    ("vllm", f"{OFFLOADING}.worker", "KVXferOffloadingWorker", "OffloadingWorker"),
    ("vllm", "kvxfer.integrations.vllm", "KVXferConnector", "KVConnectorBase_V1"),
]
WITHOUT_BACKEND = SimpleNamespace(
    kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"listen": "127.0.0.1"})
)


@pytest.mark.parametrize(("package", "module", "name", "base"), PLUGS, ids=lambda each: each)
def test_a_method_that_an_engine_added_is_named(
    package: str, module: str, name: str, base: str
) -> None:
    pytest.importorskip(package)
    plug: Any = getattr(importlib.import_module(module), name)
    sentence = rf"^{package} \S+ is not supported \(its {base} wants {NAME}\); supported: \d"
    with grown(plug), pytest.raises(UnsupportedEngineError, match=sentence):
        plug(WITHOUT_BACKEND, None)
    assert not plug.__abstractmethods__


@pytest.mark.parametrize(
    ("package", "interface", "lost"),
    [
        (
            "lmcache",
            "lmcache.interface",
            "lmcache.v1.distributed.l2_adapters.base.L2AdapterInterface",
        ),
        ("transformers", "transformers.interface", "transformers.cache_utils.DynamicLayer"),
        ("vllm", "vllm.prefill_decode.interface", "vllm.v1.request.RequestStatus"),
    ],
)
def test_a_name_that_an_engine_lost_is_named(
    package: str, interface: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    ours = importlib.import_module(f"kvxfer.integrations.{interface}")
    monkeypatch.delattr(lost)
    with pytest.raises(UnsupportedEngineError) as refused:
        runpy.run_path(str(ours.__file__))
    assert str(refused.value).startswith(f"{package} ")
    assert f"cannot import name {lost.rpartition('.')[2]!r}" in str(refused.value)
    assert "; supported: " in str(refused.value)


def test_without_sglang_the_error_says_which_releases_are_supported() -> None:
    """Its own tests are those of `make sglang`."""
    with pytest.raises(UnsupportedEngineError, match=r"sglang .*; supported: 0\.5\.20 to 0\.5\.23"):
        importlib.import_module("kvxfer.integrations.sglang")

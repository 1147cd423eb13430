"""Plugs: a release of an engine that wants more of them is refused in a sentence."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import UnsupportedEngineError
from tests.integrations.grown import NAME, grown

pytestmark = pytest.mark.timeout(120)  # the first import of an engine

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
    ("package", "lost"),
    [
        ("lmcache", "lmcache.v1.distributed.l2_adapters.base.L2AdapterInterface"),
        ("lmcache", "lmcache.v1.platform.create_event_notifier"),
        ("transformers", "transformers.cache_utils.DynamicSlidingWindowLayer"),
    ],
)
def test_a_name_that_an_engine_lost_is_named(package: str, lost: str) -> None:
    pytest.importorskip(package)
    module, _, name = lost.rpartition(".")
    code = (
        f"import importlib\n"
        f"del importlib.import_module({module!r}).{name}\n"
        f"from kvxfer.errors import UnsupportedEngineError\n"
        f"try: importlib.import_module('kvxfer.integrations.{package}').PrefixCache\n"
        f"except UnsupportedEngineError as exc: print(exc)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    said = answer.stdout.splitlines()[-1]
    assert said.startswith(f"{package} ")
    assert f"cannot import name {name!r}" in said
    assert "; supported: " in said

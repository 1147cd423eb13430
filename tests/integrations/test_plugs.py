"""Plugs: a release of an engine that requires more of them is refused with a clear sentence."""

import abc
import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.errors import UnsupportedEngineError

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
NAME = "do_something_new"


def install_plugin(
    folder: Path,
    group: str,
    *,
    package: str = "theirs",
    version: str = "1",
    source: dict[str, Any] | None = None,
) -> None:
    """Install a package with a plug-in of an engine, as pip does, from PyPI or another source."""
    place = folder / f"{package}-{version}.dist-info"
    place.mkdir()
    if source is not None:
        (place / "direct_url.json").write_text(json.dumps(source))
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (place / "entry_points.txt").write_text(f"[{group}]\nfaster = {package}.ops:register\n")


@contextmanager
def grown(plug: Any) -> Iterator[None]:
    """Add an abstract method to the interface that a plug implements, for the time being."""
    base = next(each for each in plug.__mro__ if not each.__module__.startswith("kvxfer."))
    between = [each for each in plug.__mro__ if issubclass(each, base)]

    def update() -> None:
        for each in reversed(between):
            abc.update_abstractmethods(each)

    setattr(base, NAME, abc.abstractmethod(lambda self: self))
    update()
    try:
        yield
    finally:
        delattr(base, NAME)
        update()


@pytest.mark.parametrize(("package", "module", "name", "base"), PLUGS, ids=lambda each: each)
def test_a_method_that_an_engine_added_is_named(
    package: str, module: str, name: str, base: str
) -> None:
    pytest.importorskip(package)
    plug: Any = getattr(importlib.import_module(module), name)
    sentence = rf"^{package} \S+ is not supported \(its {base} requires {NAME}\); supported: \d"
    with grown(plug), pytest.raises(UnsupportedEngineError, match=sentence):
        plug(WITHOUT_BACKEND, None)
    assert not plug.__abstractmethods__


def test_without_sglang_the_error_says_which_releases_are_supported() -> None:
    """Its own tests are those of `make sglang`."""
    with pytest.raises(UnsupportedEngineError, match=r"sglang .*; supported: 0\.5\.20 to 0\.5\.23"):
        importlib.import_module("kvxfer.integrations.sglang")

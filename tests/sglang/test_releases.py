"""Releases of SGLang: settings that one adds, renames or lacks are never silently ignored."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt import runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of, record_fields
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.server_args import ServerArgs

from kvxfer.errors import UnsupportedEngineError
from kvxfer.integrations.sglang import KVXferStorage, identity, interface
from tests.integrations.test_plugs import NAME, grown
from tests.sglang.pools import attention_pool
from tests.sglang.storages import extra_config, opened, storage_config

PLACES = namespace_of(ServerArgs)
DEFAULTS = {field.name: field.default for field in record_fields(ServerArgs)}
OF_MODEL = [name for name, place in PLACES.items() if place == "model"]
OF_DRAFT = [name for name, place in PLACES.items() if place == "spec"]
NOT_IN_EVERY_RELEASE = {
    "qsa_indexer_dtype", "prefill_kv_cache_dequant_dtype", "speculative_draft_sink_size",
    "speculative_enable_w4a4_mxfp4_megamoe", "speculative_skip_dp_mlp_sync",
    "speculative_use_block_verification", "speculative_boundary_reduction",
}  # fmt: skip
"""Settings that some of the releases from 0.5.20 to 0.5.23 lack."""


def hash_of_settings() -> str:
    config = storage_config(extra_config("host://?capacity=64MiB"))
    return identity.page_namespace(config, "1", ["kv"], []).config_hash


@contextmanager
def published(**settings: Any) -> Iterator[None]:
    """Publish the settings of an engine, as SGLang does, with these among them."""
    with runtime_context.get_context().override_server_args(**settings):
        yield


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "another"


@pytest.fixture(scope="module")
def plain() -> str:
    with published():
        return hash_of_settings()


@pytest.mark.parametrize("name", OF_MODEL)
def test_every_setting_of_a_model_counts_but_those_that_load_it(name: str, plain: str) -> None:
    with published(**{name: other_than(DEFAULTS[name])}):
        assert (hash_of_settings() == plain) == (name in identity.LOADING)


@pytest.mark.parametrize("name", OF_DRAFT)
def test_every_setting_of_a_draft_counts_where_there_is_one_but_those_of_proposals(
    name: str, plain: str
) -> None:
    drafting = {"speculative_algorithm": "EAGLE"}
    is_drafting = name == "speculative_algorithm"
    changed = {name: "NGRAM" if is_drafting else other_than(DEFAULTS[name])}
    with published(**drafting):
        before = hash_of_settings()
    with published(**(drafting | changed)):
        assert (hash_of_settings() == before) == (name in identity.PROPOSING)
    if not is_drafting:
        with published(**changed):
            assert hash_of_settings() == plain


LOSSY = ["kt_weight_path", "enable_w4a4_mxfp4_megamoe", "enable_int8_mamba_checkpoint"]
LOSSY += ["deepep_dispatcher_output_dtype", "weight_version", "enable_tf32_matmul"]
LOSSY += ["forward_hooks", "enable_precise_embedding_interpolation"]
LOSSLESS = ["kt_cpuinfer", "fp8_gemm_runner_backend", "attention_backend", "port"]


@pytest.mark.parametrize("name", [*LOSSY, *LOSSLESS, "max_running_requests"])
def test_settings_of_other_groups_count_where_they_are_lossy(name: str, plain: str) -> None:
    with published(**{name: other_than(DEFAULTS[name])}):
        assert (hash_of_settings() != plain) == (name in LOSSY)


@pytest.mark.parametrize("name", ["dsa_prefill_backend", "dsv4_prefill_backend"])
def test_a_kernel_counts_where_it_rounds_to_fp8(name: str, plain: str) -> None:
    for kernel, is_lossy in (("flashmla_sparse", False), ("flashmla_sparse_q8", True)):
        with published(**{name: kernel}):
            assert (hash_of_settings() != plain) == is_lossy


@dataclass
class LaterConfig(HiCacheStorageConfig):  # type: ignore[misc]
    """Configuration of a later release, with a new kind of rank."""

    sparse_rank: int = 0


def test_what_a_later_release_knows_of_an_engine_counts(plain: str) -> None:
    known = vars(storage_config(extra_config("host://?capacity=64MiB")))
    hashes = set[str]()
    with published():
        for rank in (0, 1):
            config = LaterConfig(**known, sparse_rank=rank)
            hashes.add(identity.page_namespace(config, "1", ["kv"], []).config_hash)
    assert plain in hashes
    assert len(hashes) == 2


def test_the_lists_name_settings_that_there_are() -> None:
    listed = identity.LOADING | identity.PROPOSING | identity.NAMED
    assert listed - PLACES.keys() <= NOT_IN_EVERY_RELEASE


def test_a_setting_that_a_release_lacks_is_one_that_nobody_has_asked_for(plain: str) -> None:
    """So that engines of releases before and after it share."""
    lacking = {name: place for name, place in PLACES.items() if name not in NOT_IN_EVERY_RELEASE}
    with published(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(interface, "namespace_of", lambda _: lacking)
        assert hash_of_settings() == plain


@contextmanager
def release_with(places: Mapping[str, str], **settings: Any) -> Iterator[None]:
    """Pretend to be a release with these settings in these groups, all None by default."""
    declared = msgspec.defstruct("LaterArgs", [(name, Any, None) for name in places])
    declared._NS_BY_FIELD = dict(places)  # type: ignore[attr-defined]
    bags = {group: SimpleNamespace() for group in places.values()}
    for name, place in places.items():
        setattr(bags[place], name, settings.get(name))
    context = SimpleNamespace(server_args=declared(), config_bag=bags.__getitem__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime_context, "get_context", lambda: context)
        yield


LATER = {"dtype": "model", "int3_profile": "model", "speculative_algorithm": "spec"}


@pytest.mark.parametrize(
    "places", [LATER, {"int3_profile": "model", "speculative_algorithm": "spec"}]
)
def test_a_setting_that_a_later_release_has_or_renamed_counts_without_being_known(
    places: dict[str, str],
) -> None:
    hashes = set()
    for value in (None, "coarse", "fine"):
        with release_with(places, int3_profile=value):
            hashes.add(hash_of_settings())
    assert len(hashes) == 3


def test_a_release_with_other_groups_of_settings_is_refused_and_stores_nothing() -> None:
    sentence = r"^sglang \S+ is not supported \(its settings have no group model\); supported: 0\.5"
    with (
        release_with({"dtype": "weights", "speculative_algorithm": "spec"}),
        pytest.raises(UnsupportedEngineError, match=sentence),
        opened(attention_pool("page_first"), extra_config("host://?capacity=64MiB")),
    ):
        pass


def test_a_release_that_wants_more_of_a_storage_is_refused() -> None:
    sentence = rf"^sglang \S+ is not supported \(its HiCacheStorage requires {NAME}\); supported: 0"
    config = storage_config(extra_config("host://?capacity=64MiB"))
    with grown(KVXferStorage), pytest.raises(UnsupportedEngineError, match=sentence):
        KVXferStorage(config, {})

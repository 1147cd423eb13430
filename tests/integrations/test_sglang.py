"""The plug for SGLang where there is no SGLang; its own tests are those of `make sglang`."""

import importlib

import pytest

from kvxfer.errors import UnsupportedEngineError


def test_without_sglang_the_error_says_which_releases_are_supported() -> None:
    with pytest.raises(UnsupportedEngineError, match=r"sglang .*; supported: 0\.5\.20 to 0\.5\.23"):
        importlib.import_module("kvxfer.integrations.sglang")

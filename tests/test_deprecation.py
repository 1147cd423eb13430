"""A deprecated name works with one warning, and is gone with the release that the warning named."""

import warnings
from pathlib import Path

import kvxfer
from kvxfer.deprecation import warn_deprecated
from tests.release import overdue

ROOT = Path(__file__).parents[1]


def test_what_should_have_gone_with_this_release_is_gone() -> None:
    assert overdue(ROOT, kvxfer.__version__) == []


def test_a_deprecated_name_works_and_warns_its_caller_once() -> None:
    def deprecated_function() -> int:
        warn_deprecated("deprecated_function()", replacement="another()", gone_in="99.0.0")
        return 7

    with warnings.catch_warnings(record=True, action="always") as caught:
        assert [deprecated_function(), deprecated_function()] == [7, 7]
    [warning] = caught
    assert str(warning.message) == (
        "deprecated_function() is deprecated and will be removed in kvxfer 99.0.0; use another()"
    )
    assert warning.category is FutureWarning
    assert warning.filename == __file__

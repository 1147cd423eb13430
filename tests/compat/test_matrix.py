"""The pages name the releases that `make compat` and the other tests run with, and no others."""

import re

import pytest

from tests.compat import matrix
from tests.environment.public_index import newest_release
from tests.interpreter import REPOSITORY

INTERFACES = {
    "vllm": "kvxfer/integrations/vllm/common/release.py",
    "sglang": "kvxfer/integrations/sglang/interface.py",
    "transformers": "kvxfer/integrations/transformers/interface.py",
    "lmcache": "kvxfer/integrations/lmcache/interface.py",
}


@pytest.mark.parametrize("page", matrix.TABLES)
def test_the_table_of_a_page_is_the_one_that_make_compat_writes(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    assert matrix.written(page, text) == text


@pytest.mark.parametrize("engine", INTERFACES)
def test_a_plug_says_that_it_supports_what_is_tested(engine: str) -> None:
    text = (REPOSITORY / INTERFACES[engine]).read_text()
    said = re.search(r'^SUPPORTED = "(.+)"', text, re.MULTILINE)
    assert said
    ends = matrix.span(matrix.TESTED[engine]).split(" to ")
    if engine in {"vllm", "transformers"}:  # of which any patch release will do
        ends = [each.rpartition(".")[0] for each in ends]
    assert said[1] == " to ".join(ends)


@pytest.mark.compat
@pytest.mark.parametrize("engine", matrix.TESTED)
def test_the_newest_release_on_the_index_is_tested(engine: str) -> None:
    """Of vLLM by the build for GPUs, which comes first."""
    assert str(newest_release(engine)) in matrix.TESTED[engine]


def test_the_page_about_transformers_names_the_releases() -> None:
    page = (REPOSITORY / "docs/transformers.md").read_text()
    named = re.search(r"with transformers ([\d., and]+);", page)
    assert named
    assert named[1] == matrix.listed(matrix.TESTED["transformers"], " and ")

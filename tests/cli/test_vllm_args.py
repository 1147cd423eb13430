"""`kvxfer vllm-args`: prints a checked configuration, or says what is wrong with it."""

import json
import tempfile

import pytest

from tests.cli.conftest import Run

URLS = ["host://?capacity=1MiB", f"file://{tempfile.gettempdir()}/kv?capacity=1GiB"]


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVXFER_BACKEND", "KVXFER_CONFIG", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def test_urls_become_the_configuration_in_one_line(run: Run) -> None:
    status, printed, said = run("vllm-args", *URLS)
    assert (status, printed.count("\n"), said) == (0, 1, "")
    assert json.loads(printed) == {
        "kv_connector": "KVXferOffload",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"backend": URLS},
    }


def test_where_vllm_leaves_the_plug_in_out_the_module_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    status, printed, said = run("vllm-args", *URLS)
    assert status == 0
    assert json.loads(printed)["kv_connector_module_path"] == "kvxfer.integrations.vllm"
    assert said.startswith("kvxfer vllm-args: vLLM does not load the plug-in (VLLM_PLUGINS is")


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], "none in kv_connector_extra_config, KVXFER_BACKEND or KVXFER_CONFIG"),
        (URLS[1:], "expected a host:// pool first"),
        (["host://"], "expected a host backend: "),
        ([URLS[0], "nothing://"], "expected one of: "),
        ([URLS[0], "file:///proc/s?capacity=1GiB"], "/proc cannot be written to: "),
        ([URLS[0], f"file://{__file__}?capacity=1GiB"], f"{__file__} is no folder"),
        ([*URLS, "s3://bucket?integrity=sealed"], "'missing with integrity=sealed'; expected"),
        ([*URLS, f"{URLS[1]}&tenant=a"], "tenant is 'a'; expected no tenant unless"),
        ([*URLS, "nixl://10.0.0.1:7000"], "expected a loopback address; any other needs"),
        ([*URLS, "nixl://10.0.0.1:7000?secret_file=/nowhere"], "No such file or directory"),
    ],
)
def test_what_no_engine_would_take_is_one_line(run: Run, urls: list[str], expected: str) -> None:
    status, printed, said = run("vllm-args", *urls)
    assert (status, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith("kvxfer vllm-args: backend is ")
    assert expected in said

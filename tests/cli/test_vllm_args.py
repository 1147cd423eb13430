"""`kvxfer vllm-args`: a configuration that was checked, and who is told what is wrong with it."""

import json

import pytest

from kvxfer.cli import main

URLS = ["host://?capacity=1MiB", "file:///var/cache/kv?capacity=1GiB"]


@pytest.fixture(autouse=True)
def _without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVXFER_BACKEND", "KVXFER_CONFIG", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)


def test_urls_become_the_configuration_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vllm-args", *URLS]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "kv_connector": "KVXferOffload",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"backend": URLS},
    }
    assert (said.out.count("\n"), said.err) == (1, "")


def test_without_urls_it_is_that_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVXFER_BACKEND", " ".join(URLS))
    assert main(["vllm-args"]) == 0
    assert json.loads(capsys.readouterr().out)["kv_connector_extra_config"] == {"backend": URLS}
    assert main(["vllm-args", URLS[0]]) == 0
    found = json.loads(capsys.readouterr().out)["kv_connector_extra_config"]
    assert found == {"backend": [URLS[0]]}


def test_where_vllm_leaves_the_plug_in_out_the_module_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert main(["vllm-args", *URLS]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["kv_connector_module_path"] == "kvxfer.integrations.vllm"
    assert said.err.startswith("kvxfer vllm-args: vLLM does not load the plug-in (VLLM_PLUGINS is")


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], "none in kv_connector_extra_config, KVXFER_BACKEND or KVXFER_CONFIG"),
        (URLS[1:], "expected a host:// pool in front"),
        (["host://?capacity=much"], "expected a host backend: "),
        (["host://"], "expected a host backend: "),
        ([URLS[0], "nothing://"], "expected one of: "),
    ],
)
def test_what_no_engine_would_take_is_one_line(
    urls: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["vllm-args", *urls]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert said.err.startswith("kvxfer vllm-args: backend is ")
    assert expected in said.err

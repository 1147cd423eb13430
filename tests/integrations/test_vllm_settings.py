"""Settings of vLLM's connectors by configuration and environment, and their names in vLLM."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvxfer.cli import main
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common import plugin
from kvxfer.integrations.vllm.common.settings import find_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/vllm.md").read_text()
HOST = "host://?capacity=1MiB"
TIERS = ["host://?capacity=4GiB", "file:///var/cache/kv?capacity=200GiB"]
EXPLICIT = "kv_connector_extra_config"

YAML = """
backend:
  - host://?capacity=2MiB
  - {type: file, path: /var/cache/kv, capacity: 1GiB}
max_load_ratio: 1.5
"""
JSON = '{"backend": ["host://?capacity=2MiB"], "max_load_ratio": 1.5}'


def write(folder: Path, text: str) -> dict[str, str]:
    """Write a file of settings; return the environment that names it."""
    path = folder / "settings"
    path.write_text(text)
    return {"KVXFER_CONFIG": str(path)}


@pytest.mark.parametrize("text", [YAML, JSON], ids=["yaml", "json"])
def test_each_setting_is_from_the_first_source_that_has_it(tmp_path: Path, text: str) -> None:
    environ = write(tmp_path, text)
    in_file = find_settings({}, environ)
    assert in_file.values["backend"][0] == "host://?capacity=2MiB"
    assert in_file.values["max_load_ratio"] == 1.5
    in_file.check_tiers()

    environ["KVXFER_BACKEND"] = f"  {HOST}\n\tfile:///var/cache/kv?capacity=1GiB "
    found = find_settings({"block_size": 256}, environ)
    assert found.values == {
        "block_size": 256,
        "backend": [HOST, "file:///var/cache/kv?capacity=1GiB"],
        "max_load_ratio": 1.5,
    }
    assert str(found) == (
        f"block_size from {EXPLICIT}, backend from KVXFER_BACKEND, "
        f"max_load_ratio from KVXFER_CONFIG={environ['KVXFER_CONFIG']}"
    )
    found.check_tiers()

    explicit = {"backend": "host://?capacity=3MiB", "max_load_ratio": None}
    found = find_settings(explicit, environ)
    assert (found.values, set(found.origins.values())) == (explicit, {EXPLICIT})


@pytest.mark.parametrize("environ", [{}, {"KVXFER_BACKEND": " ", "KVXFER_CONFIG": ""}])
def test_without_any_the_error_names_every_source(environ: dict[str, str]) -> None:
    found = find_settings({}, environ)
    assert found.values == {}
    sources = f"none in {EXPLICIT}, KVXFER_BACKEND or KVXFER_CONFIG"
    with pytest.raises(InvalidArgumentError, match=f"^backend is None; .*; {sources}$"):
        found.check_tiers()


def test_an_error_says_where_the_setting_is_from(tmp_path: Path) -> None:
    def error(explicit: dict[str, Any], environ: dict[str, str]) -> str:
        with pytest.raises(InvalidArgumentError) as caught:
            find_settings(explicit, environ).check_tiers()
        return str(caught.value)

    wrong = {"KVXFER_BACKEND": "file:///var/cache/kv?capacity=1GiB"}
    assert error({}, wrong).endswith("expected a host:// pool first (it is from KVXFER_BACKEND)")
    unknown = {"KVXFER_BACKEND": f"{HOST} nothing://"}
    assert error({}, unknown).startswith("backend is 'nothing'; expected one of: ")
    secret = {"KVXFER_BACKEND": f"{HOST} s3://bucket/kv?secret_access_key=hidden"}
    assert "hidden" not in error({}, secret)
    environ = write(tmp_path, f"backend: {HOST}\nmax_load_ratio: -1\n")
    path = environ["KVXFER_CONFIG"]
    assert error({}, environ).endswith(f"greater than 0 (it is from KVXFER_CONFIG={path})")
    assert "it is from" not in error({"backend": "file:///x"}, {})


@pytest.mark.parametrize("name", ["max_load_ration", "purge_on_rest", "backends", "Backend"])
def test_a_misspelt_setting_is_refused_and_a_setting_of_vllm_is_not(name: str) -> None:
    explicit = {"backend": HOST, "block_size": 64, "spec_name": "X", "lookup_mode": "y"}
    find_settings(explicit, {}).check_tiers()
    with pytest.raises(
        InvalidArgumentError, match=f"^setting is '{name}'; .*did you mean.*{name} from "
    ):
        find_settings(explicit | {name: 1}, {}).check_tiers()


@pytest.mark.parametrize(
    "text", ["", "7", "[a]", "host://?capacity=1MiB", "{1: 2}", "{", "a: !!python/object:x.y {}"]
)
def test_a_file_that_has_no_settings_is_named(tmp_path: Path, text: str) -> None:
    environ = write(tmp_path, text)
    with pytest.raises(InvalidArgumentError, match=r"^KVXFER_CONFIG is '.*settings'; expected a"):
        find_settings({}, environ)
    (tmp_path / "settings").unlink()
    with pytest.raises(InvalidArgumentError, match=r"^KVXFER_CONFIG is '.*settings'; .*: No such"):
        find_settings({}, environ)


@pytest.mark.processes
def test_the_plug_in_imports_no_torch_and_nothing_of_an_engine() -> None:
    code = (
        f"import sys; import {plugin.__name__}\n"
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'vllm', 'kvxfer.connect'}))"
    )
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True)
    assert printed == "[]\n"


def test_the_plug_in_fails_in_no_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called unguarded in every process, also where no connector of ours is used."""
    factory: Any = ModuleType("factory")
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", factory)
    plugin.register()  # no factory
    factory.KVConnectorFactory = SimpleNamespace()
    plugin.register()  # another interface
    factory.KVConnectorFactory.register_connector = lambda name: None
    plugin.register()
    assert caplog.text.count("need kv_connector_module_path") == 3


def test_vllm_knows_the_connectors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.kv_offload.base", reason="needs vLLM")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import kvxfer.integrations.vllm as ours

    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    plugin.register()
    plugin.register()  # vLLM may load plug-ins several times
    for name in plugin.CONNECTORS:
        config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
        assert KVConnectorFactory.get_connector_class(config) is getattr(ours, name)
        # Statistics that come from another process are made again by that class.
        assert KVConnectorFactory.get_connector_class_by_name(name) is getattr(ours, name)


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in re.split(r"\n(?=vllm|export)", block)]
    words = [shlex.split(line.replace("\\\n", " ")) for line in lines]
    return [each[2:] for each in words if each[:2] == ["vllm", "serve"]]


@pytest.mark.filterwarnings("ignore")  # of vLLM's parser
def test_vllm_takes_every_form_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    utils = pytest.importorskip("vllm.utils.argparse_utils", reason="needs vLLM")
    from vllm.config import KVTransferConfig

    file = tmp_path / "engine.yaml"
    file.write_text(PAGE[PAGE.index("kv-transfer-config:\n") :].partition("```")[0])
    parser = utils.FlexibleArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--kv-transfer-config", type=json.loads)

    def substitute(word: str) -> str:
        inner = re.fullmatch(r"\$\(kvxfer (.*)\)", word)
        if inner is None:
            return word
        assert main(shlex.split(inner[1])) == 0
        return capsys.readouterr().out

    forms = [["MODEL", "--config", str(file)], *commands()]
    found = [parser.parse_args(list(map(substitute, form))).kv_transfer_config for form in forms]
    assert [each["kv_connector"] for each in found] == [
        *["KVXferOffload"] * 4,
        "OffloadingConnector",
    ]
    for each in found:
        KVTransferConfig(**each)
        assert each.get(EXPLICIT, {}).get("backend", TIERS) == TIERS

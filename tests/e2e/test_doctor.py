"""`kvxfer doctor A B` with real engines: what it says of a configuration is what the engine has."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.doctor import Finding, Severity, compare
from kvxfer.endpoint import free_ports
from tests.e2e.engine_process import EngineProcess
from tests.e2e.harness import llama, random_prompts

pytestmark = pytest.mark.e2e

TIMEOUT_S = 30.0


def find(*arguments: str) -> list[Finding]:
    return compare(arguments, timeout_s=TIMEOUT_S)


def write(path: Path, arguments: dict[str, Any]) -> str:
    path.write_text(json.dumps({"port": 8000, **arguments}))
    return str(path)


@pytest.mark.exhaustive
def test_a_configuration_has_the_namespaces_of_the_engine_that_it_starts(tmp_path: Path) -> None:
    address, store = f"127.0.0.1:{free_ports()}", tmp_path / "store"
    backend = ["host://?capacity=64MiB", f"file://{store}?capacity=64MiB&min_free=1MiB"]
    transfer = {
        "kv_connector": "KVXferConnector",
        "kv_connector_module_path": "kvxfer.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": address, "backend": backend},
    }
    config = llama(transfer=transfer, block_size=None)
    arguments = {
        "model": config.model,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "skip-tokenizer-init": True,
        "kv-transfer-config": transfer,
    }
    same = write(tmp_path / "same.json", arguments)
    other = write(tmp_path / "other.json", {**arguments, "dtype": "bfloat16"})
    with EngineProcess(config) as engine:
        engine.generate(random_prompts(1, shared_tokens=640, own_tokens=60), max_tokens=2)
        engine.settle()
        peer = f"nixl://{address}"
        for running in (peer, str(store)):
            (finding,) = find(same, running)
            assert finding.severity is Severity.OK, finding
            assert "dtype" in {finding.subject for finding in find(other, running)}
        assert {each.severity for each in find(peer, str(store))} == {Severity.ERROR}
    assert "Traceback" not in engine.log(), engine.log()

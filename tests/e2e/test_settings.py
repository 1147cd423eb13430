"""Settings of engines: by the environment alone, and what `kvxfer doctor A B` says of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.doctor import Finding, Severity, compare
from tests.e2e.engine_process import TOKENS_PER_BLOCK, EngineProcess
from tests.e2e.harness import llama, random_prompts, require_gpus
from tests.ports import free_ports

pytestmark = pytest.mark.e2e

SHARED_TOKENS = 400
WHOLE_BLOCKS_TOKENS = 3 * TOKENS_PER_BLOCK
MAX_TOKENS = 4


@pytest.mark.parametrize(
    "num_workers",
    [
        pytest.param(1, id="one-process"),
        pytest.param(2, id="several-processes", marks=pytest.mark.exhaustive),
    ],
)
def test_the_environment_alone_configures_an_engine(num_workers: int, tmp_path: Path) -> None:
    """Every process loads the plug-in: that of the caller, the engine's core and its workers."""
    store, file = tmp_path / "store", tmp_path / "settings.yaml"
    file.write_text(json.dumps({"max_load_ratio": 1000.0, "backend": "host://?capacity=1KiB"}))
    config = llama(
        transfer={"kv_connector": "KVXferOffload", "kv_role": "kv_both"},
        multiprocessing=num_workers > 1,
        tensor_parallel_size=num_workers,
        environment={
            "KVXFER_BACKEND": f"host://?capacity=64MiB file://{store}?capacity=64MiB&min_free=1MiB",
            "KVXFER_CONFIG": str(file),
            "VLLM_LOGGING_LEVEL": "INFO",
        },
    )
    require_gpus(num_workers)
    prompts = random_prompts(2, shared_tokens=SHARED_TOKENS, own_tokens=5)
    with EngineProcess(config) as engine:
        computed = engine.generate(prompts, max_tokens=MAX_TOKENS)
        engine.settle()
        assert engine.reset(), "blocks are still in use"
        loaded = engine.generate(prompts, max_tokens=MAX_TOKENS)
        metrics = engine.metrics()
    assert [each.token_ids for each in loaded] == [each.token_ids for each in computed]
    assert {each.cached_tokens for each in loaded} == {WHOLE_BLOCKS_TOKENS}
    # Counts of loads themselves come in a step without tokens, which `LLM` of 0.27 does not report.
    loaded_tokens = metrics['vllm:prompt_tokens_by_source{source="external_kv_transfer"}']
    assert loaded_tokens == WHOLE_BLOCKS_TOKENS
    assert list(store.rglob("*.safetensors"))
    settings = [line for line in engine.log().splitlines() if "has settings" in line]
    expected = f"backend from KVXFER_BACKEND, max_load_ratio from KVXFER_CONFIG={file}"
    assert [line.endswith(f"KVXferOffload has settings: {expected}") for line in settings] == [True]


def find(*arguments: str) -> list[Finding]:
    return compare(arguments, timeout_s=30.0)


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

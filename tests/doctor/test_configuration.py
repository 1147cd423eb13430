"""Configurations of vLLM: their backends, and the namespaces that they will give."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from kvxfer.doctor import Severity, compare, environment_backends, is_comparable, read_backends
from kvxfer.errors import InvalidArgumentError

TIMEOUT_S = 30.0
FILES = {"type": "file", "path": "/var/cache/kv", "capacity": "1GiB"}
TIERS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": ["host://?capacity=1GiB", FILES]},
}
HANDOVER = {
    "kv_connector": "KVXferConnector",
    "kv_connector_module_path": "kvxfer.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"revision": "abc"},
}
BRIDGED = ("layout", "blocks_per_chunk", "parallel", "instruction_set")
OF_KEYS = ("tokens_per_block", "tokens_per_chunk", "prefix_caching_hash_algo")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}

needs_vllm = pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        TIERS,
        {"model": "m", "kv-transfer-config": TIERS},
        {"model": "m", "kv_transfer_config": json.dumps(TIERS)},
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": [HANDOVER, TIERS]},
        },
    ],
    ids=["the connector alone", "an engine", "an engine's, as text", "several connectors"],
)
def test_the_backends_of_a_configuration_are_found(tmp_path: Path, content: Any) -> None:
    assert read_backends(write(tmp_path / "a.json", content)) == ["host://?capacity=1GiB", FILES]


def test_the_backends_of_the_environment_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_backends() == []
    urls = ["host://?capacity=1GiB", "file:///var/cache/kv?capacity=1GiB"]
    monkeypatch.setenv("KVXFER_BACKEND", " ".join(urls))
    assert environment_backends() == urls
    ours = {"kv_connector": "KVXferOffload", "kv_role": "kv_both"}
    assert read_backends(write(tmp_path / "a.json", ours)) == urls
    explicit = {**ours, "kv_connector_extra_config": {"backend": "host://"}}
    assert read_backends(write(tmp_path / "a.json", explicit)) == ["host://"]
    with pytest.raises(InvalidArgumentError, match="a configuration with a backend"):
        read_backends(write(tmp_path / "a.json", {**ours, "kv_connector": "OffloadingConnector"}))


@pytest.mark.parametrize(
    "content",
    [[], 7, {}, {"kv_transfer_config": 7}, {"kv_transfer_config": "{"}, HANDOVER],
    ids=str,
)
def test_what_has_no_backend_is_refused_by_name(tmp_path: Path, content: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"a\.json"):
        read_backends(write(tmp_path / "a.json", content))


@pytest.mark.processes
def test_without_vllm_a_configuration_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')\n")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    given = write(tmp_path / "a.json", {"model": "m", "kv_transfer_config": HANDOVER})
    assert is_comparable(given)
    with pytest.raises(InvalidArgumentError, match=r"a\.json.*vLLM"):
        compare([given, given], timeout_s=TIMEOUT_S)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_configurations_are_compared_in_the_fields_that_are_known(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model / "config.json", MODEL)
    (model / "pytorch_model.bin").write_bytes(b"weights")
    engine = {"model": str(model), "skip_tokenizer_init": True, "max_model_len": 64, "port": 8000}

    def engine_with(name: str, transfer: Any, **changed: Any) -> str:
        arguments = {**engine, "dtype": "float32", "kv_transfer_config": transfer, **changed}
        return write(tmp_path / f"{name}.json", arguments)

    both = {**HANDOVER, "kv_connector_extra_config": {"revision": "abc", "backend": "host://"}}
    ours, tiers = engine_with("ours", both), engine_with("tiers", TIERS)
    (finding,) = compare([ours, tiers], timeout_s=TIMEOUT_S)
    assert finding.severity is Severity.OK
    known = ("model", "revision", "dtype", "quantization", "config_hash", *BRIDGED, *OF_KEYS)
    assert f"tiers: both of {str(model)!r}, and equal in {', '.join(known)}; " in finding.found
    assert "not known before an engine runs: groups (the layers and the layout" in finding.found
    half = engine_with("half", HANDOVER, dtype="bfloat16")
    (finding,) = compare([ours, half], timeout_s=TIMEOUT_S)
    assert (finding.severity, finding.subject) == (Severity.ERROR, "dtype")
    assert "'torch.float32' in" in finding.found
    # What is handed over is the same, and the blocks of the tiers have other keys.
    other = engine_with("other", both, block_size=32, prefix_caching_hash_algo="sha256_cbor")
    findings = compare([ours, other], timeout_s=TIMEOUT_S)
    subjects = [(finding.severity, finding.subject) for finding in findings]
    assert sorted(subjects[:-1]) == [(Severity.ERROR, name) for name in sorted(OF_KEYS)]
    assert "hand-over: one namespace" in findings[-1].found
    assert "32 in" in findings[0].found
    with pytest.raises(InvalidArgumentError, match=r"wrong\.json.*dtype"):
        compare([engine_with("wrong", TIERS, dtype="float33"), tiers], timeout_s=TIMEOUT_S)

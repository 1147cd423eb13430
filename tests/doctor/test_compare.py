"""Files of configurations, and two engines: every field that differs, with both values."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvxfer.doctor import (
    Finding,
    Severity,
    compare,
    environment_backends,
    is_comparable,
    read_backends,
)
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.keys import Namespace
from tests.cli import peers
from tests.cli.peers import serving
from tests.cli.stores import Store
from tests.doctor.findings import ERROR, OK, TIMEOUT_S, expect

URL = "host://?capacity=1GiB"
FILES = {"type": "file", "path": "/var/cache/kv", "capacity": "1GiB"}
TIERS = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"backend": [URL, FILES]},
}
HANDOVER = {
    "kv_connector": "KVXferConnector",
    "kv_connector_module_path": "kvxfer.integrations.vllm",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"revision": "abc"},
}
SEVERAL = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [HANDOVER, TIERS]},
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


def write(path: Path, content: Any) -> str:
    if isinstance(content, Namespace):
        content = msgspec.to_builtins(content.fields())
    path.write_text(json.dumps(content))
    return str(path)


def one(*arguments: str) -> Finding:
    (finding,) = compare(arguments, timeout_s=TIMEOUT_S)
    return finding


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (TIERS, [URL, FILES]),
        ({"model": "m", "kv-transfer-config": TIERS}, [URL, FILES]),
        ({"model": "m", "kv_transfer_config": json.dumps(TIERS)}, [URL, FILES]),
        (SEVERAL, [URL, FILES]),
        ({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, None),
        (7, None),
        ({"kv_transfer_config": "{"}, None),
        (HANDOVER, None),
    ],
    ids=str,
)
def test_the_backends_of_a_configuration_are_found(
    tmp_path: Path, content: Any, expected: list[Any] | None
) -> None:
    path = write(tmp_path / "a.json", content)
    if expected:
        assert read_backends(path) == expected
    else:
        with pytest.raises(InvalidArgumentError, match=r"a\.json"):
            read_backends(path)


def test_the_backends_of_the_environment_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_backends() == []
    urls = [URL, "file:///var/cache/kv?capacity=1GiB"]
    monkeypatch.setenv("KVXFER_BACKEND", " ".join(urls))
    assert environment_backends() == urls
    ours = {"kv_connector": "KVXferOffload", "kv_role": "kv_both"}
    assert read_backends(write(tmp_path / "a.json", ours)) == urls
    explicit = {**ours, "kv_connector_extra_config": {"backend": "host://"}}
    assert read_backends(write(tmp_path / "a.json", explicit)) == ["host://"]


def test_a_store_is_compared_by_its_namespace_that_is_nearest(tmp_path: Path) -> None:
    store, other = Store(tmp_path / "store"), Store(tmp_path / "other")
    first, second = store.fill(num_blocks=1), store.fill(model="another", num_blocks=1)
    assert second == other.fill(model="another", num_blocks=1)
    url = f"file://{store.root}"
    expect(one(url, str(other.root)), OK)
    finding = one(f"{store.root}/{first.fingerprint}", f"file://{other.root}")
    assert finding.subject == "model"
    expect(finding, ERROR, "'example/model' in", "'another' in")
    near = msgspec.structs.replace(first, revision="later")
    finding = one(url, write(tmp_path / "near.json", near))
    assert finding.subject == "revision"
    expect(finding, ERROR, f"{url}/{first.fingerprint}")


@pytest.mark.processes
def test_peers_are_compared_with_each_other_and_with_descriptions(tmp_path: Path) -> None:
    ours, theirs = (
        write(tmp_path / f"{number}.json", peers.namespace(f"example/{name}"))
        for number, name in enumerate(("model", "other"))
    )
    small = "--capacity", "1MiB", "--namespace"
    with serving(*small, ours) as first, serving(*small, theirs) as other:
        urls = [f"nixl://{peer.endpoint}" for peer in (first, other)]
        expect(one(urls[0], ours), OK)
        for finding in (one(*urls), one(urls[0], theirs)):
            assert finding.subject == "model"
            expect(finding, ERROR, f"'example/model' in {urls[0]}, 'example/other' in ")
    finding = one(urls[0], ours)
    assert finding.check == "peer"
    expect(finding, ERROR)


@pytest.mark.processes
def test_without_vllm_a_configuration_cannot_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no vLLM here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    given = write(tmp_path / "a.json", {"model": "m", "kv_transfer_config": HANDOVER})
    assert is_comparable(given)
    with pytest.raises(InvalidArgumentError, match=r"a\.json.*vLLM"):
        compare([given, given], timeout_s=TIMEOUT_S)


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="needs vLLM")
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
    known = ("model", "revision", "dtype", "quantization", "config_hash", *BRIDGED, *OF_KEYS)
    told = f"tiers: both of {str(model)!r}, and equal in {', '.join(known)}; "
    unknown = "not known before an engine runs: groups .the layers and the layout"
    expect(one(ours, tiers), OK, told, unknown)
    finding = one(ours, engine_with("half", HANDOVER, dtype="bfloat16"))
    assert finding.subject == "dtype"
    expect(finding, ERROR, "'torch.float32' in")
    # What is handed over is the same, and the blocks of the tiers have other keys.
    other = engine_with("other", both, block_size=32, prefix_caching_hash_algo="sha256_cbor")
    findings = compare([ours, other], timeout_s=TIMEOUT_S)
    subjects = [(finding.severity, finding.subject) for finding in findings]
    assert sorted(subjects[:-1]) == [(Severity.ERROR, name) for name in sorted(OF_KEYS)]
    assert "hand-over: one namespace" in findings[-1].found
    assert "32 in" in findings[0].found
    with pytest.raises(InvalidArgumentError, match=r"wrong\.json.*dtype"):
        compare([engine_with("wrong", TIERS, dtype="float33"), tiers], timeout_s=TIMEOUT_S)

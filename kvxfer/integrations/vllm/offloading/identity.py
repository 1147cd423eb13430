"""Identity of a vLLM model: the namespace of chunks that outlive an engine."""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from kvxfer.backends.host.segment import HEADER_BYTES, SharedSegment
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.cpu_packing import cpu_kernels
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConfig,
    current_platform,
    group_ids,
    host_layout,
    installed_version,
    layout_name,
)
from kvxfer.integrations.vllm.offloading.worker_pages import WorkerPages
from kvxfer.storage.keys import GroupIdentity, Namespace

VOLATILE_FIELDS = ("_name_or_path", "_commit_hash", "transformers_version")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SEGMENT_BYTES = HEADER_BYTES + (256 << 10)
SEGMENT_HEADER = b"kvxfer worker identity 1"


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Identity of a model, beyond `OffloadingConfig`: properties that change the cache's values.

    Attributes:
        revision: Revision of the weights.
        quantization: Quantization of weights and cache.
        config_hash: XXH3 of all other properties that change values: configuration of the model
            (RoPE, windows), attention backend, draft model.
    """

    revision: str
    quantization: str = ""
    config_hash: str = ""


def identify_model(vllm_config: Any) -> ModelIdentity:
    """Identify the model of an engine.

    Args:
        vllm_config: A `vllm.config.VllmConfig`.

    Raises:
        InvalidArgumentError: The revision of the weights is unknown, or adapters are loaded.
    """
    if vllm_config.lora_config is not None:
        rule = "an engine without LoRA, whose keys name an adapter's folder and not its weights"
        raise InvalidArgumentError("backend", "a tier below host memory", rule)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = _describe(model) | {
        "cache": [
            str(cache.cache_dtype),
            list(cache.kv_cache_dtype_skip_layers),
            str(cache.mamba_cache_dtype),
            str(cache.mamba_ssm_cache_dtype),
            str(cache.mamba_cache_mode),
        ],
        "attention": str(vllm_config.attention_config),
        "load_format": str(vllm_config.load_config.load_format),
    }
    if draft := getattr(vllm_config.speculative_config, "draft_model_config", None):
        facts["draft"] = [_find_revision(draft), _describe(draft)]
    return ModelIdentity(
        revision=_find_revision(model),
        quantization=f"weights {model.quantization}, cache {cache.cache_dtype}",
        config_hash=_hash(json.dumps(facts, sort_keys=True, default=str)),
    )


def row_namespace(
    config: OffloadingConfig, identity: ModelIdentity, *, row_size_bytes: int
) -> Namespace:
    """Make the namespace of rows of host memory: the chunks of all workers under one key.

    vLLM's release is part of it, because the layout of an attention backend's page is not
    exposed and has changed between releases.
    """
    known = {
        group_id: GroupIdentity(
            page_sizes_bytes=(row_size_bytes,),
            layer_names=group.layer_names,
            spec=f"{config.cache.blocks_per_chunk} blocks of {group.tokens_per_block} tokens",
        )
        for group_id, group in zip(group_ids(config), config.groups, strict=True)
    }
    unused = GroupIdentity(page_sizes_bytes=(row_size_bytes,), spec="not offloaded")
    parallel = config.parallel
    is_cpu = current_platform.is_cpu()
    return Namespace(
        model=config.model.name,
        revision=identity.revision,
        dtype=config.model.dtype,
        quantization=identity.quantization,
        config_hash=identity.config_hash,
        layout=f"{layout_name(config)} of vLLM {installed_version()}",
        groups=tuple(known.get(group, unused) for group in range(max(known) + 1)),
        parallel={
            "world_size": parallel.world_size,
            "tp_size": parallel.tp_size,
            "pp_size": parallel.pp_size,
            "pcp_size": parallel.pcp_size,
            "dcp_size": parallel.dcp_size,
            "bytes_per_block": config.worker_kv_bytes_per_block,
            **host_layout(config),
        },
        instruction_set=cpu_kernels() if is_cpu else current_platform.device_name,
    )


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one worker's model and pages, sent to the scheduler, which vLLM does not tell.

    Attributes:
        model: Identity of its model.
        pages: Description of its blocks' bytes.
    """

    model: ModelIdentity
    pages: WorkerPages


def publish_identity(name: str, rank: int, identity: WorkerIdentity) -> SharedSegment:
    """Publish an identity in shared memory for the scheduler; closed when the engine ends.

    vLLM gives the model's configuration to its workers, but not to the scheduler's spec.
    """
    segment = SharedSegment(f"{name}-worker-{rank}", SEGMENT_HEADER, SEGMENT_BYTES)
    encoded = zlib.compress(msgspec.json.encode(identity, enc_hook=str))
    segment.memory[HEADER_BYTES : HEADER_BYTES + len(encoded)] = list(encoded)
    return segment


def receive_identities(name: str, num_workers: int) -> list[WorkerIdentity]:
    """Read the identities that all workers published, by rank.

    Raises:
        InvalidArgumentError: A worker published nothing.
    """
    return [_receive_identity(name, rank) for rank in range(num_workers)]


def _receive_identity(name: str, rank: int) -> WorkerIdentity:
    segment = SharedSegment(f"{name}-worker-{rank}", SEGMENT_HEADER, SEGMENT_BYTES)
    try:
        encoded = segment.memory[HEADER_BYTES:].tobytes()
    finally:
        segment.close()
    if not any(encoded):
        rule = "workers that published their model's identity; use host:// alone"
        raise InvalidArgumentError("backend", "a tier below host memory", rule)
    text = zlib.decompressobj().decompress(encoded)
    return msgspec.json.decode(text, type=WorkerIdentity, dec_hook=_decode_dtype)


def _decode_dtype(kind: type, value: Any) -> Any:
    assert kind is torch.dtype
    return getattr(torch, value.removeprefix("torch."))


def _describe(model: Any) -> dict[str, Any]:
    """Collect the parts of a model's configuration that change its values."""
    config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in VOLATILE_FIELDS
    }
    facts = {
        "config": config,
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), str(model.quantization_config)],
        "implementation": [str(model.model_impl), str(model.model_class_overrides)],
        "sliding_window_off": bool(model.disable_sliding_window),
    }
    if "longrope" in json.dumps(config, default=str):
        facts["max_model_len"] = model.max_model_len  # long or short factors depend on it
    return facts


def _find_revision(model: Any) -> str:
    """Find the revision of the weights: a commit, the `revision` of the caller, or a file hash.

    The files of a local folder are hashed by size and time, not by content, which would read the
    whole model again. So a copy of the folder is another revision, unless `revision` is given.
    """
    path = Path(model.model_weights or model.model)
    if not path.exists():
        revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    else:
        revision = model.revision or _hash_files(path)
    if not revision:
        rule = f"a revision of the weights at {str(path)!r}, which has no commit or weight file"
        raise InvalidArgumentError("revision", revision, rule)
    return str(revision)


def _hash_files(path: Path) -> str:
    files = [path] if path.is_file() else sorted(path.iterdir())
    weights = [file for file in files if file.name.endswith(WEIGHT_SUFFIXES)]
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    return _hash(json.dumps(stats)) if stats else ""


def _hash(text: str) -> str:
    return xxhash.xxh3_128_hexdigest(text.encode())

"""Identity of a vLLM model: the namespace of chunks that outlive an engine."""

import zlib

import msgspec
import torch

from kvxfer.backends.host.memory import HEADER_BYTES, SharedSegment
from kvxfer.errors import InvalidArgumentError
from kvxfer.integrations.vllm.common.release import installed_version
from kvxfer.integrations.vllm.common.worker_pages import WorkerPages, platform_kernels
from kvxfer.integrations.vllm.offloading.interface import (
    OffloadingConfig,
    group_ids,
    host_layout,
    layout_name,
)
from kvxfer.storage.keys import GroupIdentity, Namespace

SEGMENT_BYTES = HEADER_BYTES + (256 << 10)
SEGMENT_HEADER = b"kvxfer worker identity 1"


def row_namespace(config: OffloadingConfig, model: Namespace, *, row_size_bytes: int) -> Namespace:
    """Make the namespace of rows of host memory: the chunks of all workers under one key.

    `model` is that of `identify_model`, or has a revision alone.

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
    return msgspec.structs.replace(
        model,
        model=config.model.name,
        dtype=config.model.dtype,
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
        instruction_set=platform_kernels(),
    )


class WorkerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one worker's model and pages, sent to the scheduler, which vLLM does not tell."""

    model: Namespace  # as `identify_model` makes it
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
    received = []
    for rank in range(num_workers):
        segment = SharedSegment(f"{name}-worker-{rank}", SEGMENT_HEADER, SEGMENT_BYTES)
        try:
            encoded = segment.memory[HEADER_BYTES:].tobytes()
        finally:
            segment.close()
        if not any(encoded):
            rule = "workers that published their model's identity; use host:// alone"
            raise InvalidArgumentError("backend", "a tier below host memory", rule)
        text = zlib.decompressobj().decompress(encoded)
        received.append(msgspec.json.decode(text, type=WorkerIdentity, dec_hook=_decode_dtype))
    return received


def _decode_dtype(_: type, value: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value.removeprefix("torch."))
    return dtype

"""Regions of registered memory on several devices, and what a peer may say of its own."""

import msgspec
import numpy as np
import pytest
import torch

from kvxfer.backends.nixl.wire.messages import Extents, Reach, Region
from kvxfer.backends.nixl.wire.regions import AgentMetadata, Regions
from kvxfer.errors import InvalidArgumentError
from kvxfer.kvcache.memory_region import HOST, MemoryRegion

GPU, OTHER_GPU = (torch.device("cuda", index) for index in (0, 1))
BYTES = 100
DEVICES = [OTHER_GPU, HOST, GPU]
STARTS = [3 * BYTES, BYTES, 5 * BYTES]


@pytest.fixture
def regions() -> Regions:
    pairs = zip(STARTS, DEVICES, strict=True)
    return Regions().extend(MemoryRegion(start, BYTES, None, device) for start, device in pairs)


def extents(*indices: int) -> Extents:
    count = len(indices)
    return Extents(
        regions=np.array(indices, np.uint32).tobytes(),
        offsets=np.full(count, 7, np.uint64).tobytes(),
        lengths=np.full(count, 5, np.uint64).tobytes(),
        block_offsets=np.arange(count + 1).tobytes(),
    )


@pytest.mark.parametrize("index", range(3))
def test_extents_of_one_device_become_descriptors_of_it_and_extents_again(
    regions: Regions, index: int
) -> None:
    blocks = regions.resolve(extents(index, index))
    assert blocks.device == DEVICES[index]
    assert blocks.addresses.tolist() == [STARTS[index] + 7] * 2
    assert regions.contains(blocks)
    assert regions.locate(blocks) == extents(index, index)


def test_extents_of_several_devices_in_one_request_are_refused(regions: Regions) -> None:
    with pytest.raises(InvalidArgumentError, match="'cuda:1, cuda:0'; expected one"):
        regions.resolve(extents(2, 0))


def test_extents_whose_sum_wraps_are_refused() -> None:
    whole = Regions([(BYTES, (1 << 63) - BYTES)])
    half = 1 << 62
    wrapping = Extents(
        regions=np.zeros(4, "<u4").tobytes(),
        offsets=np.zeros(4, "<u8").tobytes(),
        lengths=np.array([half, half, half, half + 4096], "<u8").tobytes(),
        block_offsets=np.array([0, 4], "<i8").tobytes(),
    )
    with pytest.raises(InvalidArgumentError, match="fewer bytes in all"):
        whole.resolve(wrapping)


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:128", "cuda:0 ", "meta", "", "CPU"]
)
def test_a_device_that_is_neither_the_host_nor_a_gpu_is_refused_by_name(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match="device of a region") as caught:
        Regions([Region(BYTES, BYTES), Region(3 * BYTES, BYTES, device)])
    assert caught.value.value == device


def test_devices_travel_with_regions_and_host_memory_needs_none(regions: Regions) -> None:
    sent = msgspec.msgpack.encode(Reach(regions=list(regions)))
    assert Regions(msgspec.msgpack.decode(sent, type=Reach).regions).devices == regions.devices
    metadata = AgentMetadata("name", list(regions))
    assert AgentMetadata.decode(metadata.encode()).regions == list(regions)
    without = msgspec.msgpack.encode(["name", [[BYTES, BYTES]], b"", 0, b""])
    assert AgentMetadata.decode(without).regions == [Region(BYTES, BYTES, "cpu")]
    for wrong in ([BYTES, BYTES, 0], [BYTES], [BYTES, BYTES, "cpu", 1]):
        with pytest.raises(InvalidArgumentError, match="metadata"):
            AgentMetadata.decode(msgspec.msgpack.encode(["name", [wrong], b"", 0, b""]))

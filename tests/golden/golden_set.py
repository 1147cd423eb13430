"""A golden set: what one release wrote on disk and on the wire, which later ones have to read.

Everything in it is always the same, but for the salts of sealed blocks.
"""

import asyncio
import functools
import hashlib
import json
import shutil
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from obstore.store import MemoryStore

from kvxfer.backends.file import FileBackend, FileConfig, Integrity
from kvxfer.backends.nixl import Announcement
from kvxfer.backends.nixl.wire import frames, handshake
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.object import ObjectBackend
from kvxfer.backends.pool import messages as pool
from kvxfer.kvcache import WorkerShard
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.page_box import Digit, PageBox
from kvxfer.kvcache.portable.cache_description import CacheDescription, GroupDescription
from kvxfer.storage import (
    Backend,
    BlockKey,
    GroupIdentity,
    Namespace,
    PromptKeys,
    Status,
    StoredTensor,
    make_block_key,
)
from kvxfer.storage.backend import DONE, PAUSED
from kvxfer.storage.observer import (
    Added,
    Ended,
    Late,
    LookedUp,
    Moved,
    NotLoaded,
    NotWrittenBack,
    Operation,
    Removal,
    Removed,
    Requested,
    Skipped,
)
from kvxfer.telemetry import journal_file as journal
from kvxfer.testing import BlockMemory
from kvxfer.testing.payloads import read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.backends.object_memory import MemoryConfig

RECORDS = "records.json"
JOURNAL = "golden-1.000000.journal"
SECRET = b"the secret of the golden sets".ljust(32)
INTEGRITIES = (Integrity.FAST, Integrity.KEYED, Integrity.SEALED)
OF_OBJECTS = (Integrity.FAST, Integrity.SEALED)

KEYS = [make_block_key(f"golden-{number}".encode() * 2) for number in range(3)]
KEY = KEYS[0]
OF_GROUP_1 = make_block_key(b"golden-3" * 2, 1)
ENDPOINT = b"10.0.0.7:7000"
WORDS = bytes(range(16))
NAMESPACES = [
    Namespace(model="example/model"),
    Namespace(
        model="example/model",
        revision="8d1c8a2",
        dtype="bfloat16",
        quantization="fp8",
        config_hash="0123456789abcdef",
        layout="NHD",
        groups=(
            GroupIdentity(
                page_sizes_bytes=(64, 64), layer_names=("a", "b"), layouts=("kv", "kv"), spec="full"
            ),
            GroupIdentity(
                page_sizes_bytes=(128,),
                tensors=(
                    StoredTensor(name="k", dtype="BF16", shape=(2, 32)),
                    StoredTensor(name="v", dtype="BF16", shape=(2, 32)),
                ),
            ),
        ),
        blocks_per_chunk=2,
        parallel={"tp_size": 2, "rank": 1},
        instruction_set="amx",
    ),
]


def make_memory() -> BlockMemory:
    """Make the memory of the blocks: two groups, and two blocks in each chunk."""
    return BlockMemory([[300, 7], [64]], num_blocks=8, blocks_per_chunk=2)


def batches(memory: BlockMemory) -> Iterator[tuple[list[BlockKey], Descriptors]]:
    """List the blocks: whole chunks, one without its head, and one of another group."""
    yield KEYS[:2], memory.describe(0, [0, 1, 2, 3])
    yield KEYS[2:], memory.describe(0, [4], first_block_index=1)
    yield [OF_GROUP_1], memory.describe(1, [4, 5])


def payloads(keys: Sequence[BlockKey], blocks: Descriptors) -> list[bytes]:
    """Make up the bytes of blocks."""
    sizes = zip(keys, blocks.block_sizes.tolist(), strict=True)
    return [hashlib.shake_128(key).digest(size) for key, size in sizes]


async def store_all(open_backend: Callable[[], Backend]) -> None:
    """Open a backend, store every block, and close it."""
    memory = make_memory()
    async with open_backend() as backend:
        for keys, blocks in batches(memory):
            write_payloads(blocks, payloads(keys, blocks))
            assert all(outcome.done for outcome in await backend.store(keys, blocks))


async def load_all(backend: Backend) -> list[Status]:
    """Load every block, and check its bytes."""
    memory, statuses = make_memory(), []
    for keys, blocks in batches(memory):
        outcomes = await backend.load(keys, blocks)
        loaded = read_payloads(blocks)
        for outcome, data, expected in zip(outcomes, loaded, payloads(keys, blocks), strict=True):
            assert not outcome.done or data == expected
            statuses.append(outcome.status)
    return statuses


def open_folder(root: Path, integrity: Integrity) -> FileBackend:
    """Open the store in a folder."""
    config = FileConfig(
        path=str(root),
        capacity=ByteSize(1 << 30),
        min_free=ByteSize(1),
        **_integrity_of(root, integrity),
    )
    return FileBackend(config, make_memory().namespace(revision="r"))


def open_bucket(store: MemoryStore, folder: Path, integrity: Integrity) -> ObjectBackend:
    """Open a bucket in memory; its secret is put beside a folder."""
    config = MemoryConfig(address="memory", **_integrity_of(folder, integrity))
    backend = ObjectBackend(config, make_memory().namespace(revision="r"))
    backend._bucket._store = store
    return backend


def _integrity_of(root: Path, integrity: Integrity) -> dict[str, Any]:
    if integrity is Integrity.FAST:
        return {}
    secret = root.with_name("secret")
    secret.touch(0o600)
    secret.write_bytes(SECRET)
    return {"integrity": integrity, "secret_file": str(secret)}


EXTENTS = wire.Extents(regions=WORDS[:4], offsets=WORDS[:8], lengths=WORDS[8:], block_offsets=WORDS)
FENCES = wire.Fencing(extents=EXTENTS, generations=WORDS[:8])
FOUND = wire.Found(request_id=1, there=[True], starts=[0], checksums=[7], extents=EXTENTS)
HANDSHAKE: list[wire.Message] = [
    wire.Hello(
        version=wire.PROTOCOL_VERSION,
        oldest_version=wire.OLDEST_VERSION,
        incarnation=WORDS,
        namespace=NAMESPACES[1],
        nonce=bytes(32),
        boot_id="boot",
        pid=7,
        pid_namespace="pid:[1]",
    ),
    wire.Proof(mac=bytes(range(32))),
    wire.Reach(metadata=b"agent", regions=[wire.Region(4096, 8192, "cuda:0")], data_port=7001),
    wire.Ready(needs_data=True),
    wire.Refusal(field="version", ours="6", theirs="3"),
    wire.Attach(session=bytes(32), serial=1, reads=True, mac=bytes(range(32))),
]
REQUESTS: list[wire.Message] = [
    wire.Lookup(request_id=1, let_go=[0], keys=KEYS, places=True, fenced=True),
    wire.Pin(request_id=2, keys=[KEY], starts=[0], sizes=[614], fenced=True),
    wire.Pull(request_id=3, keys=[KEY], starts=[0], extents=EXTENTS, hashed=True),
    wire.Publish(request_id=4, pull=3, checksums=[1 << 63]),
    wire.Cancel(request_id=5),
    wire.Delete(request_id=6, keys=[KEY]),
    wire.Ping(request_id=7, let_go=[1, 2]),
    wire.Describe(request_id=8),
    wire.Hold(request_id=9, ticket="ticket", keys=[KEY]),
    wire.Hold(request_id=10, ticket="ticket", keys=[KEY], places=True, fenced=True),
    wire.Release(request_id=11, tickets=["ticket", "another"]),
]
ANSWERS: list[wire.Message] = [
    FOUND,
    wire.Found(request_id=1, there=[True, False], starts=[0], extents=EXTENTS, fences=FENCES),
    wire.Pinned(
        request_id=2,
        endings=[wire.Ending(Status.DONE), wire.Ending(Status.MISSING, "evicted")],
        checksums=[7],
        extents=EXTENTS,
        fences=FENCES,
    ),
    wire.Pulled(request_id=3, endings=[wire.Ending(Status.DONE)], waits=True),
    wire.Deleted(request_id=6, deleted=[True]),
    wire.Pong(request_id=7),
    wire.Described(request_id=8, description=b"description"),
    wire.HeldTicket(request_id=9, is_known=True, is_complete=False, there=[True]),
    wire.HeldTicket(request_id=10, is_known=True, is_complete=True, there=[True], found=FOUND),
    wire.Released(request_id=11),
    wire.Failed(request_id=12, reason="no room"),
]
ON_DATA: list[wire.Message] = [
    wire.Read(addresses=WORDS[:8], lengths=WORDS[8:]),
    wire.Reading(),
    wire.Reading(refusal="not registered"),
]
CONVERSATIONS: dict[str, tuple[list[wire.Message], Any, int | None]] = {
    "handshake": (HANDSHAKE, wire.Handshake, None),
    "requests": (REQUESTS, wire.Request, 0),
    "answers": (ANSWERS, wire.Answer, 0),
    "data": (ON_DATA, wire.Read | wire.Reading, 1),
}
"""Messages of NIXL peers: samples, the type of all that are legal there, and the number of the
connection, whose keys seal the frames."""

POOL: list[pool.Message] = [
    pool.Hello(version=pool.PROTOCOL_VERSION, namespace=NAMESPACES[1]),
    pool.Welcome(num_slots=4, part_size_bytes=4096, integrity="fast"),
    pool.Refusal(field="protocol_version", ours="1", theirs="2"),
    pool.Lookup(keys=KEYS, within_s=0.5),
    pool.Found(there=[True, False, True]),
    pool.Pin(keys=[KEY], within_s=0.5),
    pool.Pinned(rows=[0], slots=[3]),
    pool.Unpin(keys=[KEY], corrupt={KEY: (3, "checksum differs")}),
    pool.Reserve(number=1, keys=[KEY], starts=[0], sizes=[614]),
    pool.Reserved(rows=[0], slots=[3], busy=[1], refused={2: "no room"}),
    pool.Publish(number=1, checksums=[7]),
    pool.Delete(keys=[KEY]),
    pool.Done(done=[True]),
    pool.Failed(reason="closed"),
    pool.Bye(),
]
OF_POOL = pool.Hello | pool.Welcome | pool.Refusal | pool.Request | pool.Answer

DESCRIPTION = CacheDescription(
    shard=WorkerShard(num_kv_heads=8, rank=1, tp_size=2),
    groups=(
        GroupDescription(
            tokens_per_block=4,
            payload_size_bytes=128,
            boxes=(
                PageBox(
                    layer_name="layers.0",
                    part="k",
                    dtype=torch.bfloat16,
                    digits=(Digit("token", 4, 16), Digit("head", 4, 4), Digit("dim", 2, 2)),
                ),
            ),
        ),
        GroupDescription(tokens_per_block=4, payload_size_bytes=64, opaque="vLLM 0.32.0, HND"),
    ),
)
ANNOUNCEMENT = Announcement(capacity=1 << 30, namespace="0" * 32, started=1.5, version="0.1.0")
JOURNALED: list[journal.Record] = [
    journal.Began(journal.VERSION, 1.5, "golden-1", 0),
    journal.Source(0, "engine", NAMESPACES[1], ("host", "file")),
    *(
        journal.Noted(2.5, 0, type(event).__name__, event)
        for event in (
            Moved("file", Operation.STORE, KEYS, [DONE], {Status.DONE: 8}, 0.5),
            LookedUp(KEYS, ["file"] * len(KEYS), 0.5),
            Added("file", KEYS),
            Removed("file", KEYS, Removal.EVICTED),
            Late("file", Operation.LOOKUP, KEYS),
            Skipped("file", Operation.STORE, KEYS),
            NotLoaded("file", KEYS),
            NotWrittenBack("file", KEYS),
            Ended(Operation.LOAD, KEYS, [PAUSED], 8, 0.5, 0.25),
            Requested("cmpl-1", KEYS, ["file"] * len(KEYS), "reason"),
        )
    ),
    journal.Lost(4.5, 3),
]


def codec(role: handshake.Role, serial: int | None) -> frames.FrameCodec:
    """Make one side of a connection; without a number, of one that is not sealed yet."""
    made = frames.FrameCodec("golden")
    if serial is not None:
        session = handshake.Session(role, session_id=bytes(32), key=SECRET)
        made.secure(session.frame_keys(serial))
    return made


def values_of(thing: object) -> Any:
    """Values of a message or record, as JSON has them."""
    return msgspec.to_builtins(thing, str_keys=True, enc_hook=str)


def make_records() -> dict[str, Any]:
    """Make everything of a set that is no file of its own."""
    return {
        "nixl": {
            "version": wire.PROTOCOL_VERSION,
            **{
                name: _told(samples, codec(handshake.Role.ASKING, serial).encode)
                for name, (samples, _, serial) in CONVERSATIONS.items()
            },
        },
        "pool": {"version": pool.PROTOCOL_VERSION, "messages": _told(POOL, pool.encode)},
        "namespaces": {each.fingerprint: values_of(each) for each in NAMESPACES},
        "prompt_keys": prompt_keys(),
        "description": _told([DESCRIPTION], CacheDescription.encode),
        "announcement": _told([ANNOUNCEMENT], Announcement.encode),
    }


def prompt_keys() -> list[str]:
    """Make keys of a prompt's blocks, and of a state."""
    prompt = PromptKeys(range(40), scope=b"scope")
    return [key.hex() for key in (*prompt.block_keys(1, 16, 40), prompt.state_key(0, 7))]


def _told(samples: Sequence[Any], encode: Any) -> list[dict[str, Any]]:
    return [
        {"name": type(each).__name__, "bytes": bytes(encode(each)).hex(), "values": values_of(each)}
        for each in samples
    ]


def classes_of(union: Any) -> set[type]:
    """Classes of a union of messages."""
    return {union} if isinstance(union, type) else set(typing.get_args(union))


def write_set(folder: Path, secrets: Path) -> None:
    """Write a golden set into a folder, which must not be there yet; secrets go into another."""
    folder.mkdir(parents=True)
    (folder / RECORDS).write_text(json.dumps(make_records(), indent=1) + "\n")
    (folder / "journal").mkdir()
    lines = [journal.encode_record(record) for record in JOURNALED]
    (folder / "journal" / JOURNAL).write_bytes(b"".join(lines))
    for integrity in INTEGRITIES:
        root = secrets / integrity.value
        asyncio.run(store_all(functools.partial(open_folder, root, integrity)))
        shutil.move(root, folder / integrity.value)
    for integrity in OF_OBJECTS:
        bucket = MemoryStore()
        asyncio.run(store_all(functools.partial(open_bucket, bucket, secrets / "-", integrity)))
        for batch in bucket.list():
            for found in batch:
                path = folder / f"{integrity.value}-objects" / found["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(bucket.get(found["path"]).bytes()))


def read_bucket(folder: Path) -> MemoryStore:
    """Read the objects of a set."""
    bucket = MemoryStore()
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return bucket

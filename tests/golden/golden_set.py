"""Golden set: data that one release wrote to disk and to the wire, which later ones must read.

Except for the salts of sealed blocks, everything in it is reproducible.
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
from obstore.store import MemoryStore

from kvxfer.backends.file import FileBackend, FileConfig, Integrity
from kvxfer.backends.nixl import Announcement
from kvxfer.backends.nixl.discovery import decode_announcement
from kvxfer.backends.nixl.wire import frames, handshake
from kvxfer.backends.nixl.wire import messages as wire
from kvxfer.backends.object import ObjectBackend
from kvxfer.backends.pool import messages as pool
from kvxfer.kvcache.descriptors import Descriptors
from kvxfer.kvcache.portable.cache_description import CacheDescription
from kvxfer.storage import Backend, BlockKey, Namespace, PromptKeys, make_block_key, observer
from kvxfer.storage.backend import DONE, PAUSED, Status
from kvxfer.telemetry import journal
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
FOLDER = Path(__file__).parent
SETS = sorted(path.parent for path in FOLDER.glob(f"*/{RECORDS}"))
NEWEST: dict[str, Any] = max(
    (json.loads((folder / RECORDS).read_text()) for folder in SETS),
    key=lambda records: (records["nixl"]["version"], records["pool"]["version"]),
)
"""Records of the set with the newest messages, whose samples the next set repeats."""

NAMESPACES = [msgspec.convert(values, Namespace) for values in NEWEST["namespaces"].values()]


def make_memory() -> BlockMemory:
    """Make the memory of the blocks: two groups, and two blocks in each chunk."""
    return BlockMemory([[300, 7], [64]], num_blocks=8, blocks_per_chunk=2)


def batches(memory: BlockMemory) -> Iterator[tuple[list[BlockKey], Descriptors]]:
    """List the blocks: whole chunks, one without its head, and one of another group."""
    yield KEYS[:2], memory.describe(0, [0, 1, 2, 3])
    yield KEYS[2:], memory.describe(0, [4], first_block_index=1)
    yield [OF_GROUP_1], memory.describe(1, [4, 5])


def payloads(keys: Sequence[BlockKey], blocks: Descriptors) -> list[bytes]:
    sizes = zip(keys, blocks.block_sizes.tolist(), strict=True)
    return [hashlib.shake_128(key).digest(size) for key, size in sizes]


async def store_all(open_backend: Callable[[], Backend]) -> None:
    memory = make_memory()
    async with open_backend() as backend:
        for keys, blocks in batches(memory):
            write_payloads(blocks, payloads(keys, blocks))
            assert all(outcome.done for outcome in await backend.store(keys, blocks))


async def load_all(backend: Backend) -> list[Status]:
    memory, statuses = make_memory(), []
    for keys, blocks in batches(memory):
        outcomes = await backend.load(keys, blocks)
        loaded = read_payloads(blocks)
        for outcome, data, expected in zip(outcomes, loaded, payloads(keys, blocks), strict=True):
            assert not outcome.done or data == expected
            statuses.append(outcome.status)
    return statuses


def open_folder(root: Path, integrity: Integrity) -> FileBackend:
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


CONVERSATIONS: dict[str, tuple[Any, int | None]] = {
    "handshake": (
        wire.Hello | wire.Proof | wire.Reach | wire.Ready | wire.Refusal | wire.Attach,
        None,
    ),
    "requests": (wire.Request, 0),
    "answers": (wire.Answer, 0),
    "data": (wire.Read | wire.Reading, 1),
}
"""Conversations of NIXL peers: the type of legal messages, and the number of the connection whose
keys seal the frames."""

OF_POOL = pool.Hello | pool.Welcome | pool.Refusal | pool.Request | pool.Answer
ADDED: dict[str, list[Any]] = {}
"""Samples of messages that are in no set yet, by conversation or `pool`."""

JOURNALED: list[journal.Record] = [
    journal.Began(journal.VERSION, 1.5, "golden-1", 0),
    journal.Source(0, "engine", NAMESPACES[1], ("host", "file")),
    *(
        journal.Noted(2.5, 0, type(event).__name__, event)
        for event in (
            observer.Moved("file", observer.Operation.STORE, KEYS, [DONE], {Status.DONE: 8}, 0.5),
            observer.LookedUp(KEYS, ["file"] * len(KEYS), 0.5),
            observer.Added("file", KEYS),
            observer.Removed("file", KEYS, observer.Removal.EVICTED),
            observer.Late("file", observer.Operation.LOOKUP, KEYS),
            observer.Skipped("file", observer.Operation.STORE, KEYS),
            observer.NotLoaded("file", KEYS),
            observer.NotWrittenBack("file", KEYS),
            observer.Ended(observer.Operation.LOAD, KEYS, [PAUSED], 8, 0.5, 0.25),
            observer.Requested("cmpl-1", KEYS, ["file"] * len(KEYS), "reason"),
        )
    ),
    journal.Lost(4.5, 3),
]


def codec(role: handshake.Role, serial: int | None) -> frames.FrameCodec:
    """Make one side of a connection; without a number, it is not sealed yet."""
    made = frames.FrameCodec("golden")
    if serial is not None:
        session = handshake.Session(role, session_id=bytes(32), key=SECRET)
        made.secure(session.frame_keys(serial))
    return made


def values_of(thing: object) -> Any:
    return msgspec.to_builtins(thing, str_keys=True, enc_hook=str)


def read_frames(records: dict[str, Any], name: str) -> list[Any]:
    """Read the messages of a conversation of peers."""
    legal, serial = CONVERSATIONS[name]
    reader = codec(handshake.Role.SERVING, serial)
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(legal)
    messages = []
    for told in records["nixl"][name]:
        frame = bytes.fromhex(told["bytes"])
        body = frame[frames.HEADER_BYTES :]
        assert reader.body_size(frame[: frames.HEADER_BYTES]) == len(body)
        messages.append(reader.decode(reader.open(body), decoder))
    return messages


def read_pool(records: dict[str, Any]) -> list[Any]:
    """Read the messages of host pools, which have to be of this version: others are refused."""
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(OF_POOL)
    if records["pool"]["version"] != pool.PROTOCOL_VERSION:
        return []
    messages = []
    for told in records["pool"]["messages"]:
        frame = bytes.fromhex(told["bytes"])
        size = pool.HEADER.size
        assert pool.body_bytes(frame[:size]) == len(frame) - size
        messages.append(decoder.decode(frame[size:]))
    return messages


def read_description(records: dict[str, Any]) -> CacheDescription:
    [told] = records["description"]
    return CacheDescription.decode(bytes.fromhex(told["bytes"]))


def read_announcement(records: dict[str, Any]) -> Announcement:
    [told] = records["announcement"]
    return decode_announcement(ENDPOINT, bytes.fromhex(told["bytes"]))[1]


def samples() -> dict[str, list[Any]]:
    """List samples of all messages, by conversation of peers, and of pools."""
    found = {name: read_frames(NEWEST, name) for name in CONVERSATIONS}
    found["pool"] = read_pool(NEWEST)
    return {name: [*each, *ADDED.get(name, [])] for name, each in found.items()}


def make_records() -> dict[str, Any]:
    """Make the records of a set that are not files of their own."""
    told = samples()
    return {
        "nixl": {
            "version": wire.PROTOCOL_VERSION,
            **{
                name: _told(told[name], codec(handshake.Role.ASKING, serial).encode)
                for name, (_, serial) in CONVERSATIONS.items()
            },
        },
        "pool": {"version": pool.PROTOCOL_VERSION, "messages": _told(told["pool"], pool.encode)},
        "namespaces": {each.fingerprint: values_of(each) for each in NAMESPACES},
        "prompt_keys": prompt_keys(),
        "description": _told([read_description(NEWEST)], CacheDescription.encode),
        "announcement": _told([read_announcement(NEWEST)], Announcement.encode),
    }


def prompt_keys() -> list[str]:
    prompt = PromptKeys(range(40), scope=b"scope")
    return [key.hex() for key in (*prompt.block_keys(1, 16, 40), prompt.state_key(0, 7))]


def _told(samples: Sequence[Any], encode: Any) -> list[dict[str, Any]]:
    return [
        {"name": type(each).__name__, "bytes": bytes(encode(each)).hex(), "values": values_of(each)}
        for each in samples
    ]


def classes_of(union: Any) -> set[type]:
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
    bucket = MemoryStore()
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put(path.relative_to(folder).as_posix(), path.read_bytes())
    return bucket

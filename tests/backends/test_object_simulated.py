"""The simulated bucket and real servers of S3 give the same answers to the same requests."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pytest
from obstore.store import ObjectStore, S3Store

from kvxfer.backends.object.request_failure import request_failure
from kvxfer.testing.simulation import Simulation
from tests.backends.object_servers import BUCKET, REGION, ObjectServer, moto, seaweedfs
from tests.ports import free_ports
from tests.simulation.object_storage import BucketFault, SimulatedBucket, SimulatedStore

NAMES = [f"listed/{folder}/{number}" for folder in ("6b", "6c") for number in range(3)]
LIMIT_S = 0.5


def open_simulated(timeout_s: float = 60.0) -> tuple[SimulatedBucket, SimulatedStore]:
    bucket = SimulatedBucket(Simulation(1))
    return bucket, bucket.open_client("tested", timeout_s=timeout_s)[1]


def open_real(endpoint: str, timeout_s: float = 60.0) -> S3Store:
    return S3Store(
        BUCKET,
        endpoint=endpoint,
        region=REGION,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": timedelta(seconds=timeout_s)},
        retry_config={"max_retries": 0},
    )


async def said(request: Awaitable[Any]) -> Any:
    """Return what kvxfer learns from an answer: its content, or the kind of the failure."""
    try:
        answer = await request
    except FileNotFoundError:
        return "none"
    except Exception as exc:  # noqa: BLE001 - the kind is what is compared
        if type(exc).__name__ in ("AlreadyExistsError", "PreconditionError"):
            return "another"
        failed = request_failure("request", exc)
        return (
            failed.outcome.status,
            failed.transient,
            failed.answered,
            failed.denied,
            failed.is_empty,
        )
    if hasattr(answer, "bytes_async"):
        return answer.meta["size"], answer.meta["e_tag"], bytes(await answer.bytes_async())
    if isinstance(answer, dict) and "size" in answer:
        return answer["path"], answer["size"], answer["e_tag"]
    return bytes(answer) if hasattr(answer, "__len__") and not isinstance(answer, dict) else None


def paths(listed: Any) -> list[str]:
    return [each["path"] for each in listed]


async def ask_all(store: Any) -> list[Any]:
    """Make every request that kvxfer makes, in every state of an object."""
    page = b"0123456789"

    async def put(name: str, data: bytes, mode: Any) -> Any:
        return await said(store.put_async(name, data, mode=mode, use_multipart=False))

    name, answers = "pages/6a/page", list[Any]()
    requests: list[Callable[[], Awaitable[Any]]] = [
        lambda: said(store.head_async(name)),
        lambda: said(store.get_async(name)),
        lambda: said(store.get_range_async(name, start=0, end=4)),
        lambda: said(store.copy_async(name, "pages/copy")),
        lambda: put(name, page, {"e_tag": '"0123"'}),
        lambda: put(name, page, "create"),
        lambda: put(name, b"other", "create"),
        lambda: said(store.head_async(name)),
        lambda: said(store.get_async(name)),
        lambda: said(store.get_async(name, options={"range": (0, 4)})),
        lambda: said(store.get_async(name, options={"range": (0, 100)})),
        lambda: said(store.get_range_async(name, start=2, end=4)),
        lambda: said(store.get_range_async(name, start=2, end=100)),
        lambda: said(store.get_range_async(name, start=100, end=101)),
        lambda: put(name, b"other", {"e_tag": '"0123"'}),
        lambda: said(store.copy_async(name, "pages/copy")),
        lambda: said(store.head_async("pages/copy")),
    ]
    answers += [await request() for request in requests]
    version = (await store.head_async(name))["e_tag"]
    answers.append(await put(name, b"other", {"e_tag": version}))
    answers.append(await put(name, b"third", {"e_tag": version}))
    answers.append(await said(store.get_async(name)))
    for each in (name, name, "pages/copy"):
        answers.append(await said(store.delete_async(each)))
    for each in reversed(NAMES):
        await store.put_async(each, page, mode="create", use_multipart=False)
    for prefix in ("listed/6b/", "listed/6", "listed"):
        found = await store.list_with_delimiter_async(prefix)
        answers.append((sorted(found["common_prefixes"]), paths(found["objects"])))
    for prefix, offset in (
        ("listed/", None),
        ("listed/", NAMES[0]),
        ("listed/", "listed/6b/9"),
        ("listed/6c/", None),
        ("nothing/", None),
    ):
        listing = store.list(prefix=prefix, offset=offset, chunk_size=4)
        answers.append([paths(each) for each in await asyncio.to_thread(list, listing)])
    for each in NAMES:
        await store.delete_async(each)
    return answers


@pytest.fixture(params=[seaweedfs, moto], ids=["seaweedfs", "moto"])
def server(request: pytest.FixtureRequest) -> Iterator[ObjectServer]:
    with request.param() as started:
        yield started


@pytest.mark.processes
@pytest.mark.usefixtures("s3_credentials")
async def test_the_simulated_bucket_answers_as_real_servers_do(server: ObjectServer) -> None:
    simulated = await ask_all(open_simulated()[1])
    assert simulated == await ask_all(open_real(server.endpoint))


async def answer_status(status: int, ask: Callable[[ObjectStore], Coroutine[Any, Any, Any]]) -> Any:
    """Ask a server that answers every request with a status; 0 for one that never answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if status:
            writer.write(b"HTTP/1.1 %d Some\r\nContent-Length: 0\r\n\r\n" % status)
        else:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await said(ask(open_real(f"http://127.0.0.1:{port}", LIMIT_S)))


@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (BucketFault.REFUSED, 503),
        (BucketFault.FULL, 507),
        (BucketFault.DENIED, 403),
        (BucketFault.HANG, 0),
        (BucketFault.LOST, None),
    ],
)
async def test_a_request_fails_in_the_simulation_as_a_real_one(
    fault: BucketFault, status: int | None
) -> None:
    def put(store: Any) -> Coroutine[Any, Any, Any]:
        made: Coroutine[Any, Any, Any] = store.put_async(
            "page", memoryview(b"page"), mode="create", use_multipart=False
        )
        return made

    bucket, client = open_simulated(LIMIT_S)
    bucket.begin_fault(fault, 1000.0, 1.0)
    if status is None:
        real = await said(put(open_real(f"http://127.0.0.1:{free_ports()}", LIMIT_S)))
    else:
        real = await answer_status(status, put)
    assert await said(put(client)) == real

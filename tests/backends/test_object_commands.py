"""The commands over a bucket of a real server print the same as over a folder copied from it."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from kvxfer.backends.object import BucketStore, S3Config, bucket_store
from kvxfer.cli import main
from kvxfer.connect import parse_backend
from kvxfer.storage.keys import Namespace
from kvxfer.testing.conformance.suite import make_keys, make_memory, store_generated
from tests.backends.object_servers import READER, Place

pytestmark = pytest.mark.processes

MEMORY = make_memory()
KEYS = make_keys(8)


def fill(place: Place, *, model: str = "example/model", num_blocks: int = 8) -> Namespace:
    namespace = MEMORY.namespace(model=model)

    async def store() -> None:
        async with place.open(namespace) as backend:
            blocks = MEMORY.describe(0, range(num_blocks))
            await store_generated(backend, KEYS[:num_blocks], blocks)

    asyncio.run(store())
    return namespace


Say = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command; return its status and its output in a stable order."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        status = main(arguments)
        printed = capsys.readouterr()
        assert not printed.err, printed.err
        return status, sorted(printed.out.splitlines())

    return run


def plant_damage(place: Place) -> Namespace:
    namespace, other = fill(place), fill(place, model="another", num_blocks=3)
    paths = [place.path(namespace, key) for key in KEYS]
    place.flip(paths[0], -1)
    place.put(paths[1], place.get(paths[1])[:-100])
    place.put(paths[2], b"")
    place.put(paths[3], place.get(place.path(other, KEYS[0])))
    folder, name = paths[4].rsplit("/", 2)[0], paths[4].rsplit("/", 1)[1]
    place.put(f"{folder}/ff/{name}", place.get(paths[4]))
    place.put(f"{folder}/notes.txt", b"mine")
    place.put(f"{folder}/01/weights.safetensors", b"mine")
    place.put(f"{folder}/01/{'01' * 8}-0.safetensors.tmp", b"half a block")
    place.put("readme/notes.txt", b"mine")
    place.put(f"{'0' * 32}/notes.txt", b"mine")
    place.put(f"{'1' * 32}/namespace.json", b"{")
    return namespace


BOUNDS = [[], ["--max-age", "0s"], ["--capacity", "20KiB"], ["--capacity", "1B"]]


def test_commands_tell_of_a_damaged_bucket_and_do_to_it_what_they_do_to_a_copy_in_a_folder(
    place: Place, tmp_path: Path, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = plant_damage(place)
    folder = place.copy_to(tmp_path / "store")
    status, lines = say("fsck", place.url)
    assert (status, lines) == say("fsck", folder)
    assert status == 1
    assert sum(line.startswith("bad: ") for line in lines) == 5
    assert f"{len(KEYS) - 4 + 3} good, 5 bad" in lines
    assert say("ls", place.url, "--json") == say("ls", folder, "--json")
    assert sorted(say("ls", place.url, "--keys")[1]) == sorted(say("ls", folder, "--keys")[1])
    for bounds in BOUNDS:
        assert say("gc", place.url, *bounds, "--dry-run") == say("gc", folder, *bounds, "--dry-run")
    url, _, query = place.url.partition("?")
    for number, expected in ((0, 1), (3, 0), (5, 0)):
        path = place.path(namespace, KEYS[number])
        shown = say("inspect", f"{url}/{path}?{query}")
        assert shown == say("inspect", f"{folder}/{path}")
        assert shown[0] == expected
    for path in (place.path(namespace, KEYS[2]), f"{namespace.fingerprint}/notes.txt"):
        assert main(["inspect", f"{url}/{path}?{query}"]) == 1
        assert main(["inspect", f"{folder}/{path}"]) == 1
    capsys.readouterr()
    repaired = say("fsck", place.url, "--repair")
    assert repaired == say("fsck", folder, "--repair")
    assert repaired[1][0].endswith("5 put in quarantine, 1 temporary files removed"), repaired
    left = {path for path in place.paths() if "quarantine" in path}
    assert left == {
        f"{namespace.fingerprint}/quarantine/{key.hex()}.safetensors" for key in KEYS[:5]
    }
    assert say("fsck", place.url) == say("fsck", folder)
    for bounds in ([], ["--capacity", "20KiB"], ["--max-age", "0s"]):
        would = say("gc", place.url, *bounds, "--dry-run")
        done = say("gc", place.url, *bounds)
        assert done[1] == [would[1][0].replace("would be ", "")]
        assert done == say("gc", folder, *bounds)
        copied = {str(path.relative_to(folder)) for path in Path(folder).glob("*/**/*.*")}
        in_bucket = place.paths()
        assert len(copied) == len(in_bucket), "which of the blocks that are equally old may differ"
        differing = copied.symmetric_difference(in_bucket)
        assert all("/62/" in path for path in differing)
    assert f"{namespace.fingerprint}/notes.txt" in place.paths()
    assert f"{'1' * 32}/namespace.json" not in place.paths()


def test_large_objects_are_verified_in_pieces(
    place: Place, monkeypatch: pytest.MonkeyPatch, say: Say
) -> None:
    monkeypatch.setattr(bucket_store, "PIECE_BYTES", 4500)
    namespace = fill(place, num_blocks=3)
    assert say("fsck", place.url) == (0, ["3 good, 0 bad"])
    place.flip(place.path(namespace, KEYS[1]), -1)
    status, lines = say("fsck", place.url)
    assert status == 1
    assert "checksum" in lines[1]


def test_what_is_replaced_while_it_is_verified_stays(place: Place) -> None:
    namespace = fill(place, num_blocks=1)
    path = place.path(namespace, KEYS[0])
    good = place.get(path)
    place.flip(path, -1)
    _, config = parse_backend(place.url)
    assert isinstance(config, S3Config)
    with contextlib.closing(BucketStore(config)) as store:
        (block,) = store.blocks()
        with store.namespace(namespace.fingerprint) as opened, opened.open(block) as file:
            file.read_header()
            place.put(path, good)
            assert not file.quarantine()
    assert place.get(path) == good


def test_who_may_only_read_verifies_and_removes_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch, say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = fill(place)
    place.flip(place.path(namespace, KEYS[0]), -1)
    before = place.paths()
    for name, value in READER.items():
        monkeypatch.setenv(name, value)
    assert say("fsck", place.url)[0] == 1
    for command in (["fsck", place.url, "--repair"], ["gc", place.url, "--max-age", "0s"]):
        assert main(command) == 2
        assert "Denied" in capsys.readouterr().err
    assert place.paths() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("s3://blocks/", "s3://nothing/"), "NoSuchBucket"),
        (("/places/", "/elsewhere/"), "expected"),
        (("s3://blocks/", "s3://someone:hunter2@blocks/"), "environment only"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    place: Place, capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    url = place.url.replace(*change)
    for command, *options in (["ls"], ["fsck", "--repair"], ["gc"]):
        assert main([command, *options, url]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        assert said in printed.err
        assert "hunter2" not in printed.err

"""connect(): from a URL or a mapping to a backend and an engine."""

import re
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from kvxfer import Namespace, TieredBackend, exchange, make_block_key
from kvxfer.backends.host import HostBackend, HostConfig, MemoryIntegrity
from kvxfer.backends.nixl import NixlConfig
from kvxfer.backends.object import S3Config
from kvxfer.connect import BACKENDS, complete_namespace, connect, open_backend, parse_backend
from kvxfer.errors import (
    BackendUnavailableError,
    CapacityError,
    InvalidArgumentError,
    NamespaceMismatchError,
)
from kvxfer.replay import plan_tiers
from kvxfer.settings import convert_settings
from kvxfer.testing import BlockMemory, DictBackend, DictConfig
from kvxfer.testing.payloads import make_payload, read_payloads, write_payloads
from kvxfer.units import ByteSize
from tests.tiering.opened_tiers import settle

ROOT = Path(__file__).parents[1]
PAGES = [[96, 33], [64]]
KEYS = [make_block_key(f"block-{index}".encode(), 0) for index in range(3)]
"""Keys of group 0."""


@pytest.fixture
def memory() -> BlockMemory:
    return BlockMemory(PAGES, num_blocks=8)


def test_a_url_and_a_mapping_say_the_same() -> None:
    for backend in (
        *("host:?capacity=4MiB", "HOST://?capacity=4%20MiB", "host://?capacity=4194304"),
        *({"type": "host", "capacity": "4MiB"}, {"type": "host", "capacity": 4 << 20}),
    ):
        assert parse_backend(backend) == (HostBackend, HostConfig(capacity=ByteSize(4 << 20)))
    _, config = parse_backend("host://?capacity=1MiB&eviction=arc&integrity=off")
    assert isinstance(config, HostConfig)
    assert (config.eviction, config.integrity) == ("arc", MemoryIntegrity.OFF)
    for name in ("full", "fast"):
        _, config = parse_backend(f"host://?capacity=1MiB&integrity={name}")
        assert isinstance(config, HostConfig)
        assert config.integrity is MemoryIntegrity.FULL


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("nowhere://?capacity=4MiB", "one of: .*host"),
        ("/var/cache/kv", "a URL such as"),
        ({"capacity": "4MiB"}, "a mapping with a 'type'"),
        (None, "a URL, or a mapping"),
        ("host://", "a host backend: capacity is missing$"),
        ("host://?capasity=4MiB", r"there is no 'capasity' \(did you mean 'capacity'\?\)$"),
        ("host://?capacity=lots", "capacity is 'lots'; expected a positive size"),
        ("host://?capacity=4MiB&capacity=8MiB", "each parameter once"),
        ("host://somewhere?capacity=4MiB", "a host backend, which has no address, as in host://$"),
        ("host://?capacity=4MiB#8MiB", "fragment"),
        ("file:///var/%00?capacity=4MiB", "no NUL in its path"),
        ({"type": "file", "path": "/var/\x1b[31m", "capacity": 1}, r"no '\\x1b' in its path"),
        ("file:///var/a\nb?capacity=4MiB", "without control characters"),
        ("file:///var/a?capacity=4MiB&tenant=%ff", "UTF-8 after each '%'"),  # nor is it that of %fe
        (" host://?capacity=4MiB", "without .* spaces around it"),
        *(
            (f"{tier}?capacity=4MiB&{wrong}", wrong.replace("=", " is "))
            for tier in ("host://", "file:///var/a")
            for wrong in ("priority_share=2", "priority_share=nan", "priority_half_life_s=0")
        ),
    ],
    ids=repr,
)
def test_what_names_no_backend_is_refused_with_what_would(backend: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        parse_backend(backend)
    assert caught.value.argument == "backend"


HIDE_AND_SEEK = "hide-and-seek"


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        (f"s3://bucket?secret_access_key={HIDE_AND_SEEK}", "no 'secret_access_key'.*environment"),
        (f"s3://bucket?%61ws_session_token={HIDE_AND_SEEK}", "no 'aws_session_token'"),
        ({"type": "az", "address": "c", "account_key": HIDE_AND_SEEK}, "no 'account_key'"),
        ({"type": "gs", "address": f"user:{HIDE_AND_SEEK}@bucket"}, "no user: "),
        (f"s3://user:{HIDE_AND_SEEK}@bucket/prefix", "no user: "),
        (f"s3://bucket?endpoint=http://user:{HIDE_AND_SEEK}@host:1", "without credentials"),
        (f"s3://bucket?region=here#token={HIDE_AND_SEEK}", "fragment"),
        (f"s3://bucket?token={HIDE_AND_SEEK}&token=again", "each parameter once"),
        (f"s3://bucket?token={HIDE_AND_SEEK}&", "name=value"),
        (f"nowhere://?password={HIDE_AND_SEEK}", "one of: "),
        (f"s3://bucket?pwd={HIDE_AND_SEEK}", "no 'pwd'.*environment"),
        (f"az://container?sv=2024-11-04&sig={HIDE_AND_SEEK}", "no 'sig'.*environment"),
        (f"s3://user\n:{HIDE_AND_SEEK}@bucket", "without control"),
        (f"s3://user:{HIDE_AND_SEEK}?@bucket", "name=value"),
        (f"s3://user:{HIDE_AND_SEEK}?a=b@bucket", "no 'a'"),
        (f"s3://user:a?b={HIDE_AND_SEEK}&c=d@bucket", "no '[bc]'"),
        (f"s3://bucket?token=a@{HIDE_AND_SEEK}", "no 'token'"),
    ],
    ids=repr,
)
def test_credentials_are_refused_by_name_and_no_error_tells_them(backend: Any, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        parse_backend(backend)
    told = "".join(traceback.format_exception(caught.value))
    assert HIDE_AND_SEEK not in told
    assert HIDE_AND_SEEK not in repr(caught.value.value)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (NixlConfig, {"address": f"user:{HIDE_AND_SEEK}@host:1"}),
        (NixlConfig, {"discover": f"user:{HIDE_AND_SEEK}@host:2379/kvxfer"}),
        (S3Config, {"address": f"user:{HIDE_AND_SEEK}@bucket"}),
        (S3Config, {"address": "bucket", "endpoint": f"ftp://host?token={HIDE_AND_SEEK}"}),
        (S3Config, {"address": "bucket", "endpoint": f"host?token={HIDE_AND_SEEK}"}),
    ],
)
def test_a_configuration_that_is_made_in_python_hides_credentials_too(
    kind: Any, fields: dict[str, str]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        kind(**fields)
    assert HIDE_AND_SEEK not in f"{caught.value} {caught.value.value!r}"


def test_a_namespace_that_contradicts_the_caches_is_refused_by_field(memory: BlockMemory) -> None:
    complete = complete_namespace(Namespace(model="model"), memory.caches, 1)
    other = BlockMemory([[96, 34], [64]], num_blocks=8)
    for caches, num_blocks, told in (
        (other.caches, 1, ("groups[0].page_sizes_bytes[1]", 33, 34)),
        (memory.caches, 3, ("blocks_per_chunk", 1, 3)),
    ):
        with pytest.raises(NamespaceMismatchError) as caught:
            connect(
                "host://?capacity=64KiB", caches, namespace=complete, blocks_per_chunk=num_blocks
            )
        assert (caught.value.field, caught.value.ours, caught.value.theirs) == told


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a foreign package with a backend: its name, and where it is."""

    def install(name: str, place: str) -> None:
        metadata = tmp_path / name / "third_party-1.0.dist-info"
        metadata.mkdir(parents=True)
        about = "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n"
        (metadata / "METADATA").write_text(about)
        (metadata / "entry_points.txt").write_text(f"[kvxfer.backends]\n{name} = {place}\n")
        monkeypatch.syspath_prepend(tmp_path / name)

    return install


@pytest.fixture
def installed(install: Callable[[str, str], None]) -> None:
    install("dict", "kvxfer.testing:DictBackend")


def test_a_backend_of_ours_is_found_by_its_entry_point_too() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["kvxfer.backends"] == BACKENDS


@pytest.mark.usefixtures("installed")
async def test_several_urls_are_tiers_in_their_order(memory: BlockMemory) -> None:
    payloads = [make_payload(key, memory.chunk_size_bytes(0)) for key in KEYS]
    async with connect(
        ["host://?capacity=64KiB", {"type": "dict"}, "dict://?max_blocks=2"],
        memory.caches,
        namespace=Namespace(model="model"),
    ) as engine:
        assert isinstance(engine.backend, TieredBackend)
        first, *lower = engine.backend.tiers
        assert isinstance(first, HostBackend)
        assert [type(tier) for tier in lower] == [DictBackend, DictBackend]
        write_payloads(memory.describe(0, [5, 0, 2]), payloads)
        assert all(outcome.done for outcome in await engine.store(KEYS, [[5, 0, 2], []]))
        await settle(engine.backend)
        assert [sum(await tier.lookup(KEYS)) for tier in lower] == [3, 2]
        await first.delete(KEYS)
        assert await engine.lookup(KEYS) == [True] * 3
        assert all(outcome.done for outcome in await engine.load(KEYS, [[1, 3, 4], []]))
        assert read_payloads(memory.describe(0, [1, 3, 4])) == payloads


@pytest.mark.usefixtures("installed")
def test_of_several_the_one_that_names_no_backend_is_told(memory: BlockMemory) -> None:
    for wrong, named in ((None, None), (["host://"], ["host://"]), ("nowhere://", "nowhere")):
        with pytest.raises(InvalidArgumentError) as caught:
            open_backend(["host://?capacity=64KiB", wrong], memory.namespace())  # type: ignore[list-item]
        assert (caught.value.argument, caught.value.value) == ("backend", named)
    assert re.search(r"one of: .*dict, .*host", str(caught.value)), "all that are installed"


@pytest.mark.usefixtures("installed")
def test_what_cannot_be_opened_tiers_or_an_engine_is_closed(
    memory: BlockMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, closed = Namespace(model="model"), AsyncMock()
    monkeypatch.setattr(DictBackend, "aclose", closed)
    with pytest.raises(CapacityError):
        open_backend(["dict://", "dict://", "host://?capacity=100TiB"], memory.namespace())
    assert closed.await_count == 2
    with pytest.raises(InvalidArgumentError, match="groups"):
        open_backend(["dict://", "dict://"], model)
    assert closed.await_count == 4
    with pytest.raises(InvalidArgumentError, match="max_bytes"):
        connect("dict://", memory.caches, namespace=model, max_bytes_in_flight=0)
    assert closed.await_count == 5


LASTING = [
    "file:///var/cache/kv?capacity=1GiB",
    "s3://bucket/prefix",
    "nixl://127.0.0.1:7000",
    "nixl://?listen=127.0.0.1:0&capacity=1MiB",
    "pool:///run/pool.sock",
    "mooncake://127.0.0.1:50051",
    ["host://?capacity=1MiB", "file:///var/cache/kv?capacity=1GiB"],
]


@pytest.mark.parametrize(
    ("open_it", "backend"), [*((connect, each) for each in LASTING), (exchange, "nixl://")]
)
def test_the_revision_is_required_where_blocks_outlive_the_process(
    memory: BlockMemory, open_it: Callable[..., object], backend: Any
) -> None:
    with pytest.raises(InvalidArgumentError, match="the revision of the weights") as caught:
        open_it(backend, memory.caches, namespace=Namespace(model="model"))
    assert (caught.value.argument, caught.value.value) == ("namespace.revision", "")


def open_nothing(*_: object) -> None:
    pass


def fail_to_open(*_: object) -> None:
    raise OSError("no cluster")


for each in (open_nothing, fail_to_open):
    each.config_type = DictConfig  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ("nowhere:Backend", InvalidArgumentError, "'mine'; .*nowhere:Backend: .*No module named"),
        ("json:Backend", InvalidArgumentError, "'mine'; .*json:Backend: .*no attribute 'Backend'"),
        ("json:JSONDecoder", InvalidArgumentError, "'mine'; .*JSONDecoder: .*config_type"),
        (f"{__name__}:open_nothing", InvalidArgumentError, "open_nothing.* is None; .*Backend"),
        (f"{__name__}:fail_to_open", BackendUnavailableError, "fail_to_open: .*no cluster"),
    ],
)
def test_an_entry_point_that_opens_no_backend_is_named(
    memory: BlockMemory,
    install: Callable[[str, str], None],
    place: str,
    error: type[Exception],
    said: str,
) -> None:
    install("mine", place)
    for backend in ("mine://", ["mine://", "mine://"]):
        with pytest.raises(error, match=said):
            open_backend(backend, memory.namespace())


@pytest.mark.parametrize("says", ["true", "false", "nothing"])
def test_a_third_party_says_whether_its_blocks_outlive_the_process(
    memory: BlockMemory, tmp_path: Path, install: Callable[[str, str], None], says: str
) -> None:
    body = f"class Mine(DictBackend):\n    outlives_process = {says.title()}\n"
    if says == "nothing":
        body = "def Mine(config, namespace):\n    return DictBackend(config, namespace)\n"
        body += "Mine.config_type = DictBackend.config_type\n"
    (tmp_path / says).mkdir()
    (tmp_path / says / f"says_{says}.py").write_text(
        f"from kvxfer.testing import DictBackend\n\n{body}"
    )
    install(says, f"says_{says}:Mine")
    if says != "false":
        with pytest.raises(InvalidArgumentError, match=r"namespace\.revision"):
            connect(f"{says}://", memory.caches, namespace=Namespace(model="model"))
    namespace = Namespace(model="model", revision="" if says == "false" else "1")
    connect(f"{says}://", memory.caches, namespace=namespace).close()


def test_a_setting_whose_name_begins_with_key_is_named() -> None:
    class Settings(msgspec.Struct):
        keys: int
        sizes: dict[str, int] = {}

    with pytest.raises(InvalidArgumentError, match=r"sizes\[\.\.\.\]: expected a whole number"):
        convert_settings("settings", {"keys": 2, "sizes": {"a": "x"}}, Settings, what="settings")
    with pytest.raises(InvalidArgumentError, match="keys is 'two'; expected"):
        convert_settings("settings", {"keys": "two"}, Settings, what="settings")
    with pytest.raises(InvalidArgumentError, match="a name is not text"):
        convert_settings("settings", {5: 1}, Settings, what="settings")  # type: ignore[dict-item]


def test_an_error_shows_a_number_of_tokens_but_no_token() -> None:
    class Settings(msgspec.Struct):
        prefill_tokens_per_s: float = 1
        output_tokens: int = 1
        token: int = 1
        tokens: int = 1
        auth_tokens: int = 1

    for name in Settings.__struct_fields__:
        said = "'x'" if name in {"prefill_tokens_per_s", "output_tokens"} else "'...'"
        with pytest.raises(InvalidArgumentError, match=f"{name} is {said}; expected a ") as caught:
            convert_settings("settings", {name: "x"}, Settings, what="settings")
        assert ("x'" in str(caught.value)) is (said == "'x'")


def test_the_credentials_of_a_third_party_are_told_by_no_error(
    memory: BlockMemory, tmp_path: Path, install: Callable[[str, str], None]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "takes_a_token.py").write_text(
        "import msgspec\nfrom kvxfer.testing import DictBackend\n\n"
        "from kvxfer.errors import InvalidArgumentError\n"
        "class Config(msgspec.Struct):\n    token: str\n\n"
        "    def __post_init__(self):\n"
        "        if self.token == 'abcd':\n"
        "            raise InvalidArgumentError('token', self.token, 'three letters')\n\n"
        "class Mine(DictBackend):\n    config_type = Config\n"
    )
    install("mine", "takes_a_token:Mine")
    namespace = Namespace(model="model", revision="1")
    for open_it in (
        lambda: exchange("mine://?token=abc", memory.caches, namespace=namespace),
        lambda: plan_tiers({"type": "mine", "token": "abc"}, 4096),
        lambda: plan_tiers({"type": "mine", "token": "abcd"}, 4096),
    ):
        with pytest.raises(InvalidArgumentError, match=r"mine.*expected") as caught:
            open_it()
        assert "abc" not in str(caught.value)
        assert "abc" not in repr(caught.value.value)


@pytest.mark.parametrize(
    "choice",
    [
        "nixl://10.0.0.1:7000?listen=127.0.0.1:7000&data_port=7100&capacity=1MiB",
        {"type": "nixl", "listen": "127.0.0.1:7000", "data_port": 7100, "capacity": "1MiB"},
    ],
)
def test_each_process_that_gets_one_choice_listens_at_ports_of_its_own(choice: Any) -> None:
    for replica, ports in ((0, ("127.0.0.1:7000", 7100)), (2, ("127.0.0.1:7002", 7102))):
        _, found = parse_backend(choice, replica)
        assert (found.listen, found.data_port) == ports  # type: ignore[attr-defined]

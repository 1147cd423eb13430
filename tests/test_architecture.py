"""The floors of docs/architecture.md: imports go down, and in no circle."""

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

from kvxfer.runtime import Disk

ROOT = Path(__file__).parents[1]
FLOORS = (
    {
        *("checks", "configuration", "deprecation", "endpoint", "errors", "extras", "listener"),
        *("named_files", "runtime", "settings", "text", "units"),
    },
    {"kvcache"},
    {"copy_engine"},
    {"storage"},
    {"pages"},
    {"tiering", "backends"},
    {"transfer"},
    {"lending"},
    {"telemetry"},
    {"connect", "engine_side", "face"},
    {"integrations"},
    {"cli", "doctor", "explain", "replay", "testing"},
    {"public", "kvxfer", "__main__"},
    {"benchmarks", "examples"},
)
TOP = {
    *(".ci", ".github", ".gitignore", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE"),
    *("Makefile", "README.md", "backends", "benchmarks", "constraints.txt", "docs", "examples"),
    *("kvxfer", "mkdocs.yml", "pyproject.toml", "tests"),
}
# Most lines of Python in a room. A budget is lowered when its room gets smaller; what exceeds one
# is joined with what the house already has, or the commit says why the room has to grow.
BUDGETS = {
    "kvxfer": 1_919,
    "backends/file": 4_380,
    "backends/host": 1_927,
    "backends/mooncake": 688,
    "backends/nixl": 7_531,
    "backends/object": 1_687,
    "backends/pool": 1_154,
    "benchmarks": 3_994,
    "examples": 2_537,
    "kvxfer/cli": 1_586,
    "kvxfer/copy_engine": 2_248,
    "kvxfer/doctor": 1_434,
    "kvxfer/engine_side": 1_563,
    "kvxfer/explain": 850,
    "kvxfer/face": 419,
    "kvxfer/integrations": 10_221,
    "kvxfer/kvcache": 5_259,
    "kvxfer/lending": 1_419,
    "kvxfer/pages": 2_048,
    "kvxfer/replay": 1_557,
    "kvxfer/runtime": 1_155,
    "kvxfer/storage": 4_728,
    "kvxfer/telemetry": 1_518,
    "kvxfer/testing": 5_976,
    "kvxfer/tiering": 1_619,
    "kvxfer/transfer": 1_982,
}
MAX_FUNCTION_LINES = 70
# What is no function of its arguments is asked of `kvxfer.runtime`, which a simulation replaces.
OF_THE_RUNTIME = {
    f"{module}.{name}"
    for module, names in {
        "asyncio": "new_event_loop open_connection run start_server to_thread",
        "concurrent.futures": "ThreadPoolExecutor as_completed wait",
        "os": "cpu_count getrandom sched_getaffinity urandom",
        "queue": "LifoQueue PriorityQueue Queue SimpleQueue",
        "random": "SystemRandom choice randbytes randint random randrange sample shuffle uniform",
        "secrets": "SystemRandom choice randbelow randbits token_bytes token_hex token_urlsafe",
        "socket": "create_server socket",
        "threading": "Barrier BoundedSemaphore Condition Event Lock RLock Semaphore Thread Timer",
        "time": "monotonic monotonic_ns perf_counter perf_counter_ns sleep time time_ns",
        "uuid": "uuid1 uuid4",
    }.items()
    for name in names.split()
}
SEEDED = {"asyncio.Runner", "numpy.random.default_rng", "random.Random"}
LAST_NAMES = {each.rpartition(".")[2] for each in {"run_in_executor", *OF_THE_RUNTIME, *SEEDED}}
# What measures the machine, is not in the package, or is a runtime itself.
BESIDE_THE_RUNTIME = (
    *("benchmarks/", "examples/", "kvxfer/cli/bench.py", "kvxfer/runtime/"),
    "kvxfer/testing/simulation/",
)
OPTIONAL_INTERFACES = {
    *("CopySource", "ImmediateMover", "Lender", "LendingBackend", "Observable", "Purgeable"),
    *("RemembersUse", "Retaining"),
}


def name_of(path: Path) -> str:
    """Name of a module by its path, such as `kvxfer.storage.keys`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("kvxfer", *parts) if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PROGRAMS = ("benchmarks", "examples")  # not in the wheel
FOLDERS = ("kvxfer", "backends", *PROGRAMS)

FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
MODULES = {name_of(path): path for path in FILES}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Read a file, once for all tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[str]:
    """Find the modules of kvxfer that a file imports, also for its types alone."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("kvxfer", *PROGRAMS)
        ):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module or ""


def floor_of(module: str) -> int:
    """Number of the floor of a module, from below."""
    package, *rooms = module.split(".")
    room = [*rooms, package][0] if package == "kvxfer" else package
    return next(number for number, names in enumerate(FLOORS) if room in names)


def test_modules_import_from_their_own_floor_and_those_below_only() -> None:
    upwards = [
        (module, imported)
        for module, path in MODULES.items()
        for imported in imports_of(path)
        if floor_of(imported) > floor_of(module)
    ]
    assert not upwards


def test_no_adapter_of_an_engine_imports_that_of_another() -> None:
    """What two of them need is in the core."""

    def engine_of(module: str) -> str:
        package, _, rest = module.partition("kvxfer.integrations.")
        return "" if package else rest.partition(".")[0].removesuffix("_connector")

    pairs = {
        (module, imported)
        for module, path in MODULES.items()
        for imported in imports_of(path)
        if engine_of(module) and engine_of(imported) not in {"", engine_of(module)}
    }
    assert not pairs


def test_what_a_backend_offers_is_asked_by_one_method() -> None:
    """A wrapper is no instance of what the backend in it provides."""
    askers = {
        module
        for module, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance"
        if OPTIONAL_INTERFACES & {getattr(each, "id", "") for each in ast.walk(node.args[1])}
    }
    assert askers == {"kvxfer.cli.serve", "kvxfer.storage.backend"}  # they ask a class, too


def test_an_engine_of_ones_own_needs_no_adapter() -> None:
    files = (ROOT / "examples" / "engine").rglob("*.py")
    imported = {name for path in files for name in imports_of(path)}
    assert imported
    assert not {name for name in imported if name.startswith("kvxfer.integrations")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {module: {*imports_of(path)} - {module} for module, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_no_rooms_import_each_other_in_a_circle() -> None:
    rooms: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for module, path in MODULES.items():
        for imported in imports_of(path):
            ours, theirs = module.split("."), imported.split(".")
            pairs = zip(ours, theirs, strict=False)
            depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if depth < min(len(ours), len(theirs)):  # not a room and its own face
                rooms[".".join(ours[:depth])][ours[depth]].add(theirs[depth])
    for graph in rooms.values():
        TopologicalSorter(graph).prepare()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_nothing_was_left_at_the_top() -> None:
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    assert {name.partition("/")[0] for name in tracked.split("\0") if name} == TOP


def test_rooms_keep_to_their_budgets_of_lines() -> None:
    lines: dict[str, int] = defaultdict(int)
    for path in FILES:
        *folders, _ = path.relative_to(ROOT).parts
        lines["/".join(folders[: 1 if folders[0] in PROGRAMS else 2])] += len(
            path.read_text().splitlines()
        )
    lines.pop("backends")  # an empty __init__.py
    assert lines.keys() == BUDGETS.keys()
    assert {room: count for room, count in lines.items() if count > BUDGETS[room]} == {}


def test_no_function_is_too_long_to_read() -> None:
    lengths = {
        f"{name}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: count for name, count in lengths.items() if count > MAX_FUNCTION_LINES} == {}


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Full names of what code imports, by the names that it gives them."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name: each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def types_and_owners(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Find the parts of code that name a type, or what has the attribute that is used."""
    for node in nodes:
        for field in ("annotation", "returns", "slice"):
            if isinstance(part := getattr(node, field, None), ast.AST):
                yield from ast.walk(part)
        if isinstance(node, ast.Attribute):
            yield node.value


def uses_beside_runtime(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Find what code asks of the machine itself.

    A lock at module level is none of a runtime: it outlives any.
    """
    names, apart = imported_names(nodes), {*types_and_owners(nodes)}
    for line in getattr(nodes[0], "body", ()):
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call):
            apart |= {line.value.func} if ast.unparse(line.value) == "threading.Lock()" else set()
    for node in nodes:
        call = node if isinstance(node, ast.Call) else None
        part = call.func if call else node
        last = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        if last not in names and last not in LAST_NAMES:
            continue
        module, _, name = ast.unparse(part).rpartition(".")
        first, _, rest = module.partition(".")
        full = f"{names.get(module) or f'{names.get(first)}.{rest}'}.{name}"
        full = full if module else names.get(name, "")
        is_unseeded = call and full in SEEDED and not (call.args or call.keywords)
        is_pool = call and name == "run_in_executor" and ast.unparse(call.args[0]) == "None"
        if is_unseeded or is_pool or (full in OF_THE_RUNTIME and part is node not in apart):
            yield f"{ast.unparse(part)}, line {getattr(part, 'lineno', 0)}"


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Else on that of the caller's thread, as after `torch.set_default_device`."""
    made = re.compile(r"torch\.(arange|as_tensor|empty|full|ones|rand|randint|tensor|zeros)")
    apart = ("kvxfer.testing.", "kvxfer.integrations.vllm.common.cpu_packing", *PROGRAMS)
    found = {
        f"{name}, line {node.lineno}"
        for name, path in MODULES.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and made.fullmatch(ast.unparse(node.func))
        if "device" not in {each.arg for each in node.keywords} and not name.startswith(apart)
    }
    assert found == set()


def test_only_the_runtime_makes_the_calls_of_a_store_of_files() -> None:
    calls = {f"{module}.{name}" for module in ("os", "fcntl") for name in vars(Disk)} | {"open"}
    apart = {"kvxfer.backends.file.io.selection", "kvxfer.backends.file.io.ring"}  # no files of it
    found = {
        f"{name}, line {node.lineno}: {ast.unparse(node.func)}"
        for name, path in MODULES.items()
        if name.startswith("kvxfer.backends.file.") and name not in apart
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in calls
    }
    assert found == set()


def test_only_the_runtime_asks_the_machine_for_time_threads_sockets_and_chance() -> None:
    found = {
        str(path.relative_to(ROOT)): uses
        for path in FILES
        if not str(path.relative_to(ROOT)).startswith(BESIDE_THE_RUNTIME)
        if (uses := list(uses_beside_runtime(nodes_of(path))))
    }
    assert found == {}


ASKED = (
    "import time\ndef f(now=time.monotonic): ...",
    "from time import monotonic as now\nnow()",
    "import threading\nclass A:\n    lock = threading.Lock()",
    "async def f(loop): await loop.run_in_executor(None, print)",
    "import random\nrandom.Random()",
)
DECIDED_BY_ARGUMENTS = (
    "import threading\n_lock = threading.Lock()",
    "import threading\ndef f(thread: threading.Thread) -> threading.Event: ...",
    "import random\nrandom.Random(1).random()",
    "import socket\nKind = list[socket.socket]\nsocket.socket.recv(1, 2)",
    "async def f(loop, pool): await loop.run_in_executor(pool, print)",
)


@pytest.mark.parametrize("source", [*ASKED, *DECIDED_BY_ARGUMENTS])
def test_what_is_asked_of_the_machine_itself_is_seen_alone(source: str) -> None:
    uses = list(uses_beside_runtime(list(ast.walk(ast.parse(source)))))
    assert len(uses) == (source in ASKED)

"""`kvxfer doctor`: what it prints, its exit statuses, and faults planted in real processes."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvxfer.connect import parse_backend
from kvxfer.doctor import plan_checks
from tests.backends.file_store import has_uring
from tests.cli.conftest import Run
from tests.cli.peers import COMMAND
from tests.cli.stores import Store

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 100
CONTAINER = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
POWERLESS = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"]
SECCOMP = [sys.executable, "-m", "tests.doctor.seccomp"]
PLACES = (
    *(
        "file:///kv?capacity=1GiB",
        "nixl://10.0.0.7:7000",
        "nixl://?discover=etcd://10.0.0.5:2379/x",
    ),
    *("pool:///pool", "s3://bucket", "mooncake://10.0.0.6:50051"),
)
CONFIGS = [parse_backend(url)[1] for url in PLACES]
PLANNED = [*dict.fromkeys(check.name for check in plan_checks(CONFIGS, 1.0))]
BEHIND_PEER = PLANNED.index("peer") + 1
CHECKS = [*PLANNED[:BEHIND_PEER], "peer-carrier", *PLANNED[BEHIND_PEER:], "sharing"]
FRESH = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
"""Environment of a process in a fresh container."""


@pytest.fixture(autouse=True)
def _sound_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")


def examine(
    *arguments: str, command: list[str] = COMMAND, num_files: int = 1024, **environ: str | None
) -> tuple[int, list[dict[str, str]]]:
    """Run the command in a process of its own; return its exit status and its findings."""
    environment = {**FRESH, "PYTHONPATH": str(REPOSITORY), **environ}
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = num_files, most_files
    found = subprocess.run(
        [*command, "doctor", "--json", "--timeout", "30s", *arguments],
        env={name: value for name, value in environment.items() if value is not None},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        capture_output=True,
        check=False,
        cwd=REPOSITORY,
        timeout=LIMIT_S,
    )
    assert not found.stderr, found.stderr.decode()
    return found.returncode, json.loads(found.stdout)


def bad(findings: list[dict[str, str]]) -> dict[str, Mapping[str, str]]:
    return {each["check"]: each for each in findings if each["severity"] != "ok"}


pytestmark = [pytest.mark.processes]


def is_good(folder: Path) -> bool:
    """Whether this machine has all that the doctor looks for; else it rightly finds faults."""
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", folder], text=True).strip()
    shared = shutil.disk_usage("/dev/shm").total > 64 << 20  # noqa: S108 - asked for its size
    return has_uring() and shared and kind in {"ext2/ext3", "xfs", "btrfs"}


@pytest.mark.parametrize("around", [[], [*CONTAINER, *POWERLESS]], ids=["fresh", "container"])
def test_a_good_machine_is_good_also_in_a_fresh_environment_and_in_a_container(
    tmp_path: Path, around: list[str]
) -> None:
    if around and subprocess.run([*around, "true"], check=False).returncode:
        pytest.skip("no namespaces can be made here")
    if not is_good(tmp_path):
        pytest.skip("this machine has no disk, io_uring or shared memory of more than 64 MiB")
    store = f"file://{tmp_path}/store?capacity=1MiB&min_free=1MiB"
    status, findings = examine("host://?capacity=1MiB", store, command=[*around, *COMMAND])
    assert (status, bad(findings)) == (0, {})
    own = {"bucket", "discovery", "mooncake", "peer", "peer-carrier", "pool", "sharing"}
    assert {each["check"] for each in findings} == {*CHECKS} - own


def test_a_folder_of_another_user_is_one_fault_however_deep_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "kv").mkdir(parents=True)
    folder.chmod(0)
    for path in (folder, folder / "kv"):
        told = bad(examine(f"file://{path}?capacity=1MiB", command=[*POWERLESS, *COMMAND])[1])
        assert told.keys() == {"store-folder"}
        assert told["store-folder"]["found"] == f"{folder} cannot be written to: Permission denied"


def test_faults_are_named_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError('libibverbs.so.1: no such file')\n")
    status, findings = examine(
        "host://?capacity=900TiB",
        num_files=256,
        PYTHONHASHSEED="random",
        PYTHONPATH=f"{tmp_path}:{REPOSITORY}",
    )
    told = bad(findings)
    assert status == 1
    assert {*told} == {"hash-seed", "open-files", "nixl", "memory", "shared-memory"}
    assert "256" in told["open-files"]["found"]
    assert "libibverbs.so.1" in told["nixl"]["found"]
    assert "900.0 TiB needed" in told["memory"]["found"]


@pytest.mark.skipif(not has_uring(), reason="needs io_uring")
def test_io_uring_that_is_forbidden_as_in_a_container_is_named(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/store?capacity=1MiB&min_free=1MiB"
    status, findings = examine(store, command=SECCOMP)
    assert (status, set(bad(findings))) == (1, {"io-uring"})
    assert bad(findings)["io-uring"]["severity"] == "warning"
    status, findings = examine(f"{store}&engine=uring", command=SECCOMP)
    assert bad(findings)["io-uring"]["severity"] == "error"
    status, findings = examine(f"{store}&engine=posix", command=SECCOMP)
    assert (status, bad(findings)) == (0, {})


def test_a_person_reads_the_worst_first(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    status, printed, _ = run("doctor", f"file://{tmp_path}?capacity=900TiB&engine=posix")
    *lines, total = printed.splitlines()
    assert status == 1
    heads = [line.split()[:2] for line in lines if re.match(r"error|warning|ok", line)]
    order = [severity for severity, _ in heads]
    assert order == sorted(order, key=["error", "warning", "ok"].index)
    assert heads[0] == ["error", "hash-seed"]
    assert ["warning", "store-space"] in heads
    told = "\n".join(lines)
    for text in ("found  PYTHONHASHSEED is 'random'", "mend   unset PYTHONHASHSEED", "why    "):
        assert f"    {text}" in told
    assert re.fullmatch(r"error: \d+, warning: \d+, ok: \d+", total)


def test_two_namespaces_are_compared_and_nothing_else_is(store: Store, run: Run) -> None:
    same = f"{store.root}/{store.fill(num_blocks=1).fingerprint}/namespace.json"
    status, printed, _ = run("doctor", f"file://{store.root}", same)
    assert (status, "one namespace" in " ".join(printed.split())) == (0, True)
    other = f"{store.root}/{store.fill(model='other').fingerprint}"
    status, printed, _ = run("doctor", "--json", other, same)
    assert status == 1
    assert [(each["check"], each["subject"]) for each in json.loads(printed)] == [
        ("sharing", "model")
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tape:///dev/st0"],
        ["file:///var/cache/kv"],
        ["/nowhere/a.json", "/nowhere/b.json"],
        ["file://var/cache/kv", "/nowhere/b.json"],
        ["file:///var/cache/kv#a", "/nowhere/b.json"],
        ["--timeout", "999999d"],
    ],
)
def test_bad_input_is_one_line_that_names_it(run: Run, arguments: list[str]) -> None:
    status, printed, line = run("doctor", *arguments)
    assert (status, printed, line.count("\n")) == (2, "", 1)
    assert line.startswith("kvxfer doctor: ")
    assert any(each in line for each in (*arguments[-1:], *arguments[0].split("://")))
    assert not arguments[0].startswith("file:") or arguments[0] in line


def test_the_page_has_every_check_and_no_other() -> None:
    page = (REPOSITORY / "docs" / "cli.md").read_text()
    checks = page.partition("### Checks")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \|(.+)\|(.+)\|$", checks, re.MULTILINE)
    assert [name for name, _, _ in rows] == CHECKS
    assert all(meaning.strip() and mend.strip() for _, meaning, mend in rows)

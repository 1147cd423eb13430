"""The disk of a simulation answers like the machine's, and loses unsynced changes."""

import contextlib
import errno
import fcntl
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvxfer import runtime
from kvxfer.testing.simulation import Simulation


def run_simulated(body: Callable[[Simulation], None], seed: int) -> None:
    simulation = Simulation(seed)
    with runtime.use(simulation.runtime):
        simulation.runtime.scheduler.run(lambda: body(simulation))
    assert not simulation.violations


def answers(root: Path) -> list[object]:
    """Make many calls; list the result or error of each."""
    disk, said, fds = runtime.disk(), list[object](), dict[str, int]()

    def note(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            answer = call(*args, **kwargs)
        except OSError as exc:
            said.append(exc.errno)
            return None
        said.append(answer if isinstance(answer, bytes) else None)
        return answer

    disk.makedirs(root / "a" / "b", exist_ok=True)
    folder = fds["folder"] = disk.open(root / "a", os.O_RDONLY | os.O_DIRECTORY)
    note(disk.makedirs, root / "a" / "b")
    note(disk.mkdir, "b", dir_fd=folder)
    note(disk.open, "none", os.O_RDONLY, dir_fd=folder)
    create = os.O_CREAT | os.O_EXCL | os.O_RDWR
    fds["file"] = disk.open("file", create, mode=0o600, dir_fd=folder)
    note(disk.open, "file", create, 0o600, dir_fd=folder)
    note(disk.open, "file", os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder)
    note(disk.open, "b", os.O_WRONLY, dir_fd=folder)
    said.append(disk.pwrite(fds["file"], b"0123456789", 4))
    note(disk.pread, fds["file"], 20, 0)
    disk.ftruncate(fds["file"], 6)
    note(disk.pread, fds["file"], 20, 3)
    note(disk.rmdir, "a", dir_fd=fds["file"])
    note(disk.rmdir, root / "a")
    note(disk.unlink, "b", dir_fd=folder)
    note(disk.rename, "file", "b", src_dir_fd=folder, dst_dir_fd=folder)
    disk.rename("file", "moved", src_dir_fd=folder, dst_dir_fd=folder)
    found = disk.stat("moved", dir_fd=folder, follow_symlinks=False)
    said += [found.st_size, found.st_nlink, os.path.samestat(found, disk.fstat(fds["file"]))]
    said.append(sorted(disk.listdir(folder)))
    fds["other"] = disk.open("moved", os.O_RDONLY, dir_fd=folder)
    disk.flock(fds["file"], fcntl.LOCK_SH)
    note(disk.flock, fds["other"], fcntl.LOCK_EX | fcntl.LOCK_NB)
    disk.flock(fds["file"], fcntl.LOCK_UN)
    note(disk.flock, fds["other"], fcntl.LOCK_EX | fcntl.LOCK_NB)
    disk.unlink("moved", dir_fd=folder)
    said.append(disk.fstat(fds["file"]).st_nlink)
    note(disk.pread, fds["file"], 20, 0)
    disk.rmdir("b", dir_fd=folder)
    disk.rmdir(root / "a")
    note(disk.open, "late", create, 0o600, dir_fd=folder)
    said.append(disk.fstat(folder).st_nlink)
    for fd in fds.values():
        disk.close(fd)
    note(disk.close, fds["file"])
    return said


def test_the_disk_of_a_simulation_answers_as_that_of_the_machine(tmp_path: Path) -> None:
    found: list[list[object]] = []
    run_simulated(lambda _: found.append(answers(Path("/root"))), 1)
    assert found == [answers(tmp_path)]


@pytest.mark.parametrize("name", ["dup2", "mkdir", "open", "posix_fadvise", "stat", "statvfs"])
def test_a_call_of_the_simulated_disk_takes_no_argument_that_the_machine_refuses(name: str) -> None:
    calls = (getattr(disk, name) for disk in (Simulation(1).runtime.files, runtime.disk()))
    simulated, real = (inspect.signature(each).parameters for each in calls)
    assert simulated.keys() <= real.keys()


def test_a_damaged_inode_can_be_neither_read_nor_removed_until_faults_end() -> None:
    def body(simulation: Simulation) -> None:
        disk, files = runtime.disk(), simulation.runtime.files
        for name in ("kept", "folder/inner"):
            disk.makedirs(Path(f"/{name}").parent, exist_ok=True)
            disk.close(disk.open(f"/{name}", os.O_CREAT | os.O_RDWR))
        disk.close(disk.open("/damaged", os.O_CREAT | os.O_RDWR))
        files.damage_inode("/damaged")
        files.damage_inode("/folder")
        calls: list[Callable[[], object]] = [
            lambda: disk.open("/damaged", os.O_RDONLY),
            lambda: disk.stat("/damaged"),
            lambda: disk.unlink("/damaged"),
            lambda: disk.rename("/kept", "/damaged"),
            lambda: disk.open("/folder/inner", os.O_RDONLY),
        ]
        for call in calls:
            with pytest.raises(OSError, match="Input/output error"):
                call()
        paths = ("/kept", "/damaged", "/folder/inner", "/none")
        assert [files.is_readable(path) for path in paths] == [True, False, False, True]
        files.end_faults()
        disk.stat("/folder/inner")
        disk.unlink("/damaged")

    run_simulated(body, 1)


def test_a_power_cut_loses_what_was_not_synced_and_nothing_else() -> None:
    lost = {"bytes": 0, "name": 0}

    def body(simulation: Simulation) -> None:
        disk = runtime.disk()
        disk.makedirs(Path("/kept"))
        root, folder = disk.open("/", os.O_RDONLY), disk.open("/kept", os.O_RDONLY)
        for name in ("synced", "unsynced"):
            fd = disk.open(name, os.O_CREAT | os.O_RDWR, dir_fd=folder)
            disk.pwrite(fd, b"bytes", 0)
            if name == "synced":
                for each in (fd, folder, root):
                    disk.fsync(each)
        simulation.runtime.files.forget(simulation.runtime.scheduler.current.process)
        simulation.runtime.files.cut_power()
        files = simulation.runtime.files.files()
        assert files.pop("/kept/synced") == 5
        with contextlib.suppress(KeyError):
            lost["bytes"] += files.pop("/kept/unsynced") < 5
            lost["name"] -= 1
        lost["name"] += 1
        assert files == {}

    for seed in range(20):
        run_simulated(body, seed)
    assert 0 < lost["name"] < 20
    assert lost["bytes"]


@pytest.mark.parametrize("sync", ["fsync", "sync_file_system"])
def test_a_power_cut_loses_what_a_failed_sync_dropped_despite_a_later_one(sync: str) -> None:
    def body(simulation: Simulation) -> None:
        disk, files = runtime.disk(), simulation.runtime.files
        root, fd = disk.open("/", os.O_RDONLY), disk.open("/file", os.O_CREAT | os.O_RDWR)
        disk.pwrite(fd, b"kept", 0)
        disk.fsync(fd)
        disk.fsync(root)
        disk.pwrite(fd, b"lost", 0)
        files.begin_fault(errno.EIO, 10.0, 1.0, ("sync",))
        with pytest.raises(OSError, match="Input/output error"):
            getattr(disk, sync)(fd)
        files.end_faults()
        getattr(disk, sync)(fd)
        assert disk.pread(fd, 4, 0) == b"lost"
        assert files.safe_files() == []
        files.forget(simulation.runtime.scheduler.current.process)
        files.cut_power()
        assert disk.pread(disk.open("/file", os.O_RDONLY), 4, 0) == b"kept"

    for seed in range(3):
        run_simulated(body, seed)

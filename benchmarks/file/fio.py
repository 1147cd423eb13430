"""Throughput of a disk as measured by fio, the baseline of the file benchmark."""

import shutil
import subprocess
from pathlib import Path

import msgspec

DEPTH = 16


class FioMissingError(RuntimeError):
    """Missing fio, the baseline of the disk benchmarks: it is not installed."""


class _Transfers(msgspec.Struct):
    bw_bytes: int


class _Job(msgspec.Struct):
    read: _Transfers
    write: _Transfers


class _Report(msgspec.Struct):
    jobs: list[_Job]


def seconds(folder: Path, *, direction: str, block_bytes: int, total_bytes: int) -> float:
    """Time the better of one file at depth 16 and 16 jobs with a file each; io_uring, O_DIRECT.

    Args:
        folder: Folder of the files; those of a read are written first, which does not count.
        direction: `read` or `write`.
        block_bytes: Bytes of an I/O.
        total_bytes: Bytes of all files together.

    Raises:
        FioMissingError: fio is not installed.
        subprocess.CalledProcessError: fio failed.
    """
    program = shutil.which("fio")
    if program is None:
        raise FioMissingError("fio is not installed, e.g. apt-get install fio")
    rates = []
    for num_jobs, depth in ((1, DEPTH), (DEPTH, 1)):
        command = [
            program,
            f"--name=kvxfer-{num_jobs}",
            f"--directory={folder}",
            f"--rw={direction}",
            f"--bs={block_bytes}",
            f"--size={total_bytes // num_jobs}",
            f"--numjobs={num_jobs}",
            f"--iodepth={depth}",
            "--ioengine=io_uring",
            "--direct=1",
            "--group_reporting",
            "--output-format=json",
        ]
        printed = subprocess.run(command, check=True, capture_output=True).stdout  # noqa: S603 - a path that which() found
        (job,) = msgspec.json.decode(printed[printed.index(b"{") :], type=_Report).jobs
        rates.append((job.read if direction == "read" else job.write).bw_bytes)
    return total_bytes / max(rates)

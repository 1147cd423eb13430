"""Real servers of S3 for tests: SeaweedFS, and moto as a second opinion."""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.object_servers import BUCKET, REGION, ObjectServer, running
from kvxfer.backends.object import S3Backend, S3Config
from kvxfer.endpoint import free_ports
from kvxfer.storage.keys import Namespace

PATIENT = {"timeout_s": 60.0, "lookup_timeout_s": 60.0}
"""Limits that a busy machine keeps, for tests of something else."""


@contextlib.contextmanager
def moto() -> Iterator[ObjectServer]:
    """Run moto's server, which keeps objects in memory and takes any credentials."""
    port = free_ports()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (
        tempfile.TemporaryDirectory(prefix="kvxfer-moto-") as folder,
        running(command, port, Path(folder), ObjectServer) as server,
    ):
        yield server


def open_bucket(server: ObjectServer, namespace: Namespace, **fields: Any) -> S3Backend:
    """Open a backend over the bucket of a server; credentials are those of the environment."""
    defaults = {"region": REGION, "missing_ttl_s": 0.2} | PATIENT
    place = {"address": BUCKET, "endpoint": server.endpoint}
    config = msgspec.convert(place | defaults | fields, S3Config)
    return S3Backend(config, namespace)

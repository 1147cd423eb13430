"""Real file stores, for tests of the commands."""

import asyncio
from pathlib import Path
from typing import Any

from kvxfer.storage.keys import BlockKey, Namespace, make_block_key
from kvxfer.testing import BlockMemory
from kvxfer.testing.conformance.suite import store_generated
from tests.backends.file_store import counted_bytes, listed, open_store, path_of

PAGES = [[4096, 1000]]
DATA_BYTES = 5096
FILE_BYTES = 12288  # on the disk: a header, and the data in whole pages
NUM_BLOCKS = 8


def break_seal(path: Path) -> None:
    """Replace text in the header, keeping its form."""
    data = path.read_bytes()
    assert data.count(b'"start":"0"') == 1
    path.write_bytes(data.replace(b'"start":"0"', b'"start":"1"'))


class Store:
    """Store for tests: its root, and the stored keys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys = [make_block_key(bytes([number]) * 16, 0) for number in range(NUM_BLOCKS)]

    def fill(
        self,
        *,
        model: str = "example/model",
        num_blocks: int = NUM_BLOCKS,
        num_tensors: int = 0,
        secret_file: Path | None = None,
        **fields: Any,
    ) -> Namespace:
        memory = BlockMemory(PAGES, num_blocks=num_blocks)
        namespace = memory.namespace(model=model)
        if num_tensors:
            namespace = listed(namespace, num_tensors)
        # Not in the event loop, which must not wait for the disk.
        backend = open_store(self.root, namespace, secret_file=str(secret_file or ""), **fields)

        async def store() -> None:
            async with backend:
                blocks = memory.describe(0, range(num_blocks))
                await store_generated(backend, self.keys[:num_blocks], blocks)

        asyncio.run(store())
        return namespace

    def path(self, namespace: Namespace, key: BlockKey) -> Path:
        return path_of(self.root, namespace, key)

    def quarantined(self) -> set[str]:
        return {path.name for path in self.root.glob("*/quarantine/*")}

    def blocks(self) -> set[Path]:
        found = self.root.glob("*/[0-9a-f][0-9a-f]/*.safetensors")
        return {path.relative_to(self.root) for path in found}

    @property
    def counted_bytes(self) -> int:
        return counted_bytes(self.root)

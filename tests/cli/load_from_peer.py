"""Process that loads blocks from a peer; exits with 0 if every byte is right."""

import asyncio
import sys

from kvxfer.backends.nixl import NixlConfig
from tests.cli import peers


async def load(address: str, secret_file: str) -> bool:
    async with peers.connected(NixlConfig(address=address, secret_file=secret_file)) as backend:
        return await peers.load(backend) == peers.PAYLOADS


if __name__ == "__main__":
    sys.exit(not asyncio.run(load(*sys.argv[1:])))

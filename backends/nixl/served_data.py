"""Data connections of a holder: blocks that it sends and receives through sockets."""

import msgspec

from kvxfer.backends.nixl import messages
from kvxfer.backends.nixl.data_connection import DataConnection
from kvxfer.backends.nixl.messages import Moved, Receive, Send, Sending
from kvxfer.backends.nixl.served import ServedPeer, endings
from kvxfer.backends.nixl.store import BlockStore
from kvxfer.errors import InvalidArgumentError
from kvxfer.storage.lending import BlockParts

IDLE_TIMEOUT_S = 3600.0

_TRANSFER: msgspec.msgpack.Decoder[Send | Receive] = msgspec.msgpack.Decoder(Send | Receive)


async def serve_data(connection: DataConnection, peer: ServedPeer) -> None:
    """Serve the requests of a data connection, one after the other, until it ends.

    Raises:
        PeerError: The connection ended.
        InvalidArgumentError: The peer asked for bytes that no block has.
    """
    while True:
        request = await connection.receive(_TRANSFER, timeout_s=IDLE_TIMEOUT_S)
        with peer.moving():
            if isinstance(request, Send):
                await _send(connection, peer.store, request)
            else:
                await _receive(connection, peer.store, request)


async def _send(connection: DataConnection, store: BlockStore, request: Send) -> None:
    async with store.lender.lend(BlockParts(request.keys, request.starts, request.sizes)) as loan:
        await connection.send(
            Sending(
                request_id=request.request_id,
                endings=endings(loan.outcomes),
                checksums=loan.checksums,
            )
        )
        if loan.blocks is not None:
            await connection.send_blocks(loan.blocks)


async def _receive(connection: DataConnection, store: BlockStore, request: Receive) -> None:
    if len(request.checksums) != len(request.keys):
        rule = f"{len(request.keys)}, one for each key"
        raise InvalidArgumentError("checksums", len(request.checksums), rule)
    offered = BlockParts(request.keys, request.starts, request.sizes)
    async with store.lender.make_room(offered) as room:
        wanted = [outcome is None for outcome in room.outcomes]
        await connection.send(messages.Wanted(request_id=request.request_id, wanted=wanted))
        if room.blocks is not None:
            await connection.receive_blocks(room.blocks)
            pairs = zip(request.checksums, wanted, strict=True)
            expected = [checksum for checksum, is_wanted in pairs if is_wanted]
            room.arrived.update(await store.hasher.verify(room.blocks, expected))
    await connection.send(Moved(request_id=request.request_id, endings=endings(room.outcomes)))

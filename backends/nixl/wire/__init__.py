"""Wire protocol of the NIXL backend: messages, frames, handshake and data connections."""

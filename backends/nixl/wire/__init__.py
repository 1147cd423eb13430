"""Wire of the NIXL backend: messages, frames, handshake, and the connections that carry them."""

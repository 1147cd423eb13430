"""Format of a block file: its header, its checksums, and their verification."""

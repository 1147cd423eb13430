"""The unit in which disks, O_DIRECT and GDS move bytes."""

PAGE_BYTES = 4096


def padded(num_bytes: int) -> int:
    """Bytes of the whole pages that so many bytes take."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

"""Page: the unit in which disks, O_DIRECT and GDS move bytes."""

PAGE_BYTES = 4096


def padded(num_bytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES

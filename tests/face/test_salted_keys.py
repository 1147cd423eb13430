"""Salted keys: an engine forgets its blocks at once, and what nobody finds is deleted."""

import pytest

from kvxfer.errors import BackendUnavailableError
from kvxfer.face import SaltedKeys
from kvxfer.face.salted_keys import MAX_FAILED_SALTS
from kvxfer.testing.conformance.suite import make_keys

KEYS = make_keys(2)


class Medium:
    """Backend that refuses to purge what begins with some of the bytes it was given."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.refused: set[bytes] = set()

    async def purge(self, prefix: bytes = b"") -> None:
        self.asked.append(prefix)
        if prefix in self.refused:
            raise BackendUnavailableError(prefix.hex())


async def drained() -> None:
    """Nothing is being stored."""


def test_blocks_of_before_a_reset_are_found_by_nobody() -> None:
    keys = SaltedKeys(None)
    names = [[keys.name(key) for key in KEYS]]
    assert names == [KEYS]
    for _ in range(2):
        assert not keys.renew(), "nothing can be deleted there"
        names.append([keys.name(key) for key in KEYS])
    assert len({name for each in names for name in each}) == 3 * len(KEYS)
    assert keys.keys_of(names[2]) == KEYS
    assert keys.keys_of(names[1]) == []


async def test_blocks_of_former_salts_are_deleted_once_the_stores_have_ended() -> None:
    medium, num_drained = Medium(), 0
    keys = SaltedKeys(medium)

    async def drain() -> None:
        nonlocal num_drained
        num_drained += 1
        assert not medium.asked

    assert not keys.renew(), "blocks without a salt are those of others, too"
    first = keys.salt
    assert keys.renew()
    await keys.delete_former(drain)
    assert (medium.asked, num_drained) == ([first], 1)
    await keys.delete_former(drained)
    assert medium.asked == [first]


async def test_salts_whose_blocks_are_never_deleted_have_a_bound_and_hold_up_no_other() -> None:
    medium = Medium()
    keys = SaltedKeys(medium)
    keys.renew()
    never: list[bytes] = []
    for n in range(3 * MAX_FAILED_SALTS):
        never.append(keys.salt)
        medium.refused.add(keys.salt)
        keys.renew()
        good = keys.salt
        keys.renew()
        medium.asked.clear()
        with pytest.raises(BackendUnavailableError, match=never[n].hex()):
            await keys.delete_former(drained)
        assert medium.asked == [*never[max(0, n - MAX_FAILED_SALTS) :], good]

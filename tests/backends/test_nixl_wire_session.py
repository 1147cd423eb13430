"""Sessions: a data connection is accepted only with the session's key, and once."""

import msgspec
import pytest

from kvxfer.backends.nixl.wire.handshake import Role, Session
from kvxfer.backends.nixl.wire.messages import Attach
from kvxfer.errors import HandshakeError


def sides(key: bytes = bytes(32)) -> tuple[Session, Session]:
    asking = Session(Role.ASKING, session_id=b"nonce", key=key)
    return asking, Session(Role.SERVING, session_id=b"nonce", key=key)


def test_both_sides_have_the_same_keys_for_a_connection_and_other_ones_for_the_next() -> None:
    asking, serving = sides()
    seen: set[bytes] = set()
    for serial in range(3):
        ours, theirs = asking.frame_keys(serial), serving.frame_keys(serial)
        assert (ours.sending, ours.receiving) == (theirs.receiving, theirs.sending)
        seen |= {ours.sending, ours.receiving}
    assert len(seen) == 6


def test_data_connections_are_admitted_in_the_order_in_which_they_were_made() -> None:
    asking, serving = sides()
    for serial in (1, 2, 3):
        attach = asking.attach(reads=True)
        assert attach.serial == serial
        serving.admit(attach, "peer")


def test_one_that_comes_again_or_too_late_is_refused() -> None:
    asking, serving = sides()
    first, second = asking.attach(reads=True), asking.attach(reads=True)
    serving.admit(second, "peer")
    for late in (first, second):
        with pytest.raises(HandshakeError, match="serial differs: ours is 'above 2'"):
            serving.admit(late, "peer")
    serving.admit(asking.attach(reads=True), "peer")


@pytest.mark.parametrize(
    "changes",
    [
        {"serial": 2},
        {"serial": 0},
        {"serial": -1},
        {"serial": 1 << 64},
        {"mac": b""},
        {"mac": bytes(32)},
        {"session": b"another"},
        {"reads": False},
    ],
    ids=str,
)
def test_one_that_was_changed_is_refused_and_changes_nothing(changes: dict[str, object]) -> None:
    asking, serving = sides()
    attach = asking.attach(reads=True)
    with pytest.raises(HandshakeError, match="session key"):
        serving.admit(msgspec.structs.replace(attach, **changes), "peer")
    serving.admit(attach, "peer")


def test_one_of_another_session_is_refused() -> None:
    _, serving = sides()
    with pytest.raises(HandshakeError, match="session key"):
        serving.admit(sides(key=bytes(31) + b"\1")[0].attach(reads=True), "peer")


def test_the_holder_cannot_be_sent_back_what_proves_the_asking_side() -> None:
    asking, serving = sides()
    assert asking.frame_keys().sending != serving.frame_keys().sending
    assert isinstance(asking.attach(reads=True), Attach)

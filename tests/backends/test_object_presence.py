"""The cache of lookups: how long it holds, and that old looks do not undo new changes."""

import pytest

from kvxfer.backends.object import AZConfig, GSConfig, Presence, S3Config
from kvxfer.connect import parse_backend
from kvxfer.errors import InvalidArgumentError
from kvxfer.testing.conformance.suite import make_keys

ONE, TWO, THREE = make_keys(3)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def presence(clock: Clock) -> Presence:
    return Presence(found_ttl_s=300.0, missing_ttl_s=5.0, max_keys=2, clock=clock)


def test_what_was_seen_holds_for_its_time(presence: Presence, clock: Clock) -> None:
    presence.note(ONE, there=True, since=presence.mark())
    presence.note(TWO, there=False, since=presence.mark())
    assert [presence.has(ONE), presence.has(TWO)] == [True, False]
    clock.now += 5.0
    assert [presence.has(ONE), presence.has(TWO)] == [True, None]
    clock.now += 295.0
    assert presence.has(ONE) is None


def test_an_old_look_does_not_undo_a_change(presence: Presence) -> None:
    since = presence.mark()
    presence.change(ONE, there=False)
    presence.note(ONE, there=True, since=since)
    presence.note_list([ONE], since=since)
    assert presence.has(ONE) is False
    presence.note(ONE, there=True, since=presence.mark())
    assert presence.has(ONE) is True


def test_of_two_looks_the_one_that_began_later_counts(presence: Presence) -> None:
    early, late = presence.mark(), presence.mark()
    presence.note(ONE, there=True, since=late)
    presence.note(ONE, there=False, since=early)
    assert presence.has(ONE) is True
    presence.note(TWO, there=False, since=early)
    presence.note(TWO, there=True, since=late)
    assert presence.has(TWO) is True


def test_what_a_whole_list_lacks_is_missing_for_a_time(presence: Presence, clock: Clock) -> None:
    presence.note_list([ONE], since=presence.mark())
    assert presence.has(TWO) is None, "the list has not ended"
    presence.note_all_listed(clock.now)
    assert [presence.has(ONE), presence.has(TWO)] == [True, False]
    clock.now += 5.0
    assert [presence.has(ONE), presence.has(TWO)] == [True, None]


def test_what_was_forgotten_is_asked_for_and_not_missing(presence: Presence, clock: Clock) -> None:
    presence.note_list([ONE, TWO, THREE], since=presence.mark())
    presence.note_all_listed(clock.now)
    assert [presence.has(key) for key in (ONE, TWO, THREE)] == [None, True, True]


@pytest.mark.parametrize(
    ("url", "config_type"),
    [
        ("s3://bucket/a/b/?region=r&endpoint=http://h:1", S3Config),
        ("gs://bucket/a/b", GSConfig),
        ("az://bucket/a/b?account=x", AZConfig),
    ],
)
def test_the_path_of_a_url_is_the_prefix(url: str, config_type: type) -> None:
    _, config = parse_backend(url)
    assert isinstance(config, config_type)
    assert isinstance(config, S3Config | GSConfig | AZConfig)
    assert (config.address, config.prefix) == ("bucket", "a/b/")
    assert config.open_store() is not None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("://", "name of a bucket"),
        ("://bucket?timeout_s=0", "timeout_s.*more than 0"),
        ("://bucket?timeout_s=nan", "timeout_s"),
        ("://bucket?max_requests=0", "max_requests"),
        ("://bucket?max_requests_per_s=-1", "max_requests_per_s"),
        ("://bucket?endpoint=host:80", "a URL such as"),
        ("://bucket?integrity=keyed", "'off', 'fast' or 'sealed'"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_what_cannot_be_is_refused_by_name(scheme: str, parameters: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        parse_backend(scheme + parameters)


def test_azure_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidArgumentError, match="account"):
        AZConfig(address="container").open_store()

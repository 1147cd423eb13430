"""Units: sizes and times as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.units import ByteSize, Duration, format_duration, format_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("65536", 65536),
        ("2KiB", 2048),
        ("4GB", 4 * 1000**3),
        ("1.5 GB", 1_500_000_000),
        ("64.0", 64),
        ("4G", 4 * 1024**3),
        ("8 k", 8 * 1024),
        ("  4 GiB ", 4 * 1024**3),
        (4096, 4096),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str | int, num_bytes: int) -> None:
    size = ByteSize.parse(text)
    assert size == num_bytes
    assert isinstance(size, ByteSize)


@given(number=st.integers(1, 2**53 - 1))
def test_whole_numbers_are_exact_however_large(number: int) -> None:
    assert ByteSize.parse(str(number)) == number
    assert ByteSize.parse(f"{number}KiB") == 1024 * number
    assert ByteSize.parse(str(2**63 - number)) == 2**63 - number


NO_SIZES = ["", "GiB", "4 Gibibytes", "4gib", "4gi", "4P", "4b", "-1", "-4GiB", "1e9", "0x10"]
NO_SIZES += ["4GiB4", "1,5GB", "4 G iB", "64.5", "64.5B"]
TOO_SMALL = ["0", "0GiB", "0.0", "0.5", "0.9B", "0.0001KiB"]
TOO_LARGE = ["8388608TiB", "9" * 400, "9" * 5000 + "B", "1." + "9" * 400]
NO_TEXT: list[Any] = [None, True, 0, -1, 64.5, [4096], float("inf"), float("nan")]


@pytest.mark.parametrize("value", [*NO_SIZES, *TOO_SMALL, *TOO_LARGE, *NO_TEXT])
def test_what_is_no_size_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ByteSize.parse(value)
    assert caught.value.argument == "size"
    assert caught.value.value is value
    wanted = {"less than 8388608TiB": TOO_LARGE, "a positive size": TOO_SMALL}
    assert all(words in str(caught.value) for words, texts in wanted.items() if value in texts)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0s", 0), ("90 s", 90), ("5min", 300), ("12h", 43200), ("30d", 2592000), ("1.5 h", 5400)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert Duration.parse(text) == seconds


@pytest.mark.parametrize("text", ["0s", "1.9s", "3min"])
def test_a_duration_out_of_bounds_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        InvalidArgumentError, match=f"pause is '{text}'; expected from 2 s to 2 min"
    ):
        Duration.parse(text, name="pause", minimum_s=2.0, maximum_s=120.0)
    with pytest.raises(InvalidArgumentError, match="expected from 0 s to 36500 d"):
        Duration.parse("36501d")


@pytest.mark.parametrize(
    "text", ["", "30", "d", "-1d", "1y", "1 d 2 h", "1e3s", "nan s", "9" * 400 + "s"]
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="30d"):
        Duration.parse(text)


def test_sizes_and_durations_are_written_in_the_largest_unit_that_fits() -> None:
    sizes = 0, 1023, 1024, 1024**2 - 1, 1288490189, 5000 * 1024**4
    assert ", ".join(map(format_size, sizes)) == (
        "0 B, 1023 B, 1.0 KiB, 1.0 MiB, 1.2 GiB, 5000.0 TiB"
    )
    times = -5, 0.5, 59.9, 60, 7200, 864000
    assert ", ".join(map(format_duration, times)) == "0 s, 0 s, 59 s, 1 min, 2 h, 10 d"

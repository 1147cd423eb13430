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
        ("1", 1),
        ("7B", 7),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("3MB", 3 * 1000**2),
        ("512MiB", 512 * 1024**2),
        ("4GB", 4 * 1000**3),
        ("4GiB", 4 * 1024**3),
        ("1TB", 1000**4),
        ("1TiB", 1024**4),
        ("1.5 GB", 1_500_000_000),
        ("4g", 4 * 1024**3),
        ("4G", 4 * 1024**3),
        ("1.5G", 3 * 1024**3 // 2),
        ("64Gi", 64 * 1024**3),
        ("8 k", 8 * 1024),
        ("2T", 2 * 1024**4),
        ("0.5KiB", 512),
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


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "4 Gibibytes",
        "4gib",
        "4gi",
        "4P",
        "4b",
        "-1",
        "-4GiB",
        "1e9",
        "0x10",
        "4GiB4",
        "1,5GB",
        "4 G iB",
    ],
)
def test_what_is_not_a_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ByteSize.parse(text)
    assert (caught.value.argument, caught.value.value) == ("size", text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.0", "0.5", "0.9B", "0.0001KiB"])
def test_less_than_one_byte_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a positive size"):
        ByteSize.parse(text)


@pytest.mark.parametrize("text", ["8388608TiB", "9" * 400, "9" * 5000 + "B", "1." + "9" * 400])
def test_more_than_fits_in_64_bits_is_no_size(text: str) -> None:
    assert ByteSize.parse("9223372036854775807") == 2**63 - 1
    with pytest.raises(InvalidArgumentError, match="less than 8 EiB"):
        ByteSize.parse(text)


@pytest.mark.parametrize("value", [None, True, 0, -1, [4096], float("inf"), float("nan")])
def test_values_that_are_not_text_or_a_positive_number_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        ByteSize.parse(value)


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
    "text",
    ["", "30", "d", "-1d", "1y", "1 d 2 h", "1e3s", "nan s", "9" * 400 + "s"],
)
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="30d"):
        Duration.parse(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (1288490189, "1.2 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_fits(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0 s"), (0.5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (864000, "10 d")],
)
def test_a_duration_is_written_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text

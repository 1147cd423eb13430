"""Sizes as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import InvalidArgumentError
from kvxfer.units import ByteSize


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
        ("0.5KiB", 512),
        ("  4 GiB ", 4 * 1024**3),
        (4096, 4096),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str | int, num_bytes: int) -> None:
    size = ByteSize.parse(text)
    assert size == num_bytes
    assert isinstance(size, ByteSize)


@given(number=st.integers(1, 10**30))
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
        "4K",
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


@pytest.mark.parametrize("value", [None, True, 0, -1, [4096], float("inf"), float("nan")])
def test_values_that_are_not_text_or_a_positive_number_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        ByteSize.parse(value)

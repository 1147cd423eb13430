"""MethodTable: the chosen methods, their text in a configuration, and their measurement."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.copy_engine.method_table import CopyMethod, MethodTable, Way
from kvxfer.errors import InvalidArgumentError

KIB = 1 << 10

tables = st.builds(
    MethodTable, st.fixed_dictionaries({way: st.integers(0, 1 << 40) for way in Way})
)


def table(to_device: int, to_host: int) -> MethodTable:
    return MethodTable({Way.TO_DEVICE: to_device, Way.TO_HOST: to_host})


def clock_of(crossover: float) -> Callable[[Way, CopyMethod, int], float]:
    """Make times of a device whose methods take equally long at a size: to the host, at 33 KiB.

    All measurements copy the same amount: a kernel takes equally long for any size, and a batch
    equally long for each fragment, as the driver's does for small ones.
    """

    def measure(way: Way, method: CopyMethod, fragment_bytes: int) -> float:
        equal = 33 * KIB if way is Way.TO_HOST else crossover
        return 1e-3 if method is CopyMethod.KERNEL else 1e-3 * equal / fragment_bytes

    return measure


def test_smaller_fragments_go_by_kernel_and_others_by_batch() -> None:
    methods = MethodTable()
    assert methods == table(28 * KIB, 0), "by default only small ones towards the device"
    assert methods.choose(Way.TO_DEVICE, 28 * KIB - 0.5) is CopyMethod.KERNEL
    assert methods.choose(Way.TO_DEVICE, 28 * KIB) is CopyMethod.BATCH
    assert methods.choose(Way.TO_HOST, 1) is CopyMethod.BATCH
    assert str(table(28 * KIB, 100)) == "to_device=28KiB,to_host=100"


@pytest.mark.parametrize(
    "kernel_below", [{}, {Way.TO_HOST: 1}, {Way.TO_HOST: -1, Way.TO_DEVICE: 1}]
)
def test_a_table_without_a_size_for_each_way_is_refused(kernel_below: dict[Way, int]) -> None:
    with pytest.raises(InvalidArgumentError, match="kernel_below"):
        MethodTable(kernel_below)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("to_device=28KiB,to_host=16KiB", table(28 * KIB, 16 * KIB)),
        (" to_host = 1.5 KiB , to_device = 0 ", table(0, 1536)),
        ("to_device=100", table(100, 0)),
        ("to_host=1MiB", table(28 * KIB, 1 << 20)),
    ],
)
def test_a_table_is_read_from_text(text: str, expected: MethodTable) -> None:
    assert MethodTable.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "argument", "value"),
    [
        ("", "methods", ""),
        ("to_disk=1KiB", "methods", "to_disk=1KiB"),
        ("to_host=1KiB,to_host=2KiB", "methods", "to_host=2KiB"),
        ("to_host=", "to_host", ""),
        ("to_device=-1", "to_device", "-1"),
    ],
)
def test_what_is_no_table_is_refused_with_the_part_that_is_wrong(
    text: str, argument: str, value: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        MethodTable.parse(text)
    assert (caught.value.argument, caught.value.value) == (argument, value)


@given(methods=tables)
def test_a_table_is_written_as_it_is_read(methods: MethodTable) -> None:
    assert MethodTable.parse(str(methods)) == methods


@pytest.mark.parametrize(
    ("crossover", "measured"), [(1, 0), (5, 6), (10, 12), (17, 24), (31, 24), (33, 48), (1000, 96)]
)
def test_the_measured_size_lies_between_those_that_it_separates(
    crossover: float, measured: int
) -> None:
    assert MethodTable.measure(clock_of(crossover * KIB)) == table(measured * KIB, 48 * KIB)
    equally_fast = MethodTable.measure(lambda *_: 1e-3)
    assert equally_fast == table(0, 0), "the processors are left alone"

"""CPUMethods: what is taken before anything was measured, and what measurements change."""

import pytest

from kvxfer.copy_engine.cpu_methods import (
    LARGEST_BYTES,
    LEAST_GAIN,
    ROUNDS,
    SMALLEST_BYTES,
    Clocks,
    CPUMethod,
    CPUMethods,
    Pattern,
)

KIB = 1 << 10
USUAL = CPUMethods()
EVEN = [Clocks(1.0, 1.0)] * ROUNDS
HALF, SLIGHT = [Clocks(0.5, 0.5)] * ROUNDS, [Clocks(LEAST_GAIN + 0.01, LEAST_GAIN + 0.01)] * ROUNDS
SLOW_ONCE = [Clocks(3.0, 3.0), *EVEN[1:]]
CONTRADICTION = [Clocks(1000.0, 1000.0), *HALF[1:]]
CLOCKS_DIFFER = [Clocks(0.5, 2.0)] * ROUNDS


@pytest.mark.parametrize("pattern", Pattern)
def test_methods_are_tried_in_turn_where_the_usual_sizes_are_not_certain(pattern: Pattern) -> None:
    for num_bytes in (size * KIB for size in (1, 4, 8, 16, 32, 64, 128, 256, 2048)):
        large = 64 * KIB if pattern is Pattern.SCATTERED else LARGEST_BYTES
        usual = CPUMethod.MEMCPY if num_bytes >= large else CPUMethod.ROWS
        assert USUAL.choose(pattern, num_bytes) is usual
    methods, tried = CPUMethods(), []
    while method := methods.next_trial(pattern, 20 * KIB):
        tried.append(method)
        methods.record(pattern, 20 * KIB, method, Clocks(1.0, 1.0))
    assert tried == list(CPUMethod) * ROUNDS
    for known in (1, SMALLEST_BYTES - 1, LARGEST_BYTES, 1 << 30):
        assert methods.next_trial(pattern, known) is None


@pytest.mark.parametrize(
    ("rows", "memcpy", "faster"),
    [
        (HALF, EVEN, CPUMethod.ROWS),
        (EVEN, HALF, CPUMethod.MEMCPY),
        (SLOW_ONCE, HALF, CPUMethod.MEMCPY),
        (EVEN, SLIGHT, None),
        (SLIGHT, EVEN, None),
        (EVEN, CONTRADICTION, None),
        (CONTRADICTION, EVEN, None),
        (EVEN, CLOCKS_DIFFER, None),
        (EVEN, HALF[1:], None),
    ],
)
@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("num_bytes", [8 * KIB, 15 * KIB, 64 * KIB, 255 * KIB])
def test_only_what_is_certainly_faster_is_taken_and_for_the_same_power_of_two_alone(
    pattern: Pattern,
    num_bytes: int,
    rows: list[Clocks],
    memcpy: list[Clocks],
    faster: CPUMethod | None,
) -> None:
    methods = CPUMethods()
    for method, times in ((CPUMethod.ROWS, rows), (CPUMethod.MEMCPY, memcpy)):
        for each in times:
            methods.record(pattern, num_bytes, method, each)
    assert methods.choose(pattern, num_bytes) is (faster or USUAL.choose(pattern, num_bytes))
    for other in (num_bytes // 2, num_bytes * 2):
        assert methods.choose(pattern, other) is USUAL.choose(pattern, other)

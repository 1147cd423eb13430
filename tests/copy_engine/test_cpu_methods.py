"""CPUMethods: what is taken before anything was measured, and what measurements change."""

from itertools import product

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
every_pattern = pytest.mark.parametrize("pattern", Pattern)


Times = list[float] | list[Clocks]


def measured(rows: Times, memcpy: Times, *, fragment_bytes: int) -> CPUMethods:
    methods = CPUMethods()
    for pattern in Pattern:
        for method, times in ((CPUMethod.ROWS, rows), (CPUMethod.MEMCPY, memcpy)):
            for each in times:
                clocks = each if isinstance(each, Clocks) else Clocks(each, each)
                methods.record(pattern, fragment_bytes, method, clocks)
    return methods


def usual_choice(pattern: Pattern, fragment_bytes: int) -> CPUMethod:
    return CPUMethods().choose(pattern, fragment_bytes)


def choices(methods: CPUMethods) -> dict[tuple[Pattern, int], CPUMethod]:
    sizes = [size * KIB for size in (1, 4, 8, 16, 32, 64, 128, 256, 2048)]
    return {case: methods.choose(*case) for case in product(Pattern, sizes)}


def test_before_anything_is_measured_the_usual_sizes_decide() -> None:
    taken = choices(CPUMethods())
    for (pattern, num_bytes), method in taken.items():
        large = 64 * KIB if pattern is Pattern.SCATTERED else LARGEST_BYTES
        assert method is (CPUMethod.MEMCPY if num_bytes >= large else CPUMethod.ROWS)


@every_pattern
def test_methods_are_tried_in_turn_and_equally_often(pattern: Pattern) -> None:
    methods, tried = CPUMethods(), []
    while method := methods.next_trial(pattern, 20 * KIB):
        tried.append(method)
        methods.record(pattern, 20 * KIB, method, Clocks(1.0, 1.0))
    assert tried == list(CPUMethod) * ROUNDS
    for known in (1, SMALLEST_BYTES - 1, LARGEST_BYTES, 1 << 30):
        assert methods.next_trial(pattern, known) is None


@every_pattern
@pytest.mark.parametrize("fragment_bytes", [8 * KIB, 15 * KIB, 64 * KIB, 255 * KIB])
def test_the_faster_method_is_taken_for_sizes_of_the_same_power_of_two_alone(
    pattern: Pattern, fragment_bytes: int
) -> None:
    usual = choices(CPUMethods())
    for rows, memcpy, faster in (
        (1.0, 2.0, CPUMethod.ROWS),
        (2.0, 1.0, CPUMethod.MEMCPY),
        (1.0, LEAST_GAIN + 0.01, usual_choice(pattern, fragment_bytes)),
        (LEAST_GAIN + 0.01, 1.0, usual_choice(pattern, fragment_bytes)),
    ):
        methods = measured([rows] * ROUNDS, [memcpy] * ROUNDS, fragment_bytes=fragment_bytes)
        assert methods.choose(pattern, fragment_bytes) is faster
        others = {case for case in usual if case[1] // 2 >= fragment_bytes}
        others |= {case for case in usual if case[1] <= fragment_bytes // 2}
        assert all(methods.choose(*case) is usual[case] for case in others)


def of(*seconds: float) -> Times:
    return list(seconds)


SLOW_ONCE, CONTRADICTION = of(3.0, 1.0, 1.0), of(1000.0, 1.0, 1.0)
CLOCKS: list[Times] = [[Clocks(0.5, 2.0)] * ROUNDS, [Clocks(2.0, 0.5)] * ROUNDS]


@every_pattern
@pytest.mark.parametrize("fragment_bytes", [8 * KIB, 128 * KIB])
def test_what_disturbs_one_trial_changes_nothing_and_contradictions_leave_the_usual_sizes(
    pattern: Pattern, fragment_bytes: int
) -> None:
    methods = measured(SLOW_ONCE, of(2.0, 2.0, 2.0), fragment_bytes=fragment_bytes)
    assert methods.choose(pattern, fragment_bytes) is CPUMethod.ROWS
    usual = usual_choice(pattern, fragment_bytes)
    for rows, memcpy in (
        (CONTRADICTION, of(0.01, 0.01, 0.01)),
        (of(0.01, 0.01, 0.01), CONTRADICTION),
        *((of(1.0, 1.0, 1.0), times) for times in CLOCKS),
    ):
        methods = measured(rows, memcpy, fragment_bytes=fragment_bytes)
        assert methods.choose(pattern, fragment_bytes) is usual
        assert methods.next_trial(pattern, fragment_bytes) is None, "it is tried for ever"


@every_pattern
def test_as_long_as_trials_are_missing_the_usual_sizes_decide(pattern: Pattern) -> None:
    methods = measured([1.0] * ROUNDS, [0.1] * (ROUNDS - 1), fragment_bytes=8 * KIB)
    assert methods.choose(pattern, 8 * KIB) is usual_choice(pattern, 8 * KIB)

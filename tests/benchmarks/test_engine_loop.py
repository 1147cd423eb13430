"""`make bench NAME=engine-loop`: it moves the blocks that it reports."""

import pytest

from benchmarks import engine_loop
from kvxfer.transfer.engine import TransferEngine


def test_every_case_is_compared_with_a_copy_and_with_a_fixed_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submitted = 0
    for name in ("submit_load", "submit_store"):
        original = getattr(TransferEngine, name)

        def submit(*args: object, original: object = original) -> object:
            nonlocal submitted
            submitted += 1
            return original(*args)  # type: ignore[operator]

        monkeypatch.setattr(TransferEngine, name, submit)
    rows = engine_loop.run(
        quick=True, block_sizes=(4 << 10, 8 << 10), hit=(3, 8 << 10), long_hit=(5, 8 << 10)
    )
    counts = {"4 KiB": [1, 16], "8 KiB": [1, 3, 16]}
    assert [row.case for row in rows] == [
        f"{move} {count} x {size}, polled, {against}"
        for size, each in counts.items()
        for count in each
        for move in ("load", "store")
        for against in ("against one copy", "beyond one copy, against 60 us")
    ] + ["load 5 x 8 KiB, polled, verified, against not"]
    rounds = 10 + 1
    of_long_hit = 2 * (1 + 5 + 1)
    stored_once = "a load is stored once, before it is measured"
    assert submitted == 5 * (2 * rounds + 1) + of_long_hit, stored_once
    goals = [row.case for row in rows if row.goal]
    assert [case for case in goals if "against one copy" in case] == [
        "load 3 x 8 KiB, polled, against one copy",
        "store 3 x 8 KiB, polled, against one copy",
    ]
    assert all("1 x " in case for case in goals if "beyond" in case)

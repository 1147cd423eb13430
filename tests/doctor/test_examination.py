"""Examination: deadlines, checks that fail, and the order of findings."""

import threading

from kvxfer.doctor import Check, PlannedCheck, Result, Severity, error, ok, run_checks, warning


def planned(run: object, num_steps: int = 1) -> PlannedCheck:
    return PlannedCheck(Check.NIXL, "planted", run, num_steps)  # type: ignore[arg-type]


def test_a_check_that_hangs_is_a_finding_within_its_deadline() -> None:
    may_end = threading.Event()

    def hang() -> Result:
        may_end.wait(60)
        return ok("late")

    (late, sound) = run_checks([planned(hang), planned(lambda: ok("sound"))], timeout_s=0.2)
    may_end.set()
    assert (late.severity, late.subject) == (Severity.ERROR, "planted")
    assert "does not answer within 0.2 s" in late.found
    assert late.why
    assert late.mend
    assert sound.found == "sound"


def test_a_check_that_fails_is_a_finding_with_its_error_made_printable() -> None:
    def fail() -> Result:
        raise RuntimeError("broken\x1b[2J")

    (finding,) = run_checks([planned(fail)], timeout_s=10)
    assert (finding.check, finding.severity) == (Check.NIXL, Severity.ERROR)
    assert finding.found == r"cannot be examined: RuntimeError: broken\x1b[2J"


def test_the_worst_finding_is_first_and_all_of_a_check_are_kept() -> None:
    several = [
        ok("a"),
        warning("b", why="w", mend="m"),
        error("c", why="w", mend="m"),
        error("d", why="w", mend="m"),
    ]
    findings = run_checks([planned(lambda: iter(several))], timeout_s=10)
    assert [finding.found for finding in findings] == ["c", "d", "b", "a"]

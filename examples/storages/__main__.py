"""`python -m examples.storages`: what storages do when something fails, as in README.md."""

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from examples.storages.injection import CALLERS, INJECTIONS
from examples.storages.probes import PROBES, in_folder
from examples.storages.storages import Storage, find_storages


class Results:
    """Plug-in of pytest that counts outcomes, and lists the tests that fail, by class."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.failed: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test."""
        if report.when == "call" or report.outcome == "skipped":
            _, of, test = report.nodeid.split("::")
            self.counts[of][report.outcome] += 1
            if report.failed:
                self.failed[of].append(test.removeprefix("test_").replace("_", " "))


def damage(storages: Sequence[Storage]) -> list[str]:
    """Run all probes; return the lines of a table with a column for each storage."""
    lines = _head([f"{each.name} {each.version}" for each in storages])
    for each in PROBES:
        cells = [in_folder(partial(each.run, storage)) for storage in storages]
        lines.append(f"| {each.what} | " + " | ".join(cells) + " |")
    return lines


def faults(storages: Sequence[Storage]) -> list[str]:
    """Inject all faults; return the lines of a table with a column for each kind of caller.

    Where storages differ, each result names its storages.
    """
    lines = _head(list(CALLERS))
    for each in INJECTIONS:
        cells = []
        for timeout_s in CALLERS.values():
            seen = defaultdict(list)
            for storage in storages:
                run = partial(each.run, storage, timeout_s=timeout_s)
                seen[in_folder(run)].append(storage.name)
            named = [f"{text} ({', '.join(names)})" for text, names in seen.items()]
            cells.append("; ".join(named if len(seen) > 1 else seen))
        lines.append(f"| {each.what} | " + " | ".join(cells) + " |")
    return lines


def _head(names: Sequence[str]) -> list[str]:
    return ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]


def conformance(storages: Sequence[Storage]) -> list[str]:
    """Run the conformance suite; return a line for each storage, and for each test that failed."""
    results = Results()
    suite = str(Path(__file__).with_name("conformance.py"))
    ours = ["addopts=--import-mode=importlib", "filterwarnings=default"]
    options = ["-p", "no:terminal", *(part for each in ours for part in ("-o", each))]
    pytest.main([*options, suite], plugins=[results])
    names = ["TestFirst", *(f"TestOther{number}" for number in range(len(storages) - 1))]
    lines = []
    for storage, name in zip(storages, names, strict=True):
        counts = results.counts[name]
        total = counts["passed"] + counts["failed"]
        lines.append(f"- {storage.name}: {counts['passed']} of {total} tests pass.")
        lines += [f"    - {test}" for test in results.failed[name]]
    return lines


SECTIONS: Mapping[str, Callable[[Sequence[Storage]], list[str]]] = {
    "damage": damage,
    "faults": faults,
    "conformance": conformance,
}


def main() -> None:
    """Print the sections that were asked for, by default all."""
    parser = argparse.ArgumentParser(prog="python -m examples.storages", description=__doc__)
    rule = f"{', '.join(SECTIONS)}; all by default"
    parser.add_argument(
        "sections", nargs="*", choices=[*SECTIONS, []], metavar="SECTION", help=rule
    )
    storages = find_storages()
    for name in parser.parse_args().sections or SECTIONS:
        print("\n".join(SECTIONS[name](storages)), end="\n\n")


if __name__ == "__main__":
    main()

"""`python -m examples.storages`: what storages do when something fails, as a table."""

import argparse
import asyncio
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from examples.storages.probes import PROBES, probe
from examples.storages.storages import Storage, find_storages


class Results:
    """Plug-in of pytest that counts what passes, by class, and lists what fails."""

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


def table(storages: list[Storage]) -> list[str]:
    """Run all probes; return the lines of the table."""
    lines = ["| | " + " | ".join(f"{each.name} {each.version}" for each in storages) + " |"]
    lines += ["|---" * (len(storages) + 1) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        for number, each in enumerate(PROBES):
            cells = [
                asyncio.run(probe(storage, each, Path(folder, f"{number}-{index}")))
                for index, storage in enumerate(storages)
            ]
            lines.append(f"| {each.what} | " + " | ".join(cells) + " |")
    return lines


def conformance(storages: list[Storage]) -> list[str]:
    """Run the conformance suite; return a line for each storage, and those for what failed."""
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


def main() -> None:
    """Print the table, and then what the conformance suite finds."""
    parser = argparse.ArgumentParser(prog="python -m examples.storages", description=__doc__)
    parser.add_argument("--conformance", action="store_true", help="the conformance suite as well")
    options = parser.parse_args()
    storages = find_storages()
    print("\n".join(table(storages)))
    if options.conformance:
        print()
        print("\n".join(conformance(storages)))


if __name__ == "__main__":
    main()

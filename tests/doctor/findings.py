"""Findings of the doctor, as tests expect them."""

import re
from pathlib import Path

from kvxfer.doctor import Finding, Severity, examine

OK, WARNING, ERROR = Severity.OK, Severity.WARNING, Severity.ERROR
TIMEOUT_S = 20.0


def expect(finding: Finding, severity: Severity, *patterns: str) -> None:
    """Check a finding: a bad one, and only a bad one, says what it costs and how to mend it."""
    assert finding.severity is severity, finding
    explained = bool(finding.why and finding.mend)
    assert finding.found
    assert explained == (severity is not OK), finding
    for pattern in patterns:
        assert re.search(pattern, f"{finding.found}\n{finding.mend}"), finding


def find(
    url: str, check: str, timeout_s: float = TIMEOUT_S, *, subject: str | None = None
) -> Finding:
    """Examine a URL; return the only finding of a check."""
    findings = examine([url], timeout_s=timeout_s)
    (finding,) = (each for each in findings if each.check == check)
    assert finding.subject == subject or subject is None
    return finding


def make_root(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root

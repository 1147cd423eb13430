"""Writes the golden set of a release: `python -m tests.golden tests/golden/0.1.0`."""

import sys
import tempfile
from pathlib import Path

from tests.golden.golden_set import write_set

with tempfile.TemporaryDirectory() as scratch:
    write_set(Path(sys.argv[1]), Path(scratch))

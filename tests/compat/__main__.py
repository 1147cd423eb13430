"""`make compat`: tests other releases of engines, then writes which ones passed into the pages.

Arguments are those of pytest, beside `-m compat`: what to ignore, never what to select.
"""

import sys

import pytest

from tests.compat import matrix
from tests.installed_aside import REPOSITORY

status = pytest.main(["-m", "compat", *sys.argv[1:]])
if status == pytest.ExitCode.OK:
    matrix.write(REPOSITORY)
sys.exit(status)

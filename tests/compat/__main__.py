"""`make compat`: tests other releases of engines, then writes those that passed into the pages.

Arguments go to pytest, besides `-m compat`: tests to ignore, never tests to select.
"""

import sys

import pytest

from tests.compat import matrix
from tests.interpreter import REPOSITORY

status = pytest.main(["-m", "compat", *sys.argv[1:]])
if status == pytest.ExitCode.OK:
    matrix.write(REPOSITORY)
sys.exit(status)

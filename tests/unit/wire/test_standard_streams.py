"""A process whose descriptors were closed."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, sys
for number in map(int, sys.argv[1].split(",")):
    os.close(number)
sys.stdout = sys.stdout if "1" not in sys.argv[1] else None
sys.stderr = sys.stderr if "2" not in sys.argv[1] else None
from octavo.standard_streams import ensure_standard_streams
ensure_standard_streams()
for number in range(3):
    os.fstat(number)
pipe = os.pipe()
assert min(pipe) > 2, pipe
sys.stdout.write("out\\n"); sys.stdout.flush()
sys.stderr.write("err\\n"); sys.stderr.flush()
os._exit(7)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "0,1", "0,1,2"])
def test_closed_descriptors_are_opened(closed: str) -> None:
    """As /dev/null: nothing else gets their numbers, and to write is no error."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CODE, closed],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout == ("" if "1" in closed else "out\n")
    assert done.stderr == ("" if "2" in closed else "err\n")

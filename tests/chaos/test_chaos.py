"""A few drawn episodes; `bash .ci/run chaos` plays 200.

A process of its own plays them: it forks ranks before JAX has a backend.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

WORLD = pathlib.Path(__file__).parent / "world.py"
COUNT = int(os.environ.get("JAX_EP_TEST_CHAOS", "4"))


@pytest.mark.timeout(120 + 80 * COUNT)
def test_nothing_crashes_hangs_lies_or_blames_the_innocent():
    done = subprocess.run(
        [sys.executable, str(WORLD), "--count", str(COUNT)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-12000:]
    assert f"{COUNT} passed, 0 failed" in done.stdout, done.stdout[-12000:]

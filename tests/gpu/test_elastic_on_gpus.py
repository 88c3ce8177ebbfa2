"""Elastic groups on GPUs, a process each: tests/chaos/elastic.py with devices."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parents[1] / "chaos" / "elastic.py"

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize("ranks", [2, 4])
def test_survivors_go_on_exactly_and_take_ranks_back(ranks: int) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and `pytest -m gpu`")
    gpus = str(min(jax.local_device_count(), ranks))
    command = [sys.executable, str(PROGRAM), "--kills", "8", "--gpus", gpus, "--ranks", str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-12000:]
    assert re.search(r"^8 kills, the slowest", done.stdout, re.MULTILINE), done.stdout

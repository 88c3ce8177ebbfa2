"""Group.check does not wait for the thread that watches what kernels report."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "check_at_once.py"

pytestmark = pytest.mark.gpu


def test_check_says_what_a_kernel_found_as_soon_as_its_result_is_there() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    environment = {**os.environ, "JAX_EP_DEBUG": "1"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert "found 20 of 20" in done.stdout, done.stdout + done.stderr

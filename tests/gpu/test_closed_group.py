"""Programs that outlive their group, in a process of its own: what fails there spoils its GPUs."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "closed.py"

pytestmark = pytest.mark.gpu


def test_a_captured_program_after_close_is_an_error_or_nan_and_jax_works_on() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "closed DONE" in done.stdout
    print(done.stdout)

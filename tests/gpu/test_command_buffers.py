"""Command-buffer replay, in a process of its own because of its XLA flags."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "replay.py"

pytestmark = pytest.mark.gpu


def test_calls_are_replayed_with_other_routing_and_addresses() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replay DONE" in done.stdout
    print(done.stdout)

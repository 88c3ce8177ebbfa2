"""Command buffers, in processes of their own because of their XLA flags."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import jax
import pytest

PROGRAMS = pathlib.Path(__file__).parent / "programs"

pytestmark = pytest.mark.gpu


def run(program: str) -> str:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    done = subprocess.run(
        [sys.executable, PROGRAMS / f"{program}.py"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{program} DONE" in done.stdout
    print(done.stdout)
    return done.stdout


def test_calls_are_replayed_with_other_routing_and_addresses() -> None:
    run("replay")


def test_every_execution_is_counted_whoever_launches_it() -> None:
    """Under default flags; the output says what XLA captures."""
    lines = [json.loads(line) for line in run("captured").splitlines() if line.startswith("{")]
    assert len(lines) == 12
    for line in lines:
        assert line["combines_per_run"] == line["pairs"], line
        # A pair is two calls in mode ll, three in mode ht (the plan).
        assert line["launches_per_run"] <= line["pairs"] * (2 if line["mode"] == "ll" else 3), line

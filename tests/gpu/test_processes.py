"""Every way to spread ranks over processes and GPUs, with whole training loops."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "training_loop.py"
LIMIT_S = 150  # 2,000 steps must take no more than 60 s; compilation and start come on top

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


def train(*launch: str, steps: int = 2000, mode: str = "ht") -> None:
    if jax.default_backend() != "gpu" or len(jax.devices()) < 4:
        pytest.skip("needs 4 GPUs and `pytest -m gpu`")
    command = [sys.executable, "-m", "jax_ep", "launch", *launch, str(PROGRAM)]
    command += ["--steps", str(steps), "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    times = re.findall(rf"steps {steps} ([\d.]+)s .* DONE", done.stdout)
    assert times, done.stdout
    print(f"{launch}: {steps} steps in {max(map(float, times)):.1f} s")
    assert max(map(float, times)) <= 60


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_one_process_with_four_gpus(mode: str) -> None:
    train("-n", "1", "--gpus-per-process", "4", mode=mode)


def test_four_processes_with_one_gpu_each() -> None:
    train("-n", "4", "--gpus-per-process", "1")


def test_four_processes_that_see_only_their_gpu() -> None:
    train("-n", "4", "--gpus-per-process", "1", "--hide-other-gpus", steps=300)


def test_two_processes_with_two_gpus_each() -> None:
    train("-n", "2", "--gpus-per-process", "2")

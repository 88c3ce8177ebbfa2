"""Every way to spread all GPUs of this machine over processes, with whole training loops."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "training_loop.py"
STEPS = 2000
MAX_SECONDS = 60  # of STEPS steps; compilation and start come on top
LIMIT_S = 150

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


def num_gpus() -> int:
    """All GPUs of this machine; skips where there are not two."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    count = len(jax.devices())
    if count < 2:
        pytest.skip("needs 2 GPUs, JAX sees 1")
    return count


def train(processes: int, *options: str, steps: int = STEPS, mode: str = "ht") -> None:
    per_process = num_gpus() // processes
    launch = ["-n", str(processes), "--gpus-per-process", str(per_process), *options]
    command = [sys.executable, "-m", "jax_ep", "launch", *launch, str(PROGRAM)]
    command += ["--steps", str(steps), "--mode", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    times = re.findall(rf"steps {steps} ranks {num_gpus()} ([\d.]+)s .* DONE", done.stdout)
    assert len(times) == processes, done.stdout
    print(f"{launch}: {steps} steps in {max(map(float, times)):.1f} s")
    assert max(map(float, times)) <= MAX_SECONDS


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_one_process_with_all_gpus(mode: str) -> None:
    train(1, mode=mode)


def test_one_process_for_each_gpu() -> None:
    train(num_gpus())


def test_one_process_for_each_gpu_that_sees_no_other() -> None:
    train(num_gpus(), "--hide-other-gpus", steps=300)


def test_two_processes_with_half_of_the_gpus_each() -> None:
    if num_gpus() % 2 or num_gpus() == 2:
        pytest.skip(f"needs 4, 6 or 8 GPUs, JAX sees {num_gpus()}")
    train(2)

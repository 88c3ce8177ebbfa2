"""create_group waits for this process's GPUs: it may allocate where a kernel waits for a peer."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "create_while_running.py"
LIMIT_S = 120

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize("is_one_process", [True, False])
def test_a_group_is_created_behind_what_runs(is_one_process: bool) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    count = len(jax.devices())
    if not is_one_process and count < 2:
        pytest.skip("a process for each GPU needs 2 GPUs, JAX sees 1")
    processes = 1 if is_one_process else count
    launch = ["launch", "-n", str(processes), "--gpus-per-process", str(count // processes)]
    command = [sys.executable, "-m", "jax_ep", *launch, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert done.stdout.count("create DONE") == processes, text
    assert done.stdout.count("was_running 1") == processes, text
    assert done.stdout.count("had_ended 1") == processes, text

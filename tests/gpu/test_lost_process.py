"""A dead process: NaN, its name, and a smaller group, inside a node and between nodes."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "lose_a_process.py"
LIMIT_S = 120
PEER_TIMEOUT_S = 4.0
SLACK_S = 4.0

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize("mode", ["ht", "ll"])
@pytest.mark.parametrize(
    ("node_size", "transport"), [(None, "auto"), (1, "shm"), (1, "cuda")], ids=str
)
def test_a_killed_process_is_named_and_the_others_go_on(
    mode: str, node_size: int | None, transport: str
) -> None:
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs and `pytest -m gpu`")
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2", "--gpus-per-process", "1"]
    command += [str(PROGRAM), "--mode", mode, "--peer-timeout", str(PEER_TIMEOUT_S)]
    command += ["--transport", transport]
    if node_size is not None:
        command += ["--node-size", str(node_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    text = done.stdout + done.stderr
    assert "went_on 1" in done.stdout, text
    seconds = re.search(r"seconds ([\d.]+)", done.stdout)
    assert seconds is not None, text
    assert float(seconds[1]) < PEER_TIMEOUT_S + SLACK_S, text
    error = re.search(r"error (.*)", done.stdout)
    assert error is not None, text
    assert "rank 1" in error[1], text
    outcomes = re.search(r"outcomes \[(.*)\]", done.stdout)
    assert outcomes is not None, text
    # Never half a result.
    assert set(re.findall(r"'([^']*)'", outcomes[1])) <= {"right", "poisoned"}, text

"""Group.report on GPUs: a rank that waits tells by itself for whom, also in the log."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAM = pathlib.Path(__file__).parent / "programs" / "late_rank.py"

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]


@pytest.mark.parametrize("mode", ["ht", "ll"])
@pytest.mark.parametrize("node_size", [None, 1])
def test_a_late_rank_is_named_while_the_others_wait(mode: str, node_size: int | None) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and `pytest -m gpu`")
    # Both processes use the first GPU, whose kernels then take turns.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", "2", str(PROGRAM), "--mode", mode]
    command += [] if node_size is None else ["--node-size", str(node_size)]
    done = subprocess.run(
        command,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": first},
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    page = re.findall(r"PAGE (.*)", done.stdout)
    late = next(
        number
        for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1)
        if "# DISPATCH" in line
    )
    assert re.search(r"rank 1 \(process 1\) has kept rank 0 waiting for 2\.\d s: ", page[0]), text
    waits = next(line for line in page if line.startswith("  rank 0"))
    call = "plan" if mode == "ht" else "dispatch"
    assert re.search(rf"{call}.* at .*late_rank\.py:{late}: waits for rank 1 for 2\.\d s", waits)
    idle = next(line for line in page if line.startswith("  rank 1"))
    if node_size is None:
        newest = r"its host has enqueued \d+, the newest \d+\.\d s ago: combine"
        assert re.search(newest, idle), text
    else:
        assert "in another node" in idle, text
    assert "a rank has waited longer than a tenth of timeout_s" in text
    after = re.findall(r"AFTER (.*)", done.stdout)
    assert len(after) == 2 and all("nobody is waiting" in line for line in after), text

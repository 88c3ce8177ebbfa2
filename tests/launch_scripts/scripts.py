"""Starts the files of examples/launch with the smallest training, on CPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "examples" / "launch"
TRAIN = "examples/train_moe_lm.py"
PROCESSES = 2
LIMIT_S = 500.0
OPTIONS = (
    *("--steps=2", "--batch=16", "--length=32"),
    *("--width=32", "--layers=1", "--heads=2", "--expert-width=32"),
)
OF_LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "JAX_COORDINATOR", "JAX_NUM_", "JAX_PROCESS", "TPU_")


def environment(**extra: object) -> dict[str, str]:
    """This process's, without traces of launchers; `python` is the one of the tests."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith((*OF_LAUNCHERS, "KUBERNETES_")) and name != "NPROC"
    }
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    plain = {"JAX_PLATFORMS": "cpu", "TERM": "dumb", "COLUMNS": "200"}  # mpirun gives a terminal
    return env | plain | {name: str(value) for name, value in extra.items()}


def run(*command: object, limit_s: float = LIMIT_S, **extra: object) -> str:
    """Output of a command that must succeed; `extra` goes into its environment."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} exited {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def check_trained(output: str, processes: int = PROCESSES) -> None:
    """The output is of one job of `processes` ranks that trained to its end."""
    assert f"on {processes} ranks in {processes} processes" in output, output[-6000:]
    assert len(re.findall(r"final held-out loss [0-9.]+ nats/byte", output)) == 1, output[-6000:]

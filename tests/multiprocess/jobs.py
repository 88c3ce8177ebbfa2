"""Jobs under `python -m jax_ep launch`, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 200.0  # for a whole job: generous, a job that hangs fails all the same


def environment(**extra: str) -> dict[str, str]:
    dropped = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**env, "JAX_PLATFORMS": "cpu", **extra}


def command(script: Path, *options: str, arguments: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, "-m", "jax_ep", "launch", *options, str(script), *arguments]


def launch(
    script: Path, *options: str, arguments: tuple[str, ...] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(script, *options, arguments=arguments),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment(**extra),
        check=False,
    )


def start(script: Path, *options: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(script, *options),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=environment(),
    )


def wait_for_lines(process: subprocess.Popen[str], word: str, count: int) -> list[str]:
    assert process.stdout is not None
    found: list[str] = []
    while len(found) < count:
        line = process.stdout.readline()
        assert line, f"the job ended after {found}"
        if word in line:
            found.append(line)
    return found


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def all_gone(pids: list[int], within_s: float = 60.0) -> bool:
    limit = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


# A program that prints the signals it gets, and ends well after SIGTERM alone.
SAYS_WHAT_IT_GOT = """
    import os, signal, sys, time
    def stop(number, frame):
        print("got", number)
        sys.exit(0 if number == signal.SIGTERM else 4)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("pid", os.getpid())
    while True:
        time.sleep(0.1)
    """

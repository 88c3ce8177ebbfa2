"""Runs a test program under `python -m jax_ep launch` and returns what it printed."""

import pathlib
import re
import subprocess
import sys
import time

import children

PROGRAMS = pathlib.Path(__file__).parent / "programs"


class Outcome:
    """Exit code, seconds, and the lines of each process without their prefix."""

    def __init__(self, returncode, seconds, text):
        self.returncode = returncode
        self.seconds = seconds
        self.text = text

    def lines(self, process):
        return [
            match.group(2)
            for match in re.finditer(r"^\[(\d+)\] ?(.*)$", self.text, re.MULTILINE)
            if int(match.group(1)) == process
        ]

    def value(self, process, key):
        """The rest of the line `KEY rest` that `process` printed, exactly once."""
        found = [
            line[len(key) :].strip() for line in self.lines(process) if line.startswith(key + " ")
        ]
        assert len(found) == 1, (
            f"process {process} printed {key!r} {len(found)} times:\n{self.text[-6000:]}"
        )
        return found[0]


def launch(program, *args, processes, devices_per_process=1, env=None, timeout=1100, grace=60):
    """Starts the program; `env` adds to this process's environment."""
    command = [sys.executable, "-m", "jax_ep", "launch", "-n", str(processes)]
    command += ["--devices-per-process", str(devices_per_process), "--grace", str(grace)]
    command += [str(PROGRAMS / program), *map(str, args)]
    start = time.monotonic()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=children.quick() | (env or {}),
        timeout=timeout,
    )
    return Outcome(done.returncode, time.monotonic() - start, done.stdout)

"""Which lines of XLA and Gloo `launch` leaves out: known harmless ones, and never an error."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import children
import pytest

from jax_ep._launch import noise

GLOO = "[Gloo] Rank 1 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3"
RECOVERABLE = (
    "W1123 13:43:08.691411   18041 coordination_service.cc:185] [6401385159354579470] Using "
    "experimental recoverable task feature. The default shutdown barrier will only block "
    "non-recoverable tasks. If a synchronized shutdown is desired, the user / library should "
    "invoke `WaitAtBarrier` explicitly at the end of the program."
)
EARLY = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"


@pytest.mark.parametrize("line", [GLOO, RECOVERABLE, EARLY])
def test_known_lines_are_noise(line: str) -> None:
    assert noise.is_harmless(line.encode())
    assert not noise.is_harmless(f"user: {line}".encode())
    assert not noise.is_harmless(f"{line} FATAL: disk full".encode())


@pytest.mark.parametrize(
    "line",
    [
        "",
        GLOO.replace("connected to 3", "connected to 2"),
        GLOO.replace("is connected", "failed to connect"),
        RECOVERABLE.replace("W1123", "E1123"),
        "E1123 13:43:08.691411   18041 coordination_service.cc:900] task 1 has failed",
        "W1123 13:43:08.691411   18041 coordination_service.cc:900] task 1 has failed",
        "WARNING: something of the user's",
        "step 20  loss 2.5",
    ],
)
def test_everything_else_is_shown(line: str) -> None:
    assert not noise.is_harmless(line.encode())


@pytest.mark.multiprocess
@pytest.mark.parametrize("level", ["warning", "debug"])
def test_the_launcher_leaves_them_out_unless_it_debugs(tmp_path, level: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            print({GLOO!r})
            print({RECOVERABLE!r}, file=sys.stderr)
            print("an error", file=sys.stderr)
            print("a result")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-m", "jax_ep", "launch", "-n", "1", str(script)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**children.plain(), "JAX_PLATFORMS": "cpu", "JAX_EP_LOG": level},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[0] a result" in done.stdout and "[0] an error" in done.stderr
    assert ("Gloo" in done.stdout) == (level == "debug")
    assert ("recoverable" in done.stderr) == (level == "debug")

"""Descriptors reach the processes that they are for, and nobody else on this host."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jax_ep._runtime import descriptors

NOBODY = 65534
LIMIT_S = 60.0
SECRET = b"weights of a model"

# Loads the file alone: a stranger may not be allowed to read our packages, nor need to.
CHILD = """
import os, sys
exec(compile(sys.stdin.read(), "descriptors.py", "exec"))
if sys.argv[4] == "as nobody":
    os.setgroups([])
    os.setgid({nobody})
    os.setuid({nobody})
if sys.argv[1] == "listed":
    names = [line.split()[-1] for line in open("/proc/net/unix") if "@jax_ep-" in line]
    sys.argv[1] = next(name[1:] for name in names if name.endswith(sys.argv[3]))
try:
    descriptors = fetch(sys.argv[1], int(sys.argv[2]), {limit})
    print(os.pread(descriptors[0], 100, 0).decode())
except OSError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture
def secret_file() -> Iterator[int]:
    descriptor = os.memfd_create("secret")
    os.write(descriptor, SECRET)
    yield descriptor
    os.close(descriptor)


def _start(address: str, *, listed: bool = False, nobody: bool = False) -> subprocess.Popen[str]:
    """A process that fetches as soon as it is told the code, whose pid is known before."""
    code = CHILD.format(nobody=NOBODY, limit=LIMIT_S)
    arguments = ["listed" if listed else address, str(os.getpid()), address[-8:]]
    arguments.append("as nobody" if nobody else "as we are")
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _fetched_by(child: subprocess.Popen[str]) -> str:
    with open(descriptors.__file__, encoding="utf-8") as source:
        text, _ = child.communicate(source.read(), timeout=LIMIT_S)
    return text.strip()


def test_a_process_of_the_group_gets_them(secret_file: int) -> None:
    pids: list[int] = []
    with descriptors.serve([secret_file], pids) as address:
        child = _start(address)
        pids.append(child.pid)
        assert _fetched_by(child) == SECRET.decode()


def test_another_process_of_this_user_does_not(secret_file: int) -> None:
    with descriptors.serve([secret_file], [os.getppid()]) as address:
        text = _fetched_by(_start(address))
    assert text.startswith("PermissionError") and "gives no descriptors" in text


def test_another_user_does_not_who_finds_the_name_in_proc(secret_file: int) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    pids: list[int] = []
    with descriptors.serve([secret_file], pids) as address:
        child = _start(address, listed=True, nobody=True)
        pids.append(child.pid)  # even so
        text = _fetched_by(child)
    assert text.startswith("PermissionError"), text


def test_descriptors_are_not_taken_from_somebody_else(secret_file: int) -> None:
    with (
        descriptors.serve([secret_file], [os.getpid()]) as address,
        pytest.raises(PermissionError, match=f"served by process {os.getpid()}"),
    ):
        descriptors.fetch(address, os.getppid(), LIMIT_S)

"""Group.report while a proxy's thread stands still: it is named, and not a circle of ranks.

A debugger's means: another process may stop a single thread.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("jax_ep._core")

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207  # sys/ptrace.h
WAIT_FOR_THREADS = 0x40000000  # __WALL
STALL_S = 1.5

PROGRAM = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
import jax_ep
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("ep",))
x = np.ones((32, 16), np.float32)
ids = np.tile(np.array([[0, 5]], np.int32), (32, 1))
config = jax_ep.Config(num_experts=8, top_k=2, hidden=16, max_tokens=8, dtype=jnp.float32,
                       node_size=2, timeout_s=60)
with jax_ep.create_group(mesh, "ep", config) as group:

    def layer(x, ids):
        recv = jax_ep.dispatch(group, x, ids, mode=sys.argv[1])
        return jax_ep.combine(group, recv.x, recv)

    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    step(x, ids).block_until_ready()
    print("READY", flush=True)
    sys.stdin.readline()
    out = step(x, ids)
    time.sleep(STALL_S)
    print(group.report() + "END", flush=True)
    out.block_until_ready()
    np.testing.assert_array_equal(out, 2 * x)
    print("DONE", flush=True)
"""


def ptrace(request: int, thread: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long] * 4
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, thread, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def is_proxy(task: pathlib.Path) -> bool:
    return (task / "comm").read_text().startswith("jax_ep proxy")


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_a_proxy_that_stands_still_is_named(mode: str) -> None:
    program = PROGRAM.replace("STALL_S", str(STALL_S))
    with subprocess.Popen(
        [sys.executable, "-c", program, mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdin is not None and job.stdout is not None
        try:
            assert job.stdout.readline() == "READY\n"
            tasks = pathlib.Path(f"/proc/{job.pid}/task").iterdir()
            (thread,) = [int(task.name) for task in tasks if is_proxy(task)]
            try:
                ptrace(PTRACE_SEIZE, thread)
            except OSError as error:
                pytest.skip(f"this machine lets nobody stop a thread: {error}")
            ptrace(PTRACE_INTERRUPT, thread)
            os.waitpid(thread, WAIT_FOR_THREADS)
            print("go", file=job.stdin, flush=True)
            page = list(iter(job.stdout.readline, "END\n"))
            ptrace(PTRACE_DETACH, thread)
            assert job.stdout.readline() == "DONE\n", page
        finally:
            job.kill()
    assert "its proxy has not taken" in page[0], page
    assert "so the proxy or its network stands still" in page[0], page
    assert "circle" not in page[0], page

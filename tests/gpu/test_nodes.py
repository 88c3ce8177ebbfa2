"""GPUs of one host as several virtual nodes: the bits of one node, over loopback, shm and cuda."""

from __future__ import annotations

import functools
import pathlib
import re
import subprocess
import sys

import jax
import pytest

PROGRAMS = pathlib.Path(__file__).parents[1] / "multiprocess" / "programs"
LIMIT_S = 240
NUM_CASES = 11

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]

Cases = dict[str, tuple[str, str]]


def num_gpus() -> int:
    count = len(jax.devices()) if jax.default_backend() == "gpu" else 0
    if count < 2:
        pytest.skip("needs 2 GPUs and `pytest -m gpu`")
    return count


def run(processes: int, program: str, *options: object) -> str:
    gpus = num_gpus() // processes
    launch = ["launch", "-n", str(processes), "--gpus-per-process", str(gpus)]
    command = [sys.executable, "-m", "jax_ep", *launch, str(PROGRAMS / program), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def bits(processes: int, node_size: int, transport: str = "auto") -> Cases:
    """{case: (digest of moves, digest of sums)}."""
    text = run(processes, "same_bits.py", "--node-sizes", node_size, "--transport", transport)
    lines = re.findall(r"case \S+ (\S+) (\S+) (\S+)$", text, re.MULTILINE)
    assert len(lines) == NUM_CASES, text
    return {name: (moves, sums) for name, moves, sums in lines}


@pytest.mark.parametrize("transport", ["loopback", "cuda"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_one_process_give_the_bits_of_one_node(nodes: int, transport: str) -> None:
    if num_gpus() % nodes:
        pytest.skip(f"{nodes} nodes need a multiple of {nodes} GPUs, found {num_gpus()}")
    assert bits(1, num_gpus() // nodes, transport) == bits(1, num_gpus())


@pytest.mark.parametrize("transport", ["shm", "cuda"])
@pytest.mark.parametrize("nodes", [2, 4])
def test_nodes_of_a_process_each_give_the_bits_of_one_node(nodes: int, transport: str) -> None:
    if num_gpus() % nodes:
        pytest.skip(f"{nodes} nodes need a multiple of {nodes} GPUs, found {num_gpus()}")
    assert bits(nodes, num_gpus() // nodes, transport) == bits(1, num_gpus())


@pytest.mark.parametrize("transport", ["shm", "cuda"])
def test_a_node_of_several_processes_gives_the_bits_of_one_node(transport: str) -> None:
    if num_gpus() < 4:
        pytest.skip(f"2 nodes of 2 processes need 4 GPUs, found {num_gpus()}")
    assert bits(num_gpus(), num_gpus() // 2, transport) == bits(1, num_gpus())


@pytest.mark.parametrize("transport", ["loopback", "cuda"])
def test_faulty_networks_give_the_bits_of_a_quiet_one(transport: str) -> None:
    where = ["--node-size", num_gpus() // 2, "--transport", transport]
    text = run(1, "faulty_bits.py", "--first", 0, "--last", 2, *where)
    seen = re.search(r"seeds 3 disorder (\d+)", text)
    assert seen is not None, text
    assert int(seen[1]) > 0

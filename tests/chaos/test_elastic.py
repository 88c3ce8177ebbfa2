"""Some rounds of `elastic.py`; those marked ci play every phase. Over verbs: tests/rdma_vm."""

import pathlib
import re
import subprocess
import sys

import jax
import pytest

pytestmark = pytest.mark.multiprocess

PROGRAM = pathlib.Path(__file__).parent / "elastic.py"


def _play(kills, *arguments):
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--kills", str(kills), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12000:]
    assert re.search(rf"^{kills} kills, the slowest", done.stdout, re.MULTILINE), done.stdout


def _skip_without(transport):
    from jax_ep import _core

    if transport not in {name for name, is_usable, _ in _core.transports() if is_usable}:
        pytest.skip(f"no transport {transport} here")


def test_survivors_go_on_exactly_and_take_ranks_back():
    _play(3, "--phases", "ll combine,decided,late")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_gpus(ranks):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and `pytest -m gpu`")
    _play(8, "--gpus", str(min(jax.local_device_count(), ranks)), "--ranks", str(ranks))


@pytest.mark.ci
def test_fifty_kills_leave_nothing_behind():
    _play(50, "--seed", "1")


@pytest.mark.ci
@pytest.mark.parametrize("transport", ["shm", "ofi"])
def test_between_nodes(transport):
    _skip_without(transport)
    _play(12, "--transport", transport, "--node-size", "1")


@pytest.mark.ci
def test_between_hosts_that_do_not_see_each_others_processes():
    _skip_without("ofi")
    phases = "between calls,rows,decided,building,late,all others"
    _play(6, "--hosts", "--transport", "ofi", "--phases", phases)


@pytest.mark.ci
def test_a_node_takes_part_as_a_whole_where_its_rows_travel_by_rails():
    _play(4, "--transport", "shm", "--node-size", "2")


@pytest.mark.ci
def test_ranks_of_nodes_are_lost_one_by_one_in_mode_ll():
    phases = "ll rows,ll combine,between calls,building,stopped"
    _play(5, "--transport", "shm", "--node-size", "2", "--mode", "ll", "--phases", phases)

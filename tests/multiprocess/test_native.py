"""The native path over several processes: the same bits, independent calls, errors."""

import functools
import re

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess


@functools.cache
def _cases(processes, devices_per_process, *options):
    """{case name: (digest of moves, digest of sums)} of one topology, run once."""
    done = launch("same_bits.py", *options, processes=processes, devices_per_process=devices_per_process)
    assert done.returncode == 0, done.text[-6000:]
    cases = dict(re.findall(r"^\[0\] ?case (\S+) (\S+ \S+)$", done.text, re.MULTILINE))
    assert len(cases) == 8, done.text[-6000:]
    return cases


def test_moves_equal_those_of_the_xla_implementation():
    native = _cases(1, 8)
    oracle = _cases(1, 8, "--implementation", "xla")
    assert {k: v.split()[0] for k, v in native.items()} == {k: v.split()[0] for k, v in oracle.items()}


@pytest.mark.parametrize("node_size", [4, 2, 1])
def test_node_sizes_give_the_same_bits_in_one_process(node_size):
    assert _cases(1, 8, "--node-size", node_size) == _cases(1, 8)


@pytest.mark.parametrize(
    ("processes", "devices", "options"),
    [
        (4, 2, ()),
        (2, 4, ("--node-size", 2)),
        (4, 2, ("--node-size", 1)),
        (8, 1, ("--node-size", 4)),
    ],
)
def test_process_models_give_the_same_bits(processes, devices, options):
    assert _cases(processes, devices, *options) == _cases(1, 8)


@pytest.mark.parametrize(("processes", "devices"), [(1, 8), (4, 1)])
def test_sixteen_independent_layers_a_thousand_times(processes, devices):
    done = launch("many_layers.py", processes=processes, devices_per_process=devices)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(processes):
        assert done.value(process, "executions") == "1000"


def test_different_configs_are_an_error_on_every_process():
    done = launch("bad_group.py", "--what", "config", processes=2)
    for process in range(2):
        message = done.value(process, "error")
        assert message.startswith("ValueError"), message
        assert "top_k=2" in message and "top_k=4" in message
        assert done.value(process, "afterwards") == "2"


def test_too_little_shared_memory_is_an_error_that_says_how_much():
    done = launch("bad_group.py", "--what", "memory", processes=2)
    for process in range(2):
        message = done.value(process, "error")
        assert "memory" in message.lower() and "max_tokens" in message, message
        assert done.value(process, "afterwards") == "2"


def test_a_process_that_does_not_call_create_group_is_named():
    done = launch("bad_group.py", "--what", "absent", processes=2)
    assert "process 1 did not reach" in done.value(0, "error")

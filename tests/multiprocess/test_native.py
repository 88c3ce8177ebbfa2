"""The native path over several processes: the same bits, independent calls, errors."""

import functools
import re

import pytest
from launching import launch

pytestmark = pytest.mark.multiprocess


@functools.cache
def _cases(processes, devices_per_process, *options):
    """{node size: {case: (digest of moves, digest of sums)}} of one process model, run once."""
    done = launch(
        "same_bits.py", *options, processes=processes, devices_per_process=devices_per_process
    )
    assert done.returncode == 0, done.text[-6000:]
    cases = {}
    # No "$": Gloo may write between a line and its end.
    pattern = r"^\[0\] ?case (\S+) (\S+) ([0-9a-f]{16}) ([0-9a-f]{16})"
    for size, name, moves, sums in re.findall(pattern, done.text, re.MULTILINE):
        cases.setdefault(size, {})[name] = (moves, sums)
    assert cases and all(len(of_size) == 11 for of_size in cases.values()), done.text[-6000:]
    return cases


def _one_process():
    return _cases(1, 8, "--node-sizes", "8,4,2,1")


def test_moves_equal_those_of_the_xla_implementation():
    oracle = _cases(1, 8, "--implementation", "xla")["None"]
    native = _one_process()["8"]
    assert {k: moves for k, (moves, _) in native.items()} == {
        k: moves for k, (moves, _) in oracle.items()
    }


@pytest.mark.parametrize("node_size", ["4", "2", "1"])
def test_node_sizes_give_the_same_bits_in_one_process(node_size):
    assert _one_process()[node_size] == _one_process()["8"]


@pytest.mark.parametrize(
    ("processes", "devices", "node_sizes"),
    [
        pytest.param(4, 2, "8,1", marks=pytest.mark.ci),
        (2, 4, "2"),
        pytest.param(8, 1, "4", marks=pytest.mark.ci),
    ],
)
def test_process_models_give_the_same_bits(processes, devices, node_sizes):
    for cases in _cases(processes, devices, "--node-sizes", node_sizes).values():
        assert cases == _one_process()["8"]


@pytest.mark.ci
def test_ofi_gives_the_same_bits():
    from jax_ep import _core

    usable, reason = {name: (ok, why) for name, ok, why in _core.transports()}["ofi"]
    if not usable:
        pytest.skip(f"ofi: {reason}")
    options = ("--node-sizes", "1", "--transport", "ofi")
    for cases in _cases(4, 2, *options).values():
        assert cases == _one_process()["8"]


@pytest.mark.parametrize("node_size", [2, 1])
def test_faulty_networks_give_the_same_bits(node_size):
    # Seeds 0..99 were run once: docs/transports.md.
    options = ("--first", 0, "--last", 9, "--node-size", node_size)
    done = launch("faulty_bits.py", *options, processes=1, devices_per_process=4)
    assert done.returncode == 0, done.text[-6000:]
    assert done.value(0, "seeds").startswith("10 disorder ")


@pytest.mark.ci
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (4, 1)])
def test_sixteen_independent_layers_a_thousand_times(processes, devices):
    done = launch("many_layers.py", processes=processes, devices_per_process=devices)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(processes):
        assert done.value(process, "executions") == "1000"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("processes", "devices", "node_size", "tokens", "most_heap"),
    [
        (1, 72, 8, 192, 7_000_000),  # 28 million with a block of T rows per peer
        (8, 16, 128, 96, 3_500_000),  # one node of several processes: 21 million
        (8, 16, 32, 96, 7_000_000),  # nodes of two processes: 30 million
        (8, 16, 8, 96, 7_000_000),  # two nodes in each process: 32 million
    ],
)
def test_many_ranks_in_bounded_memory(processes, devices, node_size, tokens, most_heap):
    options = ("--node-size", node_size, "--tokens", tokens)
    done = launch("many_ranks.py", *options, processes=processes, devices_per_process=devices)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(processes):
        assert 0 < int(done.value(process, "heap")) < most_heap


@pytest.mark.ci
def test_programs_that_are_compiled_at_once():
    done = launch("compile_at_once.py", processes=2, devices_per_process=2)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(2):
        assert done.value(process, "programs") == "8"


@pytest.mark.parametrize(
    ("processes", "devices"), [(1, 8), pytest.param(4, 2, marks=pytest.mark.ci)]
)
def test_groups_on_crossing_axes_do_not_wait_for_each_other(processes, devices):
    done = launch("crossing_groups.py", processes=processes, devices_per_process=devices)
    assert done.returncode == 0, done.text[-6000:]
    for process in range(processes):
        assert done.value(process, "groups") == "3"


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

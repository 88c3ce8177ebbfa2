"""What a process keeps open, and says while nothing happens: counted (docs/scale.md)."""

import functools

import pytest
from connections import assert_counted
from launching import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.ci]


@pytest.mark.parametrize(
    ("transport", "processes", "local", "mode"),
    [("shm", 4, 2, "ht"), ("ofi", 4, 2, "ll"), ("ofi", 2, 8, "ht")],
)
def test_processes_are_connected_once_and_ranks_where_they_send(transport, processes, local, mode):
    done = launch(
        "count_connections.py",
        "--transport",
        transport,
        "--mode",
        mode,
        processes=processes,
        devices_per_process=local,
    )
    assert done.returncode == 0, done.text[-6000:]
    for process in range(processes):
        value = functools.partial(done.value, process)
        assert_counted(value, processes, local, mode, has_sockets=transport == "ofi")

"""What a process keeps open, and says while nothing happens: counted (docs/scale.md)."""

import pytest
from launching import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.ci]

PROCESSES, LOCAL, NODE_SIZE = 4, 2, 2
PAIRS = LOCAL * (PROCESSES * LOCAL - NODE_SIZE)  # with each rank of each other node
TICKS = 12  # in 3 s: one each sixteenth of peer_timeout_s, but at most two a second


@pytest.mark.parametrize("transport", ["shm", "ofi"])
def test_each_rank_is_connected_to_each_rank_of_other_nodes(transport):
    done = launch(
        "count_connections.py",
        "--transport",
        transport,
        processes=PROCESSES,
        devices_per_process=LOCAL,
    )
    assert done.returncode == 0, done.text[-6000:]
    for process in range(PROCESSES):
        assert int(done.value(process, "PAIRS")) == PAIRS
        sockets = int(done.value(process, "SOCKETS"))
        # libfabric opens one at the first message of either side: two if both begin at once.
        assert sockets == 0 if transport == "shm" else PAIRS <= sockets <= 2 * PAIRS
        if transport == "ofi":
            # One for each pair of ranks and tick, though there are only three other processes.
            heartbeats = int(done.value(process, "HEARTBEATS"))
            assert PAIRS * TICKS // 2 <= heartbeats <= PAIRS * (TICKS + 2)

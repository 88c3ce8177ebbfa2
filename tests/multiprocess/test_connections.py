"""What a process keeps open, and says while nothing happens: counted (docs/scale.md)."""

import json

import pytest
from launching import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.ci]

PLAN, DISPATCH, COMBINE = "1", "3", "6"  # proxy/abi/channel.h
TICKS = 12  # in 3 s: one each sixteenth of peer_timeout_s, but at most two a second


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
    others = processes - 1
    # Mode ht writes to the rank of equal local index in each other node, mode ll to all of them.
    pairs_called = local * others * (1 if mode == "ht" else local)
    # Each endpoint of libfabric writes to itself when it is made, over a connection of two ends.
    own_sockets = 2 * local
    for process in range(processes):
        keys = ("PAIRS_IDLE", "PAIRS_CALLED", "SOCKETS_IDLE", "SOCKETS_CALLED", "HEARTBEATS")
        value = {key: int(done.value(process, key)) for key in keys}
        channels = json.loads(done.value(process, "CHANNELS_CALLED"))
        assert value["PAIRS_IDLE"] == others
        assert value["PAIRS_CALLED"] == pairs_called
        if mode == "ht":
            for channel in (PLAN, DISPATCH, COMBINE):
                assert channels[channel] == pairs_called, channels
        for when, pairs in (("IDLE", others), ("CALLED", pairs_called)):
            sockets = value[f"SOCKETS_{when}"]
            # libfabric opens one at the first message of either side: two if both begin at once.
            least, most = pairs + own_sockets, 2 * pairs + own_sockets
            assert sockets == 0 if transport == "shm" else least <= sockets <= most, when
        # One for each other process and tick, however many ranks it has.
        assert others * TICKS // 2 <= value["HEARTBEATS"] <= others * (TICKS + 2)

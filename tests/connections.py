"""What tests/multiprocess/programs/count_connections.py must have printed (docs/scale.md)."""

import json
from collections.abc import Callable

PLAN, DISPATCH, COMBINE = "1", "3", "6"  # proxy/abi/channel.h
TICKS = 12  # in 3 s: one each sixteenth of peer_timeout_s, but at most two a second


def assert_counted(
    value: Callable[[str], str], processes: int, local: int, mode: str, has_sockets: bool
) -> None:
    """`value(key)`: what one process printed behind `key`; each is a node of `local` ranks."""
    others = processes - 1
    # Mode ht writes to the rank of equal local index in each other node, mode ll to all of them.
    pairs_called = local * others * (1 if mode == "ht" else local)
    channels = json.loads(value("CHANNELS_CALLED"))
    assert int(value("PAIRS_IDLE")) == others
    assert int(value("PAIRS_CALLED")) == pairs_called
    if mode == "ht":
        for channel in (PLAN, DISPATCH, COMBINE):
            assert channels[channel] == pairs_called, channels
    # Each endpoint of libfabric writes to itself when it is made, over a connection of two ends.
    own_sockets = 2 * local
    for when, pairs in (("IDLE", others), ("CALLED", pairs_called)):
        sockets = int(value(f"SOCKETS_{when}"))
        # libfabric opens one at the first message of either side: two if both begin at once.
        least, most = pairs + own_sockets, 2 * pairs + own_sockets
        assert least <= sockets <= most if has_sockets else sockets == 0, (when, sockets)
    # One for each other process and tick, however many ranks it has.
    assert others * TICKS // 2 <= int(value("HEARTBEATS")) <= others * (TICKS + 2)

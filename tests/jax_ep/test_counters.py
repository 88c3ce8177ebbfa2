"""What goes over the network, by the counters of the kernels and by those of the proxy."""

import jax
import numpy as np
import pytest
from harness import Case, eventually, inputs_of, keep, mesh_of, run

import jax_ep

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="these are counters of the CPU kernels"
)

RANKS, NODE_SIZE, TOP_K, HIDDEN = 4, 2, 4, 256
ROW_BYTES = HIDDEN * 4
ROW_EXTRA_BYTES = 64  # ids and weights that travel with a row, and its padding
CHANNELS = {"dispatch": 3, "combine": 6}  # proxy/abi/channel.h


def internode(group):
    """(rows, bytes by kernels; bytes by flows and channel) since the group was made."""
    stats = group.stats()
    rows = sum(rank["rows_sent_internode"] for rank in stats["ranks"])
    sent = sum(rank["bytes_sent_internode"] for rank in stats["ranks"])
    flows = {
        name: sum(flow["bytes"] for flow in stats["flows"] if flow["channel"] == channel)
        for name, channel in CHANNELS.items()
    }
    return rows, sent, flows


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_ht_sends_each_token_once_per_node_and_gets_one_row_back(routing):
    case = Case(ranks=RANKS, tokens=61, top_k=TOP_K, hidden=HIDDEN, mode="ht", node_size=NODE_SIZE)
    inputs = inputs_of(case, routing)
    group = jax_ep.create_group(mesh_of(RANKS), "ep", case.config(), "native")
    keep(group)

    nodes = inputs.ids // (case.experts // RANKS) // NODE_SIZE  # [N, T, K]
    own = (np.arange(RANKS) // NODE_SIZE)[:, None, None]
    needed = sum(int(np.any((nodes == n) & (own != n), axis=-1).sum()) for n in range(2))
    pairs = int((nodes != own).sum())
    assert needed < pairs, "no token has two experts in another node: nothing would be shown"

    run(group, lambda x, ids: jax_ep.dispatch(group, x, ids, mode="ht").x, inputs.x, inputs.ids)

    def the_dispatch_is_counted():
        rows, sent, flows = internode(group)
        assert rows == needed
        for num_bytes in (sent, flows["dispatch"]):
            assert needed * ROW_BYTES <= num_bytes <= needed * (ROW_BYTES + ROW_EXTRA_BYTES) + 4096
        assert flows["combine"] == 0

    eventually(the_dispatch_is_counted)

    def there_and_back(x, ids):
        received = jax_ep.dispatch(group, x, ids, mode="ht")
        return jax_ep.combine(group, received.x, received)

    run(group, there_and_back, inputs.x, inputs.ids)

    def both_are_counted():
        rows, _, flows = internode(group)
        assert rows == 3 * needed  # two dispatches, one combine
        least = needed * ROW_BYTES
        assert least <= flows["combine"] <= least + needed * ROW_EXTRA_BYTES + 4096

    eventually(both_are_counted)

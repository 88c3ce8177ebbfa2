"""Exchanges as pipelines: each rank cuts its rows into pieces, which pass stage after stage.

A stage works on one piece at a time. A piece leaves a stage when it has come from the stage before
and the stage is done with the piece before it. A rank can take piece i from the network once all
ranks of its rail have sent theirs. So late ranks, full NICs and busy threads delay whom they would
delay. What is not modelled: switches (the network is taken to be free of congestion), retries.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from simulator.costs import CpuCosts, GpuCosts
from simulator.networks import Network
from simulator.traffic import Traffic

# kernels/gpu/network: neighbours among so many tokens that go to one node share a write.
RUN_TOKENS = 8
CPU_MESSAGE_BYTES = 256 << 10  # kernels/cpu send rows of one node in messages of this size


@dataclasses.dataclass(frozen=True)
class Options:
    """How ranks use their network.

    Attributes:
        row_bytes: of one token.
        experts: of the whole group.
        pieces: that a call is cut into.
        rows_per_message: rows of one node side by side in one write; 0: as GPUs do it today, runs
            of neighbours that go to the same node.
        once_per: a row goes once to each "node" that wants it, over the rail, and node-mates read
            it there (mode ht); or straight to each "rank", or for each "pair" (token, k).
        pinned: rows pass through pinned host memory (else the NIC reads and writes the GPU's).
        proxy_threads: of one rank (JAX_EP_PROXY_THREADS); they divide the other nodes.
        late_us: ranks come up to this late, uniformly.
    """

    row_bytes: int
    experts: int
    pieces: int = 8
    rows_per_message: int = 0
    once_per: str = "node"
    pinned: bool = True
    proxy_threads: int = 1
    late_us: float = 0.0
    seed: int = 0


def _run(stages: list[np.ndarray], start: np.ndarray, pieces: int) -> np.ndarray:
    """When each rank's pieces leave the last stage: [pieces, ranks]. Stage times are a piece's."""
    return _receive(np.broadcast_to(start, (pieces, len(start))), stages)


def _receive(arrivals: np.ndarray, stages: list[np.ndarray]) -> np.ndarray:
    """When pieces that arrive at [pieces, ranks] leave the last of the stages: the same shape."""
    free = [np.zeros(arrivals.shape[1]) for _ in stages]
    ends = []
    for arrived in arrivals:
        done = arrived
        for i, us in enumerate(stages):
            done = np.maximum(done, free[i]) + us
            free[i] = done
        ends.append(done)
    return np.stack(ends)


def ht(traffic: Traffic, network: Network, costs: GpuCosts, options: Options) -> dict[str, float]:
    """Microseconds of a plan, dispatch and combine between nodes of GPUs, of the slowest rank."""
    pieces, size = options.pieces, options.row_bytes
    by_unit = {"node": traffic.to_node, "rank": traffic.to_rank, "pair": traffic.pairs}
    rows = traffic.away(by_unit[options.once_per])
    over_rails = options.once_per == "node"
    writes = _writes(rows, traffic.tokens, options.rows_per_message)
    sent = _Rows(rows.sum(1), writes.sum(1))
    if over_rails:
        received = _Rows(*(_received_over_rail(traffic, counts) for counts in (rows, writes)))
    else:
        received = _Rows(rows.sum(0), writes.sum(0))
    flows = traffic.nodes - 1 if over_rails else traffic.ranks - traffic.node_size
    start = np.random.default_rng(options.seed).uniform(0, options.late_us, traffic.ranks)

    def exchange(
        out: _Rows, into: _Rows, stored: np.ndarray, before_us: np.ndarray, after_us: np.ndarray
    ) -> np.ndarray:
        """When ranks are done. `stored`: rows that they put into the pinned stage for `out`."""
        to_stage, from_stage = (
            rows * size / (rate * 1e3) * options.pinned
            for rows, rate in zip((stored, into.number), costs.stage_gb_s, strict=True)
        )
        wire = network.bytes_per_us
        post_us = (costs.command_us + network.post_us) / options.proxy_threads
        # One thread posts what leaves and notices what arrives, each with a signal for every piece.
        proxy_us = ((out.writes + into.writes) / 2 + flows * pieces) * post_us / pieces
        wire_us = out.number * size / wire / pieces
        ends = _run([(before_us + to_stage) / pieces, proxy_us, wire_us], start, pieces)

        def from_mates(moments: np.ndarray) -> np.ndarray:
            latest = moments.reshape(pieces, traffic.nodes, traffic.node_size).max(1)
            if not over_rails:
                latest = np.broadcast_to(latest.max(1, keepdims=True), latest.shape)
            return np.tile(latest, traffic.nodes) + network.latency_us + costs.signal_us

        # A piece enters a NIC while it leaves the others.
        entered = _receive(from_mates(ends - wire_us), [into.number * size / wire / pieces])
        arrivals = np.maximum(entered, from_mates(ends))
        through = _receive(arrivals, [proxy_us, from_stage / pieces])
        # Node-mates read what came over each other's rails.
        by_node = through.reshape(pieces, traffic.nodes, traffic.node_size).max(2)
        return _receive(np.repeat(by_node, traffic.node_size, axis=1), [after_us / pieces])[-1]

    zero = np.zeros(traffic.ranks)
    local = traffic.received * size
    # Dispatch stores a row once, for whatever nodes want it.
    stored = np.minimum(sent.number, traffic.tokens)
    dispatch = exchange(sent, received, stored, zero, local * costs.dispatch_us_per_byte)
    # Partials of a node first, then, for each token, one row of each node.
    summed = local * costs.combine_us_per_byte
    back = exchange(received, sent, received.number, summed, zero)
    # Counts and pairs go to each other node once, over the rail.
    rails = traffic.nodes - 1
    post_us = (costs.command_us + network.post_us) / options.proxy_threads
    plan_bytes = rails * 4 * (options.experts + 1) + 4 * traffic.pairs.sum(1).max()
    plan = (
        costs.plan_us
        + max(2 * rails * post_us, plan_bytes / network.bytes_per_us)
        + network.latency_us
        + costs.signal_us
    )
    latest = start.max()
    return {
        "plan_us": float(plan),
        "dispatch_us": float(dispatch.max() - latest),
        "combine_us": float(back.max() - latest),
        "sent_bytes": float(sent.number.mean() * size),
        "wire_share": float(
            (sent.number.mean() * size) / (network.gb_s * 1e3) / (dispatch.max() - latest)
        ),
    }


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows of each rank that leave or enter, and the writes that carry them: [ranks]."""

    number: np.ndarray
    writes: np.ndarray


def _writes(rows: np.ndarray, tokens: int, rows_per_message: int) -> np.ndarray:
    """How many writes carry `rows`, those of a rank to one node or rank, of `tokens` tokens."""
    if rows_per_message > 0:
        return rows / rows_per_message
    # Runs in a chunk of neighbours, each of which goes there with this probability.
    share = np.minimum(rows / tokens, 1.0)
    runs = share + (RUN_TOKENS - 1) * share * (1 - share)
    return np.maximum(runs * tokens / RUN_TOKENS, rows / RUN_TOKENS)


def _received_over_rail(traffic: Traffic, rows: np.ndarray) -> np.ndarray:
    """Rows that come to each rank from its rail mates: [ranks]."""
    by_node = rows.reshape(traffic.nodes, traffic.node_size, traffic.nodes)
    return by_node.sum(0).T.reshape(-1)  # [node, rail]


def ll(traffic: Traffic, network: Network, costs: GpuCosts, options: Options) -> dict[str, float]:
    """Microseconds of dispatch and combine in mode ll: all pairs of ranks, a write for each row."""
    others = traffic.ranks - traffic.node_size
    rows = float(traffic.away(traffic.to_rank).sum(1).max())
    wire = network.bytes_per_us
    post_us = (costs.command_us + network.post_us) / options.proxy_threads
    result = {}
    # Routing and a count to each peer, in combine a count.
    for i, (name, extra) in enumerate((("dispatch_us", 2), ("combine_us", 1))):
        messages = rows + extra * others
        stage_us = rows * options.row_bytes / (costs.stage_gb_s[0] * 1e3) if options.pinned else 0.0
        slowest = max(messages * post_us, rows * options.row_bytes / wire, stage_us)
        scale = options.row_bytes / (7168 * 2)
        result[name] = (
            costs.ll_us[i]
            + costs.ll_us_per_token[i] * traffic.tokens * scale
            + slowest
            + network.latency_us
            + costs.signal_us
        )
    return result


def all_gather(
    traffic: Traffic, network: Network, costs: GpuCosts, options: Options
) -> dict[str, float]:
    """Microseconds of lax.all_gather of all tokens: rings over the rails, then inside each node."""
    nodes, size = traffic.nodes, traffic.tokens * options.row_bytes
    over_network = (nodes - 1) * size / network.bytes_per_us
    inside = (traffic.ranks - nodes) * size / (costs.copy_gb_s * 1e3)
    return {"gather_us": max(over_network, inside) + (nodes - 1) * network.latency_us}


def cpu(
    traffic: Traffic, costs: CpuCosts, row_bytes: int, top_k: int, cores: int
) -> dict[str, float]:
    """Messages, bytes and microseconds of dispatch and combine, all ranks on `cores` cores.

    The cores are never idle: what counts is the work of all ranks together.
    """
    rows = traffic.away(traffic.to_node)
    flows = traffic.ranks * (traffic.nodes - 1)
    per_message = max(1, CPU_MESSAGE_BYTES // row_bytes)
    sends = np.ceil(rows[rows > 0] / per_message).sum()
    ht_messages = 2 * sends + flows + 2 * flows  # of dispatch also an index; both are acknowledged
    ht_bytes = 2 * rows.sum() * row_bytes
    # What must move inside nodes: run_cpu.py counts rows of dispatch, rows and tokens of combine.
    moved = (traffic.received.sum() * 1.5 + traffic.tokens * traffic.ranks / 2) * row_bytes
    pairs = traffic.ranks * (traffic.ranks - traffic.node_size)
    ll_rows = traffic.away(traffic.to_rank).sum()
    ll_messages = 2 * ll_rows + 3 * pairs + 2 * pairs
    ll_bytes = 2 * ll_rows * row_bytes

    def wire(messages: float, count: float) -> float:
        return messages * costs.message_us + count * costs.wire_us_per_byte

    return {
        "ht_messages": float(ht_messages),
        "ht_bytes": float(ht_bytes),
        "ht_us": float((wire(ht_messages, ht_bytes) + moved * costs.local_us_per_byte) / cores),
        "ll_messages": float(ll_messages),
        "ll_bytes": float(ll_bytes),
        "ll_us": float((wire(ll_messages, ll_bytes) + traffic.ranks * costs.ll_pair_us) / cores),
    }

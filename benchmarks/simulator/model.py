"""Exchanges as pipelines: each rank cuts its rows into pieces, which pass stage after stage.

A stage works on one piece at a time. A piece leaves a stage when it has come from the stage before
and the stage is done with the piece before it. A rank can take piece i from the network once all
ranks of its rail have sent theirs. So late ranks, full NICs and busy threads delay whom they would
delay. The kernels of a rank are one stage, in the order of their launches: those that send piece i
are behind those that use piece i - 2 if calls are cut into rounds, else before all that use one.
What is not modelled: switches (the network is taken to be free of congestion), retries.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from simulator import rounds
from simulator.costs import CpuCosts, GpuCosts
from simulator.networks import Network
from simulator.traffic import Traffic

# Neighbours among so many tokens that go to one node, in mode ll to one rank, share a write.
RUN_TOKENS = rounds.CHUNK_TOKENS
CPU_MESSAGE_BYTES = 256 << 10  # kernels/cpu send rows of one node in messages of this size


@dataclasses.dataclass(frozen=True)
class Options:
    """How ranks use their network.

    Attributes:
        row_bytes: of one token.
        experts: of the whole group.
        pieces: that a call is cut into, at least; a round is one piece (simulator/rounds.py).
        round_tokens: at most so many tokens of a rank in a round; 0: as many as there is room for.
        rows_per_message: rows of one node side by side in one write, of mode ht; 0: as GPUs do it
            today, runs of neighbours that go to the same node.
        ll_rows_per_message: the same of one rank and mode ll.
        once_per: a row goes once to each "node" that wants it, over the rail, and node-mates read
            it there (mode ht); or straight to each "rank", or for each "pair" (token, k).
        pinned: rows pass through pinned host memory (else the NIC reads and writes the GPU's).
        proxy_threads: of one rank (JAX_EP_PROXY_THREADS); they divide the other nodes.
        late_us: ranks come up to this late, uniformly.
    """

    row_bytes: int
    experts: int
    pieces: int = 8
    round_tokens: int = 0
    rows_per_message: int = 0
    ll_rows_per_message: int = 0
    once_per: str = "node"
    pinned: bool = True
    proxy_threads: int = 1
    late_us: float = 0.0
    seed: int = 0


class _Stage:
    """Of each rank: works on one thing at a time, in the order of the calls."""

    def __init__(self, num_ranks: int) -> None:
        self._free = np.zeros(num_ranks)

    def __call__(self, arrived: np.ndarray, us: np.ndarray) -> np.ndarray:
        """When what arrives then, and takes so long, leaves it: [ranks]."""
        self._free = np.maximum(arrived, self._free) + us
        return self._free


def ht(traffic: Traffic, network: Network, costs: GpuCosts, options: Options) -> dict[str, float]:
    """Microseconds of a plan, dispatch and combine between nodes of GPUs, of the slowest rank."""
    size = options.row_bytes
    cut = rounds.ht(traffic.ranks, traffic.nodes, traffic.tokens, options.round_tokens)
    chunks = 1 if traffic.nodes == 1 else -(-traffic.tokens // rounds.CHUNK_TOKENS)
    pieces = max(min(options.pieces, chunks), cut.number)
    ahead = rounds.AHEAD if cut.number > 1 else pieces
    by_unit = {"node": traffic.to_node, "rank": traffic.to_rank, "pair": traffic.pairs}
    rows = traffic.away(by_unit[options.once_per])
    over_rails = options.once_per == "node"
    writes = _writes(rows, traffic.tokens, options.rows_per_message, pieces)
    sent = _Rows(rows.sum(1), writes.sum(1))
    if over_rails:
        received = _Rows(*(_received_over_rail(traffic, counts) for counts in (rows, writes)))
    else:
        received = _Rows(rows.sum(0), writes.sum(0))
    flows = traffic.nodes - 1 if over_rails else traffic.ranks - traffic.node_size
    start = np.random.default_rng(options.seed).uniform(0, options.late_us, traffic.ranks)

    def exchange(
        out: _Rows,
        into: _Rows,
        stored: np.ndarray,
        kernels_us: float,
        before_us: np.ndarray,
        after_us: np.ndarray,
    ) -> np.ndarray:
        """When ranks are done. `stored`: rows that they put into the pinned stage for `out`.

        `kernels_us`: of a piece, whatever its rows; what these take is before_us and after_us.
        """
        to_stage, from_stage = (
            rows * size / (rate * 1e3) * options.pinned / pieces
            for rows, rate in zip((stored, into.number), costs.stage_gb_s, strict=True)
        )
        wire = network.bytes_per_us
        post_us = (costs.command_us + network.post_us) / options.proxy_threads
        # One thread posts what leaves and notices what arrives, each with a signal for every piece.
        # post_us is both, so each of the two stages takes as long as the thread with all it does.
        proxy_us = ((out.writes + into.writes) / 2 + flows * pieces) * post_us / pieces
        leave_us, enter_us = (rows.number * size / wire / pieces for rows in (out, into))
        kernels, post, leave, enter, notice = (_Stage(traffic.ranks) for _ in range(5))

        def from_mates(moments: np.ndarray) -> np.ndarray:
            latest = moments.reshape(traffic.nodes, traffic.node_size).max(0)
            if not over_rails:
                latest = np.full_like(latest, latest.max())
            return np.tile(latest, traffic.nodes) + network.latency_us + costs.signal_us

        def send() -> np.ndarray:
            """When a piece is there and noticed."""
            made = kernels(start, kernels_us / 2 + before_us / pieces + to_stage)
            left = leave(post(made, proxy_us), leave_us)
            # It enters a NIC while it leaves the others.
            entered = enter(from_mates(left - leave_us), enter_us)
            return notice(np.maximum(entered, from_mates(left)), proxy_us)

        def use(noticed: np.ndarray) -> np.ndarray:
            loaded = kernels(noticed, from_stage)
            # Node-mates read what came over each other's rails.
            by_node = loaded.reshape(traffic.nodes, traffic.node_size).max(1)
            return kernels(
                np.repeat(by_node, traffic.node_size), kernels_us / 2 + after_us / pieces
            )

        under_way: list[np.ndarray] = []
        for piece in range(pieces + ahead):
            if piece >= ahead:
                done = use(under_way[piece - ahead])
            if piece < pieces:
                under_way.append(send())
        return done

    zero = np.zeros(traffic.ranks)
    local = traffic.received * size
    # Dispatch stores a row once, for whatever nodes want it.
    stored = np.minimum(sent.number, traffic.tokens)
    dispatch = exchange(
        sent, received, stored, costs.piece_us[0], zero, local * costs.dispatch_us_per_byte
    )
    # Partials of a node first, then, for each token, one row of each node.
    summed = local * costs.combine_us_per_byte
    back = exchange(received, sent, received.number, costs.piece_us[1], summed, zero)
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
        "rounds": cut.number,
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


def _writes(rows: np.ndarray, tokens: int, rows_per_message: int, pieces: int) -> np.ndarray:
    """How many writes carry `rows`, those of a rank to one node or rank, of `tokens` tokens."""
    # Each token goes there with this probability.
    share = np.minimum(rows / tokens, 1.0)
    if rows_per_message > 0:
        with_rows = pieces * (1 - (1 - share) ** (tokens / pieces))
        return np.maximum(rows / rows_per_message, with_rows)
    # Runs in a chunk of neighbours.
    runs = share + (RUN_TOKENS - 1) * share * (1 - share)
    return np.maximum(runs * tokens / RUN_TOKENS, rows / RUN_TOKENS)


def _received_over_rail(traffic: Traffic, rows: np.ndarray) -> np.ndarray:
    """Rows that come to each rank from its rail mates: [ranks]."""
    by_node = rows.reshape(traffic.nodes, traffic.node_size, traffic.nodes)
    return by_node.sum(0).T.reshape(-1)  # [node, rail]


def ll(traffic: Traffic, network: Network, costs: GpuCosts, options: Options) -> dict[str, float]:
    """Microseconds of dispatch and combine in mode ll: each rank writes to all of other nodes."""
    others = traffic.ranks - traffic.node_size
    away = traffic.away(traffic.to_rank)
    rows = float(away.sum(1).max())
    wire = network.bytes_per_us
    post_us = (costs.command_us + network.post_us) / options.proxy_threads
    number = rounds.ll(traffic.ranks, traffic.nodes, traffic.tokens, options.round_tokens).number
    per_message = options.ll_rows_per_message
    writes = float(_writes(away, traffic.tokens, per_message, number).sum(1).max())
    result: dict[str, float] = {"rounds": number}
    # To each peer in every exchange a count and "read", in a dispatch routing, too. A dispatch of
    # several rounds exchanges its plan before them.
    for i, (name, exchanges, signals) in enumerate(
        (("dispatch_us", number + (number > 1), 3), ("combine_us", number, 2))
    ):
        messages = writes + exchanges * signals * others
        stage_us = rows * options.row_bytes / (costs.stage_gb_s[0] * 1e3) if options.pinned else 0.0
        slowest = max(messages * post_us, rows * options.row_bytes / wire, stage_us)
        scale = options.row_bytes / (7168 * 2)
        # One is sent when the one before it has been used.
        result[name] = (
            exchanges * (costs.ll_us[i] + network.latency_us + costs.signal_us)
            + costs.ll_us_per_token[i] * traffic.tokens * scale
            + slowest
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

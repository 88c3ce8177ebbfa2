"""What `Group.stats` returns. docs/metrics.md says how to watch it.

"Since creation" of an elastic group means: since its newest agreement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np

from jax_ep import _placement
from jax_ep._placement import Placement

# By number: the streams between two ranks (proxy/abi/channel.h).
CHANNELS = (
    "order", "plan", "barrier", "dispatch", "dispatch-done", "reduce", "combine",
    "combine-done", "ll-dispatch", "ll-dispatch-done", "ll-combine", "ll-combine-done",
    "reduce-done",
)  # fmt: skip

# What a rank waits for (proxy/abi/channel.h): routing, rows to experts, rows back, and the readers
# of memory that it will write again.
WAIT_PHASES = ("plan", "dispatch", "combine", "reuse")


class FlowStats(TypedDict):
    """The traffic of one local rank with a rank of another node, on one channel, since creation.

    Attributes:
        team: which of the group's teams (0 in a group over one axis of the mesh).
        rank: the local rank, in its team.
        peer: the other one.
        channel: its number (proxy/abi/channel.h): 1 plan, 3 dispatch, 6 combine, 8 ll-dispatch, 10
            ll-combine, ...; `jax_ep.metrics.CHANNELS` has the names.
        messages: posted to the peer.
        bytes: of these messages.
        signals: flags of the peer that were raised.
        stalls: times that the window was closed when there was something to send: raise
            JAX_EP_WINDOW_MESSAGES or JAX_EP_WINDOW_BYTES.
        retries: times that the transport's queue was full.
        reorders: messages of the peer that came before an earlier one.
        max_reorder_depth: the farthest that one came ahead.
        duplicates: messages of the peer that came again, and were dropped.
    """

    team: int
    rank: int
    peer: int
    channel: int
    messages: int
    bytes: int
    signals: int
    stalls: int
    retries: int
    reorders: int
    max_reorder_depth: int
    duplicates: int


class _Counts(TypedDict):
    plans: int
    dispatches: int
    combines: int
    rows_received: int
    rows_dropped: int
    invalid_ids: int
    last_overflow: int
    bytes_pulled: int
    rows_sent_internode: NotRequired[int]
    bytes_sent_internode: NotRequired[int]
    wait_ns: NotRequired[int]
    bytes_staged: NotRequired[int]
    launches: NotRequired[int]


class RankStats(_Counts):
    """One local rank since the group was made.

    Attributes:
        team: which of the group's teams (0 in a group over one axis of the mesh).
        rank: its number there.
        plans: plans made; dispatches, combines: calls that have ended, halves counted as one.
        rows_received: rows that dispatches have placed here.
        rows_dropped: pairs (token, k) of this rank that found no room, or whose id is num_experts
            or more. Ids below 0 name no expert and are not counted.
        invalid_ids: expert ids of num_experts or more in plans of this rank.
        last_overflow: 1 if rows of the newest plan did not fit (of any rank), else 0.
        bytes_pulled: bytes of rows that dispatches of mode ht have read from ranks of the node.
        pairs_per_expert: by local expert of the group, the pairs (token, k) that plans have given
            it; those of views (`Group.view`) count at their own local index, and with a `Placement`
            those of slots. What `jax_ep.eplb` exchanges is not counted.
        rows_sent_internode, bytes_sent_internode: rows and bytes that dispatches and combines have
            sent to other nodes; a token counts once for each node, in mode ll once for each rank.
            CPUs only.
        wait_ns: nanoseconds spent waiting for other ranks: how unevenly ranks arrive. GPUs wait for
            all at once: there it is the sum over phases of the largest of wait_by_peer.
        wait_by_peer: the same by phase and by the rank waited for: {phase: [N]}. Phases are "plan",
            "dispatch" (with the routing in ll mode), "combine", and "reuse", the readers of memory
            that is written again. On CPUs a rank waits for others one after the other: who is late
            at the same time as an earlier one is not seen. On GPUs it waits for all at once, and a
            wait counts when it has taken 64 looks, without these (docs/metrics.md).
        bytes_staged: bytes that were copied before others could read them. GPUs only.
        launches: operations given to the GPU. GPUs only.
    """

    team: int
    rank: int
    pairs_per_expert: list[int]
    wait_by_peer: NotRequired[dict[str, list[int]]]


class GroupStats(TypedDict):
    """A group on this process. The counters are sums over its local ranks.

    Attributes:
        implementation: "native" or "xla", which counts nothing: only the first three are there.
        num_ranks: of the whole group.
        heap_bytes: memory of the local ranks' heaps.
        ranks: each local rank.
        flows: each pair of a local rank and a rank of another node, by channel.
        plans, dispatches, ...: as in `RankStats`, where all local ranks have them.
    """

    implementation: Literal["native", "xla"]
    num_ranks: int
    heap_bytes: int
    plans: NotRequired[int]
    dispatches: NotRequired[int]
    combines: NotRequired[int]
    rows_received: NotRequired[int]
    rows_dropped: NotRequired[int]
    invalid_ids: NotRequired[int]
    last_overflow: NotRequired[int]
    bytes_pulled: NotRequired[int]
    rows_sent_internode: NotRequired[int]
    bytes_sent_internode: NotRequired[int]
    wait_ns: NotRequired[int]
    bytes_staged: NotRequired[int]
    launches: NotRequired[int]
    ranks: NotRequired[list[RankStats]]
    flows: NotRequired[list[FlowStats]]


def wait_matrix(
    num_ranks: int, ranks: Iterable[Mapping[str, Any]], phase: str | None, team: int
) -> np.ndarray[Any, Any]:
    """As `Group.wait_ns`, of `RankStats`."""
    if phase is not None and phase not in WAIT_PHASES:
        raise ValueError(
            f"Group.wait_ns: got phase={phase!r}, expected one of {WAIT_PHASES} or None for all"
        )
    waits = np.zeros((num_ranks,) * 2, np.int64)
    for rank in ranks:
        if rank["team"] != team or "wait_by_peer" not in rank:
            continue
        for name, by_peer in rank["wait_by_peer"].items():
            if phase in (None, name):
                waits[rank["rank"]] += np.asarray(by_peer, np.int64)
    return waits


def pairs_per_slot(ranks: Iterable[Mapping[str, Any]], num_slots: int) -> np.ndarray[Any, Any]:
    """i64[P] of `RankStats`, the pairs of each slot; 0 for those of ranks that are not here."""
    pairs = np.zeros(num_slots, np.int64)
    for rank in ranks:
        counts = rank["pairs_per_expert"]
        first = rank["rank"] * len(counts)
        pairs[first : first + len(counts)] += counts
    return pairs


def pairs_per_logical(
    slots: np.ndarray[Any, Any], placement: Placement | None, num_experts: int
) -> np.ndarray[Any, Any]:
    """i64[E] of i64[P]. Raises ValueError if the placement is missing, or of other sizes."""
    if placement is None:
        if slots.size != num_experts:
            raise ValueError(
                f"Group.expert_load: got no placement, expected the one that was used: the group "
                f"has {slots.size} slots for {num_experts} experts; pass placement="
            )
        return slots
    _placement.require("Group.expert_load", placement, "pass the one that dispatch was given")
    if (placement.num_experts, placement.physical_experts) != (num_experts, slots.size):
        raise ValueError(
            f"Group.expert_load: got a placement of {placement.num_experts} experts in "
            f"{placement.physical_experts} slots, expected {num_experts} in {slots.size}; pass "
            "the one that dispatch was given"
        )
    load = np.zeros(num_experts, np.int64)
    np.add.at(load, np.asarray(placement.physical_to_logical), slots)
    return load


def sum_over_processes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The sum of i64 values that are not negative, exact without JAX's 64-bit mode."""
    from jax.experimental import multihost_utils

    halves = np.stack([values >> 31, values & 0x7FFFFFFF]).astype(np.int32)
    high, low = (
        np.asarray(multihost_utils.process_allgather(halves))
        .reshape(-1, 2, *values.shape)
        .astype(np.int64)
        .sum(axis=0)
    )
    return np.asarray((high << 31) + low)

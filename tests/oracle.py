"""A NumPy oracle of every operation, written from docs/semantics.md alone; sums are float64.

It sees the whole group at once: arrays carry a leading rank axis, results are per-rank lists. It
imports nothing of jax_ep and favours plain loops over speed.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
    """The sizes of a group that semantics.md names."""

    num_ranks: int
    num_experts: int
    top_k: int
    max_tokens: int
    align: int
    recv_rows: int | None = None
    capacity_factor: float | None = None
    # With a placement num_experts counts slots: see `place`.

    @property
    def per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    def rows(self, layout: str, tokens: int) -> int:
        """Section "Receive rows"."""
        if layout == "expert_batched":
            return self.per_rank * self.num_ranks * tokens
        if layout == "rank_major":
            return self.num_ranks * tokens
        if self.recv_rows is not None:
            return self.recv_rows
        pairs = self.num_ranks * tokens * self.top_k
        worst = (pairs + min(self.per_rank, pairs) * (self.align - 1)) // self.align * self.align
        if self.capacity_factor is None:
            return worst
        wanted = math.ceil(math.ceil(self.capacity_factor * tokens * self.top_k) / self.align)
        return min(worst, wanted * self.align + self.per_rank * self.align)


@dataclasses.dataclass
class RankPlan:
    """One rank's plan, plus `pair_of_row`: the (s, t, k) list of each row."""

    group_sizes: np.ndarray
    pairs_per_expert: np.ndarray
    send_slot: np.ndarray
    recv_src: np.ndarray
    send_counts: np.ndarray
    recv_counts: np.ndarray
    num_dropped: int
    overflow: int
    recv_topk_idx: np.ndarray | None
    pairs_of_row: list[list[tuple[int, int, int]]]


def zones(demand: list[int], rows: int, align: int) -> list[int]:
    """Section "expert_major", steps 1 to 3, by search."""
    blocks = [math.ceil(d / align) for d in demand]
    budget = rows // align
    level = max(blocks, default=0)
    while sum(min(b, level) for b in blocks) > budget:
        level -= 1
    left = budget - sum(min(b, level) for b in blocks)
    result = []
    for b in blocks:
        extra = b > level and left > 0
        left -= extra
        result.append(align * (min(b, level) + extra))
    return result


def place(
    slots: list[int], num_experts: int, ids: np.ndarray, active: list[int] | None = None
) -> np.ndarray:
    """Section "Placement": ids [N, T, K] as slots, for expert slots[p] in slot p.

    With `active` of those on active ranks; where there are none, -1.
    """
    mask = [1] * len(ids) if active is None else active
    result = np.array(ids, np.int64)
    for (s, t, k), e in np.ndenumerate(ids):
        if e >= num_experts:
            result[s, t, k] = e + len(slots) - num_experts
        elif e >= 0:
            per_rank = len(slots) // len(ids)
            own = [p for p, x in enumerate(slots) if x == e and mask[p // per_rank]]
            result[s, t, k] = own[(s * ids.shape[1] + t) % len(own)] if own else -1
    return result


def plan(spec: Spec, ids: np.ndarray, mode: str, layout: str) -> list[RankPlan]:
    """Plans of all ranks for ids [N, T, K]."""
    ranks, tokens, top_k = ids.shape
    rows = spec.rows(layout, tokens)
    pairs: list[list[list[tuple[int, int, int]]]] = [
        [[] for _ in range(spec.per_rank)] for _ in range(ranks)
    ]
    dropped = np.zeros(ranks, np.int64)
    for s in range(ranks):
        for t in range(tokens):
            seen: set[int] = set()
            for k in range(top_k):
                e = int(ids[s, t, k])
                if e < 0:
                    continue
                if e >= spec.num_experts or (layout == "expert_batched" and e in seen):
                    dropped[s] += 1
                    continue
                seen.add(e)
                pairs[e // spec.per_rank][e % spec.per_rank].append((s, t, k))

    send_slot = np.full((ranks, tokens, top_k), -1, np.int64)
    send_counts = np.zeros((ranks, ranks), np.int64)
    plans = []
    for d in range(ranks):
        demand = [len(p) for p in pairs[d]]
        if layout == "expert_major":
            sizes = zones(demand, rows, spec.align)
            starts = [sum(sizes[:e]) for e in range(spec.per_rank)]
        else:
            sizes = demand
            starts = [e * ranks * tokens for e in range(spec.per_rank)]
        counts = [min(n, z) for n, z in zip(demand, sizes, strict=True)]
        pairs_of_row: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]
        topk = np.full((ranks, tokens, top_k), -1, np.int64)
        for e, wanted in enumerate(pairs[d]):
            for i, (s, t, k) in enumerate(wanted):
                if i >= counts[e]:
                    dropped[s] += 1
                    continue
                row = s * tokens + t if layout == "rank_major" else starts[e] + i
                pairs_of_row[row].append((s, t, k))
                topk[s, t, k] = e
                slot = d * ranks * tokens + s * tokens + t if mode == "ll" else d * rows + row
                send_slot[s, t, k] = slot
                send_counts[s, d] += 1
        recv_src = np.full(rows, -1, np.int64)
        for row, here in enumerate(pairs_of_row):
            if here:
                s, t, k = min(here)
                recv_src[row] = s * spec.max_tokens * top_k + t * top_k + k
        plans.append(
            RankPlan(
                group_sizes=np.array(sizes),
                pairs_per_expert=np.array(counts),
                send_slot=send_slot[d],
                recv_src=recv_src,
                send_counts=send_counts[d],
                recv_counts=(topk >= 0).sum(axis=(1, 2)),
                num_dropped=0,
                overflow=0,
                recv_topk_idx=topk if layout == "rank_major" else None,
                pairs_of_row=pairs_of_row,
            )
        )
    for rank, rank_plan in enumerate(plans):
        rank_plan.num_dropped = int(dropped[rank])
        rank_plan.overflow = int(dropped.sum() > 0)
    return plans


def dispatch(
    plans: list[RankPlan], x: np.ndarray, weights: np.ndarray | None
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Flat rows [R, H] and weights of every rank, from x [N, T, H] and weights [N, T, K]."""
    all_rows, all_weights = [], []
    for rank_plan in plans:
        rows = np.zeros((len(rank_plan.recv_src), x.shape[-1]), x.dtype)
        by_pair = rank_plan.recv_topk_idx is not None
        shape = rank_plan.recv_topk_idx.shape if by_pair else (len(rows),)
        row_weights = np.zeros(shape, np.float32)
        for row, here in enumerate(rank_plan.pairs_of_row):
            for s, t, k in here:
                rows[row] = x[s, t]
                if weights is not None:
                    row_weights[(s, t, k) if by_pair else row] = weights[s, t, k]
        all_rows.append(rows)
        all_weights.append(row_weights)
    return all_rows, all_weights if weights is not None else None


def combine(
    plans: list[RankPlan],
    y: list[np.ndarray],
    weights: list[np.ndarray] | None,
    tokens: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Float64 sums [N, T, H] and the sums of the terms' absolute values, for error bounds."""
    ranks, hidden = len(plans), y[0].shape[-1]
    out = np.zeros((ranks, tokens, hidden))
    magnitude = np.zeros_like(out)
    for d, rank_plan in enumerate(plans):
        for row, here in enumerate(rank_plan.pairs_of_row):
            if here:
                s, t, _ = here[0]
                weight = 1.0 if weights is None else float(weights[d][row])
                term = y[d][row].astype(np.float64) * weight
                out[s, t] += term
                magnitude[s, t] += np.abs(term)
    return out, magnitude


def moe(
    plans: list[RankPlan],
    ids: np.ndarray,
    x: np.ndarray,
    weights: np.ndarray,
    kernels: np.ndarray,
) -> np.ndarray:
    """ "The layer in one formula" for experts f_e(v) = v @ kernels[e], in float64: [N, T, H]."""
    out = np.zeros(x.shape, np.float64)
    kept = np.stack([rank_plan.send_slot for rank_plan in plans]) >= 0
    for s, t, k in np.argwhere(kept):
        term = x[s, t].astype(np.float64) @ kernels[ids[s, t, k]].astype(np.float64)
        out[s, t] += float(weights[s, t, k]) * term
    return out

"""Which expert is in which slot: by load, over the ranks that take part."""

from __future__ import annotations

import numpy as np

from jax_ep import eplb


def place(load: np.ndarray, num_slots: int, active: np.ndarray) -> np.ndarray:
    """i32[layers, P], the expert in each slot, with as few experts missing as can be.

    The slots of active ranks hold all experts, with replicas by EPLB's global policy, or, if there
    are too few of them, the experts with the most load. The other slots hold the rest: nobody
    reads those, but a placement names every expert.

    Args:
        load: [layers, E], how often each expert was chosen.
        num_slots: P, at least E; the ranks divide it.
        active: i32[N], 1 where a rank takes part; one does at least.
    """
    num_layers, num_experts = load.shape
    lives = np.repeat(active != 0, num_slots // active.size)
    room = int(lives.sum())
    by_load = np.argsort(-load, axis=1, kind="stable")
    chosen = np.sort(by_load[:, :room], axis=1)  # of each layer
    placements = eplb.rebalance(
        # One more each: nothing is known of an expert that nobody chose.
        np.take_along_axis(load, chosen, axis=1) + 1,
        room,
        num_groups=1,
        num_nodes=1,
        num_gpus=int(active.astype(bool).sum()),
    )
    slots = np.empty((num_layers, num_slots), np.int32)
    slots[:, lives] = [
        experts[one.physical_to_logical] for experts, one in zip(chosen, placements, strict=True)
    ]
    others = by_load[:, room:] if room < num_experts else by_load
    slots[:, ~lives] = others[:, np.arange(num_slots - room) % others.shape[1]]
    return slots


def num_missing(num_experts: int, num_slots: int, active: np.ndarray) -> int:
    """Experts of a layer that `place` can give no slot on an active rank."""
    return max(0, num_experts - num_slots // active.size * int(active.astype(bool).sum()))


def redundant_needed(num_experts: int, num_ranks: int, num_lost: int) -> int:
    """Slots beyond one for each expert, so that all experts have one without `num_lost` ranks."""
    of_rank = -(-num_experts // (num_ranks - num_lost))
    return of_rank * num_ranks - num_experts

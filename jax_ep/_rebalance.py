"""Which expert in which slot: the balancing policies of EPLB, in plain NumPy.

Written from the description of DeepSeek's Expert Parallelism Load Balancer
(https://github.com/deepseek-ai/EPLB, README) and of DeepSeek-V3 (arXiv 2412.19437, 3.4): experts
with the most load per copy get more copies, and copies are packed so that ranks have equal loads.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _config
from jax_ep._placement import Placement

_Loads = np.ndarray[Any, Any]


def rebalance(
    load: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> list[Placement]:
    """Places the experts of each layer by their loads, by the published policies of EPLB.

    *Hierarchical*, where num_nodes divides num_groups: groups of experts are packed onto nodes,
    then each node copies its busiest experts and packs the copies onto its ranks, so that a router
    that limits a token to a few groups keeps it on as many nodes. *Global* otherwise: experts are
    copied and packed regardless of groups and nodes. Copying gives each further slot to the expert
    with the most load per copy. Packing takes items by falling load, each to the least loaded bin
    that has room.

    Args:
        load: numbers [L, E], the load of each expert in each layer, such as sums of
            `routing.expert_load`.
        num_replicas: slots P of all ranks, Config.physical_experts; a multiple of num_gpus.
        num_groups: groups of E / num_groups experts that follow each other; 1 without groups.
        num_nodes: nodes; 1 for the global policy.
        num_gpus: ranks N of the group, a multiple of num_nodes.

    Returns:
        A `Placement` of NumPy arrays for each layer. For scans over layers:
        `jax.tree.map(lambda *each: np.stack(each), *placements)`.

    Raises:
        ValueError: the numbers do not divide each other as said, or loads are not finite.

    Example:
        >>> placements = jax_ep.eplb.rebalance([[9, 1, 5, 1]], 6, 1, 1, 2)
        >>> placements[0].physical_to_logical.tolist()
        [0, 2, 1, 0, 2, 3]
    """
    loads = _as_loads(load)
    if loads.ndim != 2 or loads.shape[1] == 0 or not np.all(np.isfinite(loads) & (loads >= 0)):
        raise _wrong(
            f"load of shape {list(loads.shape)}",
            "[L, E], finite and not negative",
            "pass a row of loads for each layer",
        )
    for name, value in (
        ("num_replicas", num_replicas),
        ("num_groups", num_groups),
        ("num_nodes", num_nodes),
        ("num_gpus", num_gpus),
    ):
        if not _config.is_count(value):
            raise _wrong(f"{name}={value!r}", "an int of at least 1", "pass a count")
    num_experts = loads.shape[1]
    for name, value, divisor_name, divisor in (
        ("num_replicas", num_replicas, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_nodes", num_nodes),
        ("the number of experts", num_experts, "num_groups", num_groups),
    ):
        if value % divisor:
            raise _wrong(f"{name}={value}", f"a multiple of {divisor_name}={divisor}", "change one")
    if num_replicas < num_experts:
        raise _wrong(
            f"num_replicas={num_replicas}", f"at least the {num_experts} experts", "raise it"
        )
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    return [
        Placement.from_physical(
            _place_layer(layer, num_replicas, num_groups, num_nodes, num_gpus), num_experts
        )
        for layer in loads
    ]


def _as_loads(load: Any) -> _Loads:
    """The loads as f32, in which they are compared. Raises ValueError for what are no numbers."""
    if isinstance(load, jax.core.Tracer):
        raise _wrong("load inside jax.jit", "its values", "call it outside")
    try:
        given = np.asarray(load)
        if given.dtype == object:  # such as int beyond 64 bits
            given = given.astype(np.float64)
        kind = f"{given.dtype}"
        is_real = jnp.issubdtype(given.dtype, np.number) and given.dtype.kind != "c"
        loads = given.astype(np.float64) if is_real or given.dtype.kind == "b" else None
    except (TypeError, ValueError):
        loads, kind = None, f"type {type(load).__name__}"
    if loads is None:
        raise _wrong(f"load of {kind}", "numbers [L, E]", "pass a row of loads for each layer")
    largest, limit = np.max(loads, initial=0.0), float(np.finfo(np.float32).max)
    if limit < largest < np.inf:
        raise _wrong(f"load up to {largest:.3g}", f"at most {limit:.2g}", "divide them all")
    return loads.astype(np.float32)


def _wrong(what: str, expected: str, fix: str) -> ValueError:
    return ValueError(f"jax_ep.eplb.rebalance: got {what}, expected {expected}; {fix}")


def _place_layer(
    load: _Loads, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> _Loads:
    """The expert in each slot."""
    groups = np.arange(load.size).reshape(num_groups, -1)
    slots = []
    for node in _pack(load[groups].sum(axis=1), num_nodes):
        experts = groups[node].reshape(-1)
        copied = experts[_copy(load[experts], num_replicas // num_nodes)]
        counts = np.bincount(copied, minlength=load.size).clip(1).astype(np.float32)
        per_copy = load / counts
        slots += [copied[rank] for rank in _pack(per_copy[copied], num_gpus // num_nodes)]
    return np.concatenate(slots)


def _copy(load: _Loads, num_copies: int) -> _Loads:
    """i[num_copies]: each item once, then again the one with the most load per copy."""
    copies = list(range(load.size))
    counts = np.ones(load.size, np.float32)
    while len(copies) < num_copies:
        busiest = int(np.argmax(load / counts))
        copies.append(busiest)
        counts[busiest] += 1
    return np.array(copies)


def _pack(load: _Loads, num_bins: int) -> list[list[int]]:
    """The items of each bin, equally many in all, with sums of loads as equal as greed makes them.

    Bins of one item have nothing to balance: item i is in bin i.
    """
    room = load.size // num_bins
    if room == 1:
        return [[item] for item in range(num_bins)]
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = np.zeros(num_bins, np.float32)
    for item in np.argsort(-load, kind="stable").tolist():
        lightest = min((b for b in range(num_bins) if len(bins[b]) < room), key=sums.__getitem__)
        bins[lightest].append(item)
        sums[lightest] += load[item]
    return bins

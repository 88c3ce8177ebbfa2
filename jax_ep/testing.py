"""Inputs and tolerances for testing code that uses jax_ep: routing generators, rounding bounds."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

__all__ = ["ROUTING_KINDS", "RoutingKind", "make_routing", "sum_tolerance"]

RoutingKind = Literal[
    "uniform", "zipf", "one_expert", "idle_rank", "empty_experts", "holes", "repeated", "invalid"
]
ROUTING_KINDS: tuple[RoutingKind, ...] = get_args(RoutingKind)

_ZIPF_EXPONENT = 1.2  # about what trained routers show before balancing
_HOLE_SHARE = 0.3


def make_routing(
    kind: RoutingKind,
    *,
    num_ranks: int,
    num_tokens: int,
    top_k: int,
    num_experts: int,
    seed: int = 0,
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Expert ids of a whole group.

    Args:
        kind: "uniform" (distinct experts, equally likely), "zipf" (skewed), "one_expert" (every
            token's slot 0 is expert 0, the others are empty), "idle_rank" (the last rank's experts
            get nothing), "empty_experts" (odd experts get nothing), "holes" (slots of -1),
            "repeated" (one expert several times in a token), or "invalid" (ids beyond num_experts).
        num_ranks: N.
        num_tokens: T per rank.
        top_k: K.
        num_experts: E.
        seed: of the random numbers.

    Returns:
        i32[N*T, K], the tokens of rank 0 first.

    Raises:
        ValueError: unknown kind.

    Example:
        >>> ids = jax_ep.testing.make_routing(
        ...     "zipf", num_ranks=4, num_tokens=16, top_k=2, num_experts=8
        ... )
    """
    if kind not in ROUTING_KINDS:
        raise ValueError(f"make_routing: got kind={kind!r}, expected one of {ROUTING_KINDS}")
    rng = np.random.default_rng(seed)
    rows = num_ranks * num_tokens
    weights: np.ndarray[Any, Any] = np.ones(num_experts)
    if kind == "zipf":
        weights = (1.0 + np.arange(num_experts)) ** -_ZIPF_EXPONENT
    elif kind == "idle_rank" and num_ranks > 1:
        weights[-(num_experts // num_ranks) :] = 0.0
    elif kind == "empty_experts":
        weights[1::2] = 0.0
    # Gumbel top-k: draws without replacement, for all tokens at once.
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + rng.gumbel(size=(rows, num_experts))
    ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    ids[weights[ids] == 0.0] = -1
    if kind == "one_expert":
        ids = np.full_like(ids, -1)
        ids[:, 0] = 0
    elif kind == "holes":
        ids[rng.random(ids.shape) < _HOLE_SHARE] = -1
    elif kind == "repeated":
        ids = rng.integers(0, min(3, num_experts), size=ids.shape).astype(np.int32)
    elif kind == "invalid":
        beyond = rng.random(ids.shape) < _HOLE_SHARE
        ids[beyond] = num_experts + rng.integers(0, 1000, size=int(beyond.sum()))
    return ids


def sum_tolerance(dtype: Any, num_terms: int) -> float:
    """Relative error, against the sum of absolute terms, of an f32 sum rounded once to `dtype`.

    Args:
        dtype: of the result: bfloat16, float16 or float32.
        num_terms: terms of the sum.

    Returns:
        The bound; multiply it with the sum of the terms' absolute values.

    Example:
        >>> bound = jax_ep.testing.sum_tolerance(np.float32, 8)
    """
    mantissa_bits = {"bfloat16": 8, "float16": 11, "float32": 24}[np.dtype(dtype).name]
    return float(2.0**-mantissa_bits + (num_terms + 2) * 2.0**-24)

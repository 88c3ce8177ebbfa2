"""moe(): dispatch, experts, combine, in chunks if memory asks for it; built from the public ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _config
from jax_ep._group import Group
from jax_ep._ops import api


def moe(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    expert_fn: Callable[[Any, jax.Array, jax.Array], jax.Array],
    params: Any,
    *,
    chunks: int = 1,
) -> jax.Array:
    """A whole mixture-of-experts layer: dispatch, `expert_fn` on this rank's rows, combine.

    Args:
        group: the group; call inside shard_map over its axis.
        x: [T, H] in Config.dtype.
        topk_idx: integers [T, K] as in `plan`.
        topk_weights: floats [T, K], or None for 1.
        expert_fn: `expert_fn(params, rows[R, H], group_sizes i32[E_l]) -> [R, H]` in Config.dtype,
            rows in expert_major order; rows beyond the sizes are zero and their results ignored.
        params: this rank's expert parameters, handed to expert_fn.
        chunks: > 1 splits the tokens, padded with -1 rows, and scans over the chunks with a
            checkpointed body: R is R(T / chunks) and memory that of one chunk.

    Returns:
        [T, H] in Config.dtype.

    Raises:
        ValueError: as `dispatch` and `combine`, or chunks < 1.

    Example:
        >>> def experts(kernels, rows, group_sizes):
        ...     return jax.lax.ragged_dot(rows, kernels, group_sizes)
        >>> out = jax_ep.moe(group, x, topk_idx, topk_weights, experts, kernels)
    """
    if not _config.is_count(chunks):
        raise ValueError(f"jax_ep.moe: got chunks={chunks!r}, expected an int of at least 1; use 1")

    def layer(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None) -> jax.Array:
        recv = api.dispatch(group, x, topk_idx, topk_weights)
        y = expert_fn(params, recv.x, recv.group_sizes)
        return api.combine(group, y, recv)

    num_tokens = x.shape[0]
    if chunks == 1 or num_tokens == 0:
        return layer(x, topk_idx, topk_weights)

    chunk_tokens = -(-num_tokens // chunks)
    missing = chunk_tokens * chunks - num_tokens

    def split(array: jax.Array, fill: int) -> jax.Array:
        padded = jnp.pad(array, ((0, missing), (0, 0)), constant_values=fill)
        return padded.reshape(chunks, chunk_tokens, array.shape[1])

    # The plan is small and costs an exchange, so the backward keeps it instead of planning again.
    policy = jax.checkpoint_policies.save_only_these_names("jax_ep_plan")
    weights = None if topk_weights is None else split(topk_weights, 0)
    body = jax.checkpoint(lambda _, chunk: (None, layer(*chunk)), policy=policy)
    _, out = jax.lax.scan(body, None, (split(x, 0), split(topk_idx, -1), weights))
    joined: jax.Array = out.reshape(-1, x.shape[1])[:num_tokens]
    return joined

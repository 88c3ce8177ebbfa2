"""Gates: router logits to expert ids and weights, in plain jnp; nothing here communicates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep import _config

__all__ = [
    "expert_load",
    "group_limited_topk",
    "load_balancing_loss",
    "topk_sigmoid_bias",
    "topk_softmax",
]


def topk_softmax(
    logits: jax.Array, top_k: int, *, normalize: bool = True, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The top-k experts of a softmax router (Shazeer et al. 2017; Switch Transformer, Mixtral).

    Args:
        logits: floats [T, E].
        top_k: experts per token, K.
        normalize: make the weights of a token add up to 1 (Mixtral); else keep the probabilities.
        mask: bool[T], True where the token is real, or None if all are. Logits of the others are
            not looked at (NaN included): they get ids of -1, weights of 0 and no gradient.

    Returns:
        (i32[T, K] expert ids by descending weight, f32[T, K] weights).

    Raises:
        ValueError: top_k is not in 1..E, or mask does not fit.

    Example:
        >>> ids, weights = jax_ep.routing.topk_softmax(logits, 2)
    """
    _check_top_k(top_k, logits.shape[-1])
    logits = _only(mask, logits)
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    weights, ids = jax.lax.top_k(probabilities, top_k)
    if normalize:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return _routed(mask, ids, weights)


def topk_sigmoid_bias(
    logits: jax.Array,
    bias: jax.Array,
    top_k: int,
    *,
    scale: float = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sigmoid gate with a bias that balances the choice of experts (DeepSeek-V3, 2412.19437).

    The bias affects which experts are chosen, not their weights. The loss does not train it: after
    each step, raise it for experts with too few tokens and lower it for those with too many
    (auxiliary-loss-free balancing, 2408.15664).

    Args:
        logits: floats [T, E].
        bias: floats [E], added to the affinities for the choice only; gets no gradient.
        top_k: experts per token, K.
        scale: factor on the normalised weights.
        mask: bool[T] as in `topk_softmax`, or None.

    Returns:
        (i32[T, K] expert ids, f32[T, K] weights that add up to `scale`).

    Raises:
        ValueError: top_k is not in 1..E, or mask does not fit.

    Example:
        >>> ids, weights = jax_ep.routing.topk_sigmoid_bias(logits, bias, 8)
    """
    _check_top_k(top_k, logits.shape[-1])
    logits = _only(mask, logits)
    affinity = jax.nn.sigmoid(logits.astype(jnp.float32))
    biased = jax.lax.stop_gradient(affinity + bias.astype(jnp.float32)[None])
    _, ids = jax.lax.top_k(biased, top_k)
    return _routed(mask, ids, _normalized(affinity, ids, scale))


def group_limited_topk(
    logits: jax.Array,
    top_k: int,
    *,
    num_groups: int,
    top_groups: int,
    bias: jax.Array | None = None,
    scale: float = 1.0,
    mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sigmoid gate that takes experts from the best expert groups only (DeepSeek-V3, 2412.19437).

    Experts are split into equal, contiguous groups (nodes, say). A group's score is the sum of its
    two best affinities. The top-k is taken from the `top_groups` best groups.

    Args:
        logits: floats [T, E].
        top_k: experts per token, K.
        num_groups: groups of experts; divides E.
        top_groups: groups that a token may use.
        bias: floats [E] as in `topk_sigmoid_bias`, or None.
        scale: factor on the normalised weights.
        mask: bool[T] as in `topk_softmax`, or None.

    Returns:
        (i32[T, K] expert ids, f32[T, K] weights that add up to `scale`).

    Raises:
        ValueError: the groups do not divide E, or cannot hold top_k experts; or mask does not fit.

    Example:
        >>> ids, w = jax_ep.routing.group_limited_topk(logits, 8, num_groups=8, top_groups=4)
    """
    num_tokens, num_experts = logits.shape
    _check_top_k(top_k, num_experts)
    if not _config.is_count(num_groups) or num_experts % num_groups:
        raise ValueError(
            f"group_limited_topk: got num_groups={num_groups!r}, expected a divisor of the "
            f"{num_experts} experts"
        )
    group_experts = num_experts // num_groups
    fits = _config.is_count(top_groups) and top_groups <= num_groups
    if not fits or top_groups * group_experts < top_k:
        raise ValueError(
            f"group_limited_topk: got top_groups={top_groups!r} of {num_groups} groups of "
            f"{group_experts}, expected enough for top_k={top_k}; raise top_groups"
        )
    logits = _only(mask, logits)
    affinity = jax.nn.sigmoid(logits.astype(jnp.float32))
    biased = affinity if bias is None else affinity + bias.astype(jnp.float32)[None]
    biased = jax.lax.stop_gradient(biased)
    by_group = biased.reshape(num_tokens, num_groups, group_experts)
    best, _ = jax.lax.top_k(by_group, min(2, group_experts))
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), top_groups)
    allowed = jnp.any(groups[:, :, None] == jnp.arange(num_groups)[None, None], axis=1)
    masked = jnp.where(allowed[:, :, None], by_group, -jnp.inf).reshape(num_tokens, num_experts)
    _, ids = jax.lax.top_k(masked, top_k)
    return _routed(mask, ids, _normalized(affinity, ids, scale))


def load_balancing_loss(
    probabilities: jax.Array,
    topk_idx: jax.Array,
    *,
    mask: jax.Array | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """Auxiliary loss E * sum_e f_e * p_e, 1 when balanced (Switch Transformer, 2101.03961).

    f_e is the share of the kept slots that chose expert e, p_e the mean router probability: both
    of the real local tokens, or with `axis` of those of all ranks along it.

    Args:
        probabilities: floats [T, E], router probabilities.
        topk_idx: integers [T, K]; negative slots do not count.
        mask: bool[T], True where the token is real, or None if all are. A token that is not counts
            in neither f nor p; its ids alone, -1, would leave it in p. Its gradient is 0 here, but
            a softmax of yours makes NaN of NaN logits in the backward: zero these before it.
        axis: mesh axes of the enclosing shard_map to take f and p over: each real token counts
            once, however many a rank has.

    Returns:
        f32[], differentiable in `probabilities`; 0 without any real token.

    Raises:
        ValueError: mask does not fit.

    Example:
        >>> aux = jax_ep.routing.load_balancing_loss(jax.nn.softmax(logits), ids, mask=mask)
    """
    num_tokens, num_experts = probabilities.shape
    total = jnp.sum(_only(mask, probabilities.astype(jnp.float32)), axis=0)
    counts = expert_load(topk_idx, num_experts, mask=mask).astype(jnp.float32)
    real = jnp.float32(num_tokens) if mask is None else jnp.sum(mask, dtype=jnp.float32)
    if axis is not None:
        counts, total, real = jax.lax.psum((counts, total, real), axis)
    share = counts / jnp.maximum(jnp.sum(counts), 1.0)
    return num_experts * jnp.sum(share * total) / jnp.maximum(real, 1.0)


def expert_load(
    topk_idx: jax.Array,
    num_experts: int,
    *,
    mask: jax.Array | None = None,
    axis: str | tuple[str, ...] | None = None,
) -> jax.Array:
    """How many (token, slot) pairs chose each expert, whether or not capacity drops them.

    Args:
        topk_idx: integers [T, K]; ids that are negative or at least num_experts do not count.
        num_experts: E.
        mask: bool[T], True where the token is real, or None if all are.
        axis: mesh axes of the enclosing shard_map to sum over, or None for the local tokens.

    Returns:
        i32[E].

    Raises:
        ValueError: ids are no integers, num_experts is no count, or mask does not fit.

    Example:
        >>> load = jax_ep.routing.expert_load(ids, 8, axis="ep")
    """
    if not _config.is_count(num_experts):
        raise ValueError(
            f"routing: got num_experts={num_experts!r}, expected an int of at least 1; pass E"
        )
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise ValueError(
            f"routing: got topk_idx {topk_idx.dtype}, expected integers; pass what a gate returned"
        )
    # Compared in the ids' own dtype, as int32 wraps wide ids. num_experts may not fit a narrow one.
    limits = jnp.iinfo(topk_idx.dtype)  # type: ignore[no-untyped-call]
    last = min(num_experts - 1, int(limits.max))
    counts = (topk_idx >= 0) & (topk_idx <= last)
    if mask is not None:
        _check_mask(mask, topk_idx)
        counts &= mask[..., None]
    index = jnp.where(counts, topk_idx.astype(jnp.int32), num_experts).reshape(-1)
    load = jnp.zeros((num_experts,), jnp.int32).at[index].add(1, mode="drop")
    return load if axis is None else jax.lax.psum(load, axis)


def _check_top_k(top_k: int, num_experts: int) -> None:
    if not _config.is_count(top_k) or top_k > num_experts:
        raise ValueError(
            f"routing: got top_k={top_k!r}, expected an int: 1 to {num_experts} experts"
        )


def _normalized(affinity: jax.Array, ids: jax.Array, scale: float) -> jax.Array:
    chosen = jnp.take_along_axis(affinity, ids, axis=-1)
    return chosen / jnp.sum(chosen, axis=-1, keepdims=True) * scale


def _check_mask(mask: jax.Array, tokens: jax.Array) -> None:
    is_array = hasattr(mask, "dtype")
    if not is_array or mask.dtype != jnp.bool_ or mask.shape != tokens.shape[:-1]:
        got = f"{mask.dtype}{list(mask.shape)}" if is_array else f"of type {type(mask).__name__}"
        raise ValueError(
            f"routing: got mask {got}, expected bool{list(tokens.shape[:-1])}, one per token; pass "
            "an array, True where the token is real"
        )


def _only(mask: jax.Array | None, values: jax.Array) -> jax.Array:
    """`values` [T, E] of the real tokens, 0 elsewhere: what is there reaches no gradient either."""
    if mask is None:
        return values
    _check_mask(mask, values)
    return jnp.where(mask[..., None], values, jnp.zeros((), values.dtype))


def _routed(
    mask: jax.Array | None, ids: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(i32 ids, weights), -1 and 0 where the token is not real."""
    ids = ids.astype(jnp.int32)
    if mask is None:
        return ids, weights
    return jnp.where(mask[..., None], ids, -1), _only(mask, weights)

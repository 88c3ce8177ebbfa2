"""The layer without any rank: every expert on every token, from the papers' formulas.

The oracle of these tests; it shares no code with jax_ep. Weights are a dict by the names that
jax_ep.flax.MoE documents, x is [T, H].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _select(scores: jax.Array, count: int) -> jax.Array:
    """f32[T, n] of 0 and 1: the `count` largest of each row, the first of equals."""
    order = jnp.argsort(-scores, axis=-1, stable=True)
    return jnp.sum(jax.nn.one_hot(order[:, :count], scores.shape[-1]), axis=1)


def gates(config, weights, x):
    """(weights [T, E], 0 where a token does not go; probabilities [T, E] of the loss)."""
    logits = x @ weights["router"]
    if config.router == "softmax":
        scores = probabilities = jax.nn.softmax(logits)
        chosen = _select(scores, config.top_k)
    else:
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdims=True)
        biased = scores + weights["router_bias"]
        if config.router == "group_limited":
            by_group = biased.reshape(len(x), config.num_groups, -1)
            best = jnp.sort(by_group, axis=-1)[..., -2:].sum(-1)
            allowed = _select(best, config.top_groups)
            biased = jnp.where(allowed[..., None] > 0, by_group, -jnp.inf).reshape(biased.shape)
        chosen = _select(biased, config.top_k)
    kept = chosen * scores
    if config.router != "softmax" or config.normalize:
        kept = kept / kept.sum(-1, keepdims=True)
    return config.scale * kept, chosen, probabilities


def ffn(config, x, gate, up, down):
    """f(x) of every expert: weights [..., H, F], results [..., T, H]."""
    inner = x @ up
    inner = config.activation(inner) if gate is None else config.activation(x @ gate) * inner
    return inner @ down


def moe(config, weights, x):
    """(out [T, H], balance loss, load i32[E])."""
    gate, chosen, probabilities = gates(config, weights, x)
    results = ffn(config, x, weights.get("w_gate"), weights["w_up"], weights["w_down"])
    out = jnp.einsum("te,eth->th", gate, results)
    if config.shared_width:
        shared = (weights.get("shared_gate"), weights["shared_up"], weights["shared_down"])
        out += ffn(config, x, *shared)
    load = chosen.sum(0)
    share = load / load.sum()
    balance = config.num_experts * jnp.sum(share * probabilities.mean(0))
    return out, balance, load.astype(jnp.int32)

"""What a timed loop calls: operations of an exchange, each of which depends on the one before it.

XLA leaves out a call that has the operands of another one, and takes what no turn of a loop changes
out of it. `lax.optimization_barrier` prevents neither. So each call changes the operands of the
next, by a comparison that never holds, which XLA cannot know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep._cli.baselines import Exchange
from jax_ep._cli.bench_report_cases import OPERATIONS

Tree = Any
Step = Callable[[Tree, Tree], Tree]  # carry, context -> next carry

_LARGEST = 1e30  # of finite results; nothing measured here comes near


def after(array: jax.Array, result: Tree) -> jax.Array:
    """``array``, but not before all of ``result`` exists."""
    leaves = jax.tree.leaves(lax.optimization_barrier(result))  # whole, not one element of each
    seen = sum(
        leaf.reshape(-1)[0].astype(jnp.float32)
        for leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size
    )
    first = (0,) * array.ndim
    return array.at[first].set(jnp.where(seen == _LARGEST, 0, array[first]).astype(array.dtype))


def routing_of(x: jax.Array, context: Tree) -> tuple[jax.Array, jax.Array]:
    """(ids, weights) of the context, which depend on x, as a router's do."""
    idx, weights = context
    never = x[0, 0] == _LARGEST
    return jnp.where(never, -1, idx), jnp.where(never, 0, weights)


def steps_of(method: Exchange) -> dict[str, Step]:
    """What one call is, by operation. The carry is x, or for combine the rows."""

    def pair(x: jax.Array, idx: jax.Array, weights: jax.Array) -> jax.Array:
        rows, state = method.dispatch(x, idx, weights)
        return method.combine(rows, state, weights)

    def dispatch(x: jax.Array, context: Tree) -> jax.Array:
        return after(x, method.dispatch(x, *routing_of(x, context)))

    def combine(rows: jax.Array, context: Tree) -> jax.Array:
        state, weights = context
        return after(rows, method.combine(rows, state, weights))

    def forward(x: jax.Array, context: Tree) -> jax.Array:
        return after(x, pair(x, *routing_of(x, context)))

    def with_gradients(x: jax.Array, context: Tree) -> jax.Array:
        ids, weights = routing_of(x, context)

        def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
            return 0.5 * jnp.sum(pair(x, ids, weights).astype(jnp.float32) ** 2)

        return after(x, jax.value_and_grad(loss, argnums=(0, 1))(x, weights))

    return dict(zip(OPERATIONS, (dispatch, combine, forward, with_gradients), strict=True))

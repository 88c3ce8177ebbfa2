"""What combine's gradient does with the rows it dispatches, in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_ep._ops.call import Call
from jax_ep._ops.rounding import rounded


def apply(
    call: Call,
    used: jax.Array,
    rows: jax.Array,
    y: jax.Array | None,
    row_weights: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Rows G [R, H] to (weights * G, <G, y> f32[R]); padding, where y may hold anything, gives 0.

    Args:
        call: of the dispatch.
        used: bool[R].
        rows: [R, H].
        y: [R, H], or None for no dots.
        row_weights: f32[R], or None for 1.
    """
    dots = None
    wide = rows.astype(jnp.float32)
    if y is not None:
        dots = jnp.where(used, jnp.sum(wide * y.astype(jnp.float32), axis=-1), 0.0)
    if row_weights is None:
        return rows, dots
    scaled = rounded(wide * row_weights[:, None], call.dtype)
    return jnp.where(used[:, None], scaled, jnp.zeros((), call.dtype)), dots

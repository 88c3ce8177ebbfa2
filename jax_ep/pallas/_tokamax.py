"""tokamax_ffn: the gated FFN through Tokamax's ragged_dot, for those who install it."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp


def tokamax_ffn(
    x: jax.Array,
    group_sizes: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    implementation: Any = None,
) -> jax.Array:
    """As `grouped_ffn`, with `tokamax.ragged_dot` as the grouped product.

    Args:
        x: floats [R, H], as `recv.x` of expert_major.
        group_sizes: integers [E_l], as `recv.group_sizes`.
        w_gate: [E_l, H, F] in x's dtype.
        w_up: [E_l, H, F] in x's dtype.
        w_down: [E_l, F, H] in x's dtype.
        implementation: Tokamax's: "mosaic", "triton", "xla", a sequence of them, or None for its
            own choice.

    Returns:
        [R, H] in x's dtype. Rows beyond sum(group_sizes) are zero and get zero gradient.

    Raises:
        ImportError: Tokamax is not installed; says how to install it.

    Example:
        >>> y = jax_ep.pallas.tokamax_ffn(recv.x, recv.group_sizes, w_gate, w_up, w_down)
    """
    tokamax = _import_tokamax()
    sizes = group_sizes.astype(jnp.int32)
    is_used = (jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(sizes))[:, None]

    def used(rows: jax.Array) -> jax.Array:
        # Not every implementation writes the rows beyond the groups.
        return jnp.where(is_used, rows, jnp.zeros((), rows.dtype))

    def dot(rows: jax.Array, weights: jax.Array) -> jax.Array:
        out: jax.Array = tokamax.ragged_dot(rows, weights, sizes, implementation=implementation)
        return used(out)

    x = used(x)
    hidden = jax.nn.silu(dot(x, w_gate)) * dot(x, w_up)
    return dot(hidden, w_down)


def _import_tokamax() -> Any:
    try:
        tokamax = importlib.import_module("tokamax")
    except ImportError as error:
        raise ImportError(
            "jax_ep.pallas.tokamax_ffn needs Tokamax; pip install 'jax_ep[tokamax]'"
        ) from error
    # Tokamax 0.0.12 reads absl flags, and parses sys.argv if nobody has: a program with an argument
    # parser of its own would fail at its own options.
    flags: Any = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():
        flags.mark_as_parsed()
    return tokamax

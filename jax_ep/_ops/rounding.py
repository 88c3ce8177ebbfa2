"""Roundings that XLA keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def rounded(wide: jax.Array, dtype: Any) -> jax.Array:
    """f32 to `dtype`, also if f32 comes next.

    XLA leaves out such a pair of conversions (`xla_allow_excess_precision`, which is on unless the
    user says otherwise), with other bits than a kernel's, which stores `dtype`.
    """
    name = jnp.dtype(dtype).name
    if name == "bfloat16":
        wide = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
    narrow = wide.astype(dtype)
    # reduce_precision would flush subnormals of float16.
    return lax.optimization_barrier(narrow) if name == "float16" else narrow

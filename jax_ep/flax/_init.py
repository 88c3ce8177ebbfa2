"""How weights are initialised, the same for NNX and Linen."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

Initializer = Callable[[jax.Array, tuple[int, ...], Any], Any]
Inits = Initializer | Mapping[str, Initializer] | None


@functools.partial(jax.jit, static_argnums=(1, 2))  # one program per shape, not one per operation
def default_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Truncated normal of variance 1 / fan_in, every expert on its own."""
    init = jax.nn.initializers.variance_scaling(
        1.0, "fan_in", "truncated_normal", batch_axis=tuple(range(len(shape) - 2))
    )
    return init(key, shape, dtype)


def initializer(inits: Inits, name: str) -> Initializer:
    """The initializer of weight `name`."""
    if isinstance(inits, Mapping):
        return inits.get(name, default_init)
    return default_init if inits is None else inits

"""What implementation="xla" moves between ranks: every bit arrives, in pieces of limited size.

Floats narrower than f32 travel as unsigned integers. XLA:CPU widens bf16 for every collective and
narrows it again, which makes signalling NaNs quiet, and XLA:GPU may gather f32 and cast to bf16
then. Of f32 no platform changes a bit, so it goes as it is: on TPUs each turn into integers is a
copy. (Where only products read the rows, XLA:TPU may gather bf16, to which these round them.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import _jax_compat
from jax_ep._ops.call import Call

# Of the result of one collective, on one device. libtpu 0.0.42 aborts at exchanges of 2 GiB.
MAX_BYTES = 2**30


def as_bits(array: jax.Array) -> tuple[jax.Array, Any]:
    """`array` as it travels, and its dtype for `from_bits`."""
    width = jnp.dtype(array.dtype).itemsize * 8
    if width >= 32 or not jnp.issubdtype(array.dtype, jnp.floating):
        return array, array.dtype
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}")), array.dtype


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_bits`."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def gather(call: Call, array: jax.Array) -> jax.Array:
    """[N, T, ...]: every rank's `array` [T, ...]."""
    bits, dtype = as_bits(array)
    everyones = _in_pieces(call, _jax_compat.all_gather, bits, token_axis=0)
    return from_bits(everyones, dtype)


def exchange(call: Call, array: jax.Array) -> jax.Array:
    """Of [N, T, ...] element d goes to rank d; the result holds what rank s sent at s."""
    bits, dtype = as_bits(array)
    exchanged = _in_pieces(call, _jax_compat.all_to_all, bits, token_axis=1)
    return from_bits(exchanged, dtype)


def _in_pieces(
    call: Call,
    collective: Callable[[jax.Array, tuple[str, ...]], jax.Array],
    array: jax.Array,
    token_axis: int,
) -> jax.Array:
    """`collective` of `array`, some tokens at a time if the result has more than MAX_BYTES.

    A piece has one token of each rank at least. A loop keeps XLA from joining the pieces again.
    """
    axes, ranks = call.group.axes, call.group.num_ranks
    tokens, row = array.shape[token_axis], array.shape[token_axis + 1 :]
    at_most = max(MAX_BYTES // (ranks * math.prod(row) * array.dtype.itemsize), 1)
    if tokens <= at_most:
        return collective(array, axes)
    pieces = -(-tokens // at_most)
    size = -(-tokens // pieces)

    def move(piece: jax.Array, moved: jax.Array) -> jax.Array:
        start = jnp.minimum(piece * size, tokens - size)  # the last may move some tokens again
        part = collective(lax.dynamic_slice_in_dim(array, start, size, token_axis), axes)
        return lax.dynamic_update_slice_in_dim(moved, part, start, 1)

    moved = _jax_compat.to_varying(
        jnp.zeros((ranks, tokens, *row), array.dtype), _jax_compat.varying_axes(array)
    )
    result: jax.Array = lax.fori_loop(0, pieces, move, moved)
    return result

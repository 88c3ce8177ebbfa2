"""Collectives that XLA:CPU lacks, made of those that it has: what uses them can be tested."""

import jax.numpy as jnp
from jax import lax


def ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What jax.lax documents, with an operation that XLA:CPU has; NaN where sizes disagree."""
    everyone = lax.all_gather(operand, axis_name)
    mine = [
        lax.all_gather(array, axis_name)[:, lax.axis_index(axis_name)]
        for array in (input_offsets, send_sizes, output_offsets)
    ]
    for source in range(everyone.shape[0]):
        begin, size, land = (array[source] for array in mine)
        row = jnp.arange(output.shape[0]) - land
        taken = everyone[source, jnp.clip(begin + row, 0, operand.shape[0] - 1)]
        taken = jnp.where(size == recv_sizes[source], taken, jnp.nan)
        output = jnp.where(((row >= 0) & (row < size))[:, None], taken, output)
    return output

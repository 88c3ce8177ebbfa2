"""Roundings of "xla" that XLA must keep: a GPU would drop a conversion that f32 follows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, inputs_of, mesh_of, per_rank, put

import jax_ep
from jax_ep._ops.rounding import rounded

KEPT_BY = {"bfloat16": "reduce_precision", "float16": "optimization_barrier"}


@pytest.mark.parametrize("dtype", [*KEPT_BY, "float32"])
def test_it_is_the_conversion_with_all_special_numbers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    tiny = np.float32(2.0) ** np.arange(-149, -100, dtype=np.float32)
    odd = np.array([np.inf, -np.inf, -0.0], np.float32)
    x = np.concatenate([bits.view(np.float32), tiny, tiny * np.float32(1.37), odd])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        wanted = x.astype(jnp.dtype(dtype))
    # CPUs flush f32's subnormals in either way of computing it.
    is_normal = np.abs(x) >= np.finfo(np.float32).tiny
    assert_same_bits(jax.jit(rounded, static_argnums=1)(x, dtype)[is_normal], wanted[is_normal])
    assert np.isnan(rounded(jnp.float32(np.nan), dtype))


@pytest.mark.parametrize("dtype", KEPT_BY)
def test_combine_rounds_so_that_it_is_kept(dtype: str) -> None:
    case = Case(ranks=2, tokens=5, top_k=2, hidden=8, mode="ht", partials="dtype", dtype=dtype)
    inputs = inputs_of(case)
    with jax_ep.create_group(mesh_of(2), "ep", case.config(), "xla") as group:

        def combine(rows: jax.Array, ids: jax.Array) -> jax.Array:
            recv = jax_ep.dispatch(group, rows, ids)
            return jax_ep.combine(group, recv.x, recv).astype(jnp.float32)

        text = str(per_rank(group, combine).trace(*put(group, (inputs.x, inputs.ids))).jaxpr)
    # The rows, a rank's partials, a node's and the sum.
    assert text.count(f" {KEPT_BY[dtype]}[") + text.count(f" {KEPT_BY[dtype]} ") >= 4

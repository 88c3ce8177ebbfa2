"""Dispatches in FP8 that kernels quantise, against implementation="xla" on the same devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

pytestmark = pytest.mark.gpu

TOP_K, EXPERTS = 4, 8

# tokens, block, scale, hidden, dtype, mode, layout
CASES = [
    (48, 128, "float32", 7168, "bfloat16", "ht", "expert_major"),
    (48, 128, "ue8m0", 1024, "float16", "ht", "rank_major"),
    (48, 16, "float32", 48, "bfloat16", "ht", "expert_batched"),
    (48, 64, "ue8m0", 192, "float32", "ht", "expert_major"),
    (48, 128, "float32", 7168, "bfloat16", "ll", "expert_batched"),
    (48, 256, "float32", 512, "float32", "ll", "rank_major"),
    (48, 32, "ue8m0", 96, "float16", "ll", "expert_major"),
    # Few enough for tagged words; the rows of the second are cut into pieces of many units.
    (8, 128, "float32", 7168, "bfloat16", "ll", "expert_batched"),
    (3, 512, "ue8m0", 16384, "float32", "ll", "expert_major"),
    (48, 48, "float32", 96, "bfloat16", "ht", "expert_major"),  # no kernel takes this block
]


def hard_rows(count: int, hidden: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((count, hidden), np.float32)
    x *= 2.0 ** rng.integers(-12, 4, (count, 1)).astype(np.float32)
    x[0], x[1, 3], x[2, :2] = 0, np.nan, (np.inf, -0.0)
    return x


def bits(array: jax.Array) -> np.ndarray:
    """As integers, every NaN the same."""
    values = np.asarray(array)
    is_nan = np.isnan(values.astype(np.float32))
    integers = values.view(f"uint{8 * values.dtype.itemsize}").copy()
    integers[is_nan] = np.iinfo(integers.dtype).max
    return integers


@pytest.mark.parametrize(
    ("tokens", "block", "scale", "hidden", "dtype", "mode", "layout"),
    CASES,
    ids=lambda value: str(value),
)
def test_kernels_give_the_bits_of_xla(
    tokens: int, block: int, scale: Any, hidden: int, dtype: str, mode: Any, layout: Any
) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs GPUs and `pytest -m gpu`")
    mesh = Mesh(np.array(jax.devices()), ("ep",))
    ranks = mesh.size
    config = jax_ep.Config(
        num_experts=EXPERTS * ranks,
        top_k=TOP_K,
        hidden=hidden,
        max_tokens=tokens,
        dtype=jnp.dtype(dtype),
        wire=jax_ep.FP8(block=block, scale=scale),
        timeout_s=15.0,
    )
    rng = np.random.default_rng(0)
    count = ranks * tokens
    inputs = [
        jnp.asarray(hard_rows(count, hidden)).astype(dtype),
        np.stack([rng.permutation(EXPERTS * ranks)[:TOP_K] for _ in range(count)]).astype(np.int32),
        rng.random((count, TOP_K), np.float32),
    ]
    inputs = [jax.device_put(array, NamedSharding(mesh, P("ep"))) for array in inputs]

    def outputs(implementation: Any) -> list[jax.Array]:
        with jax_ep.create_group(mesh, "ep", config, implementation) as group:

            def everything(x: Any, ids: Any, weights: Any) -> Any:
                given = {"mode": mode, "layout": layout}
                recv = jax_ep.dispatch(group, x, ids, weights, **given)
                planned = jax_ep.dispatch(group, x, topk_weights=weights, plan=recv.plan)
                rows = jax_ep.dispatch_quantized(group, x, ids, weights, **given)
                columns = jax_ep.dispatch_quantized(
                    group, x, plan=recv.plan, scales_layout="columns"
                )
                parts = [recv.x, recv.weights, planned.x, planned.weights, rows.weights]
                parts += [rows.x.values, rows.x.scales, columns.x.values, columns.x.scales]
                return [part[None] for part in parts]

            mapped = jax.shard_map(
                everything, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False
            )
            step = jax.jit(mapped)
            results: list[jax.Array] = step(*inputs)
            for again, first in zip(step(*inputs), results, strict=True):
                np.testing.assert_array_equal(bits(again), bits(first))
            return results

    for number, (got, expected) in enumerate(zip(outputs("native"), outputs("xla"), strict=True)):
        np.testing.assert_array_equal(bits(got), bits(expected), err_msg=f"output {number}")

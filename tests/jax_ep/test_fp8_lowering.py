"""Which dispatches in FP8 the kernels of GPUs take, by what is lowered for them."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jax_ep

RANKS, TOKENS, HIDDEN, TOP_K = 4, 16, 384, 2


def calls(platform: str, mode: Any, **options: Any) -> set[str]:
    """The custom calls of a dispatch of either kind, lowered for `platform`."""
    sizes = {"num_experts": 8, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": TOKENS}
    given = {"wire": jax_ep.FP8(block=128), "node_size": RANKS} | options
    config = jax_ep.Config(**sizes, dtype=jnp.bfloat16, **given)
    mesh = AbstractMesh((RANKS,), ("ep",))
    with jax_ep.create_group(mesh, "ep", config, "native") as group:

        def both(x: Any, ids: Any, weights: Any) -> Any:
            recv = jax_ep.dispatch(group, x, ids, weights, mode=mode)
            quantized = jax_ep.dispatch_quantized(group, x, ids, mode=mode, scales_layout="columns")
            return recv.x, quantized.x.values, quantized.x.scales

        step = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        count = RANKS * TOKENS
        shapes = [
            jax.ShapeDtypeStruct((count, HIDDEN), jnp.bfloat16),
            jax.ShapeDtypeStruct((count, TOP_K), jnp.int32),
            jax.ShapeDtypeStruct((count, TOP_K), jnp.float32),
        ]
        text = step.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
    return set(re.findall(r"@jax_ep_(\w+)", text)) - {"plan"}


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_gpus_quantise_on_the_way(mode: str, scale: Any) -> None:
    name = "ll_dispatch" if mode == "ll" else "dispatch"
    wire = jax_ep.FP8(block=128, scale=scale)
    assert calls("cuda", mode, wire=wire) == {f"{name}_fp8"}
    assert calls("cpu", mode, wire=wire) >= {name, "quantize"}


@pytest.mark.parametrize(
    "options",
    [
        {"wire": jax_ep.FP8(block=96)},  # no power of two
        {"node_size": 2},
        {"node_size": None},  # not known before there are devices
    ],
    ids=str,
)
def test_other_dispatches_move_records(options: dict[str, Any]) -> None:
    assert calls("cuda", "ht", **options) == {"dispatch"}

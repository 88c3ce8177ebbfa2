"""overlap and its kin: values and gradients as without, and what a program for CUDA then holds.

What XLA makes of such a program is tests/gpu/test_schedules.py.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, group_of, inputs_of, run
from jax import lax
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._ops import operations
from jax_ep._ops.call import Call
from jax_ep._types import PlanArrays

Array = jax.Array
CASE = Case(ranks=4, tokens=10, recv_rows=16, mode="ht")
LAYOUTS = ("expert_major", "expert_batched", "rank_major")


def test_overlap_gives_back_values_and_gradients() -> None:
    def function(x: Array, w: Array, tied: bool) -> Array:
        made = {"rows": 2 * x, "counts": jnp.arange(3), "none": None}
        other = (w @ w, x.astype(jnp.bfloat16))
        if tied:
            x, w = jax_ep.overlap_gradients(x, w)
            made, other = jax_ep.overlap(made, other)
        assert made["none"] is None
        return jnp.sum(made["rows"] * other[0] * w) + jnp.sum(
            made["counts"].astype(x.dtype) * x[0, :3]
        )

    x, w = jnp.arange(16.0).reshape(4, 4), jnp.ones((4, 4))
    plain, tied = (
        jax.jit(jax.value_and_grad(function, argnums=(0, 1)), static_argnums=2)(x, w, each)
        for each in (False, True)
    )
    for got, expected in zip(jax.tree.leaves(tied), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_integers_get_no_gradient_by_it() -> None:
    """pmax has no rule for gradients; a count of a plan may be its operand."""

    def loss(x: Array) -> Array:
        tied, _ = jax_ep.overlap({"x": x, "count": jnp.int32(3)}, 2 * x)
        return jnp.sum(tied["x"] * lax.pmax(tied["count"], "i").astype(x.dtype))

    np.testing.assert_array_equal(jax.vmap(jax.grad(loss), axis_name="i")(jnp.ones((2, 3))), 3)


def test_what_varies_over_other_axes_keeps_its_type() -> None:
    """A parameter that all ranks share, in one tree with what differs between them."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(x: Array, shared: Array) -> Any:
        def loss(x: Array, shared: Array) -> Array:
            x, shared = jax_ep.overlap(*jax_ep.overlap_gradients(x, shared))
            constant, _ = jax_ep.overlap(np.float32(3), x)
            return jnp.sum(x * shared * constant)

        return jax.grad(loss, argnums=(0, 1))(x, shared)

    specs = (P("i"), P())
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))
    d_x, d_shared = mapped(jnp.ones(4), jnp.float32(2))
    np.testing.assert_array_equal(d_x, 6)
    np.testing.assert_array_equal(d_shared, 12)


def test_overlap_ties_in_both_directions() -> None:
    def function(x: Array, w: Array) -> Array:
        x, w = jax_ep.overlap(2 * x, 3 * w)
        return jnp.sum(x * w)

    def backward_alone(x: Array, w: Array) -> Array:
        x, w = jax_ep.overlap_gradients(2 * x, 3 * w)
        return jnp.sum(x * w)

    one = jnp.ones(3)
    for each, counts in ((function, (1, 2)), (backward_alone, (0, 1))):
        for program, count in zip((each, jax.grad(each, argnums=(0, 1))), counts, strict=True):
            text = jax.jit(program).lower(one, one).as_text()
            assert text.count("optimization_barrier") == count


def experts(kernels: Array, rows: Array, group_sizes: Array) -> Array:
    return lax.ragged_dot(rows, kernels, group_sizes)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("has_weights", [True, False])
def test_chunks_that_overlap_are_the_chunks_of_a_scan(
    chunks: int, has_weights: bool, implementation: str
) -> None:
    group, inputs = group_of(CASE, implementation), inputs_of(CASE, "zipf")
    shape = (CASE.ranks, CASE.experts // CASE.ranks, CASE.hidden, CASE.hidden)
    kernels = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def layer(overlap: bool) -> Any:
        def both(x: Array, ids: Array, w: Array, kernels: Array) -> Any:
            def out(x: Array, w: Array, kernels: Array) -> Any:
                gates = w if has_weights else None
                return jax_ep.moe(
                    group,
                    x,
                    ids,
                    gates,
                    experts,
                    kernels,
                    chunks=chunks,
                    overlap=overlap,
                    return_stats=True,
                )

            def loss(*args: Array) -> Any:
                y, stats = out(*args)
                return jnp.sum(y * jnp.cos(y)), (y, stats)

            return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, w, kernels)

        return run(group, both, inputs.x, inputs.ids, inputs.weights, kernels)

    (scanned, (y, stats)), (unrolled, (y2, stats2)) = layer(False), layer(True)
    assert_same_bits(y2, y)
    for got, expected in zip(jax.tree.leaves(stats2), jax.tree.leaves(stats), strict=True):
        np.testing.assert_array_equal(got, expected)
    for got, expected in zip(unrolled, scanned, strict=True):  # sums of chunks in another order
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_overlap_of_one_chunk_is_refused() -> None:
    group, inputs = group_of(CASE, "xla"), inputs_of(CASE)
    with pytest.raises(ValueError, match="overlap=True with chunks=1"):
        run(
            group,
            lambda x, ids: jax_ep.moe(group, x, ids, None, experts, None, overlap=True),
            inputs.x,
            inputs.ids,
        )


SIZES = {"num_experts": 16, "top_k": 4, "hidden": 64, "max_tokens": 256, "mode": "ht"}


def lowering_group(overlap: bool | None, mode: str = "ht") -> jax_ep.Group:
    config = jax_ep.Config(**{**SIZES, "mode": mode}, overlap=overlap)
    mesh = jax.sharding.AbstractMesh((4,), ("ep",))
    return jax_ep.create_group(mesh, "ep", config, implementation="native")


def lowered(group: jax_ep.Group, platform: str, layout: Any, **options: Any) -> str:
    def step(x: Array, ids: Array, w: Array) -> Any:
        def loss(x: Array, w: Array) -> Array:
            recv = jax_ep.dispatch(group, x, ids, w, layout=layout)
            out = jax_ep.combine(group, 2 * recv.x, recv)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, argnums=(0, 1))(x, w)

    mapped = jax.shard_map(step, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"), **options)
    sharding = jax.sharding.NamedSharding(group.mesh, P("ep"))
    shapes = [((1024, 64), jnp.bfloat16), ((1024, 4), jnp.int32), ((1024, 4), jnp.float32)]
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
    return jax.jit(mapped).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def targets(text: str) -> set[str]:
    return set(re.findall(r"custom_call @jax_ep_(\w+)", text))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_operations_of_a_program_for_cuda_are_asynchronous(
    layout: str, check_vma: bool
) -> None:
    text = lowered(lowering_group(True), "cuda", layout, check_vma=check_vma)
    found = targets(text)
    assert {"plan_beside", "dispatch_rows_beside", "combine_rows_beside"} <= found
    assert all(target.endswith("_beside") for target in found)
    streams = re.findall(r'_xla_stream_annotation = "(\w+)"', text)
    calls = re.findall(r"custom_call @jax_ep_\w+", text)
    assert len(streams) >= len(set(calls)) and set(streams) == {"collective"}
    # One result each, but for the rows and dot products of combine's gradient.
    for target, result in re.findall(r"custom_call @jax_ep_(\w+)\(.*-> (.*)", text):
        assert result.startswith("(") == (target == "dispatch_dots_beside"), (target, result)


def test_nothing_is_asynchronous_elsewhere() -> None:
    for group, platform in (
        (lowering_group(True), "cpu"),
        (lowering_group(True), "rocm"),
        (lowering_group(True, mode="ll"), "cuda"),
        (lowering_group(None), "cuda"),
        (lowering_group(False), "cuda"),
    ):
        text = lowered(group, platform, "expert_major")
        assert "_xla_stream_annotation" not in text
        assert not any(target.endswith("_beside") for target in targets(text))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_plan_has_a_place_for_each_leaf(layout: Any) -> None:
    call = Call(lowering_group(True), "ht", layout, num_tokens=100)
    places, size = operations.packed_plan(call)
    types = operations.array_types(call)
    assert list(places) == list(PlanArrays._fields)
    ends = [*list(places.values())[1:], size]
    for (name, begin), end in zip(places.items(), ends, strict=True):
        shape = types[name].shape
        elements = 0 if shape is None else int(np.prod(shape))
        assert begin % 32 == 0 and elements <= end - begin < elements + 32, name


def test_what_is_no_bool_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Config.overlap.*got 1.*None, True or False"):
        jax_ep.Config(**SIZES, overlap=1)

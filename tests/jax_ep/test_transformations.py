"""The ops under every JAX transformation that they promise to work with."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, group_of, inputs_of, mesh_of, per_rank, put, run
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

Array = jax.Array
CASE = Case(ranks=4, tokens=6)
SQUARE = (2, 2)


def layer(group: jax_ep.Group, x: Array, ids: Array, w: Array, **options: Any) -> Array:
    recv = jax_ep.dispatch(group, x, ids, w, **options)
    return jax_ep.combine(group, recv.x * 2, recv)


def halves_layer(group: jax_ep.Group, x: Array, ids: Array, w: Array) -> Array:
    recv = jax_ep.dispatch_done(group, jax_ep.dispatch_start(group, x, ids, w))
    flight = jax_ep.combine_start(group, recv.x * 2, recv)
    return jax_ep.combine_done(group, flight)


def expected_layer(x: Any, w: Any) -> np.ndarray:
    """What `layer` computes when every id is valid."""
    return 2 * np.asarray(x) * np.asarray(w).sum(-1, keepdims=True)


def sum_of_squares(group: jax_ep.Group, x: Array, ids: Array, w: Array) -> Array:
    return jnp.sum(layer(group, x, ids, w) ** 2)


def expected_grads(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of sum_of_squares by hand: sum(4 x^2 W^2), W the sum of weights."""
    total = w.sum(-1, keepdims=True)
    d_x = 8 * x * total**2
    d_w = 8 * total * (x**2).sum(-1, keepdims=True)
    return d_x, np.broadcast_to(d_w, w.shape)


def assert_grads(got: Any, x: np.ndarray, w: np.ndarray) -> None:
    for grad, wanted in zip(got, expected_grads(x, w), strict=True):
        np.testing.assert_allclose(grad, wanted, rtol=2e-5, atol=1e-5)


def out_and_grads(
    group: jax_ep.Group, x: Array, ids: Array, w: Array, **options: Any
) -> tuple[Array, tuple[Array, Array]]:
    """`layer` and the gradients of its sum of squares, in one program."""

    def loss(x: Array, w: Array) -> tuple[Array, Array]:
        out = layer(group, x, ids, w, **options)
        return jnp.sum(out**2), out

    grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return out, grads


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_auto_and_explicit_meshes(axis_type: str, check_vma: bool, implementation: str) -> None:
    mesh = mesh_of(CASE.ranks, axis_type)
    with jax_ep.create_group(mesh, "ep", CASE.config(), implementation) as group:
        inputs = inputs_of(CASE)
        step = per_rank(group, functools.partial(out_and_grads, group), check_vma=check_vma)
        args = put(group, (inputs.x, inputs.ids, inputs.weights))
        out, grads = jax.device_get(step(*args))
        np.testing.assert_allclose(out, expected_layer(inputs.x, inputs.weights), rtol=1e-5)
        assert_grads(grads, inputs.x, inputs.weights)


@pytest.mark.parametrize("call", [layer, halves_layer], ids=["whole", "halves"])
def test_scan_over_layers_with_changing_routing(call: Any, implementation: str) -> None:
    group = group_of(CASE, implementation)
    many = [inputs_of(CASE, seed=seed) for seed in range(5)]
    ids = np.stack([inputs.ids for inputs in many], axis=1)
    weights = np.stack([inputs.weights for inputs in many], axis=1)
    weights /= 2 * weights.sum(-1, keepdims=True)  # each layer is then the identity

    def loss(x: Array, ids: Array, w: Array) -> tuple[Array, Array]:
        def body(x: Array, step: Any) -> tuple[Array, None]:
            return call(group, x, *step), None

        out, _ = lax.scan(body, x, (ids, w))
        return jnp.sum(out**2), out

    x = many[0].x
    grad, out = run(group, jax.grad(loss, has_aux=True), x, ids, weights)
    np.testing.assert_allclose(out, x, rtol=1e-5)
    np.testing.assert_allclose(grad, 2 * x, rtol=1e-5)


def test_plans_can_be_scanned_over_and_reused(implementation: str) -> None:
    group = group_of(CASE, implementation)
    many = [inputs_of(CASE, seed=seed) for seed in range(3)]
    ids = np.stack([inputs.ids for inputs in many], axis=1)

    def planned(x: Array, ids: Array) -> tuple[Array, Array]:
        _, plans = lax.scan(lambda _, i: (None, jax_ep.plan(group, i)), None, ids)

        def body(total: Array, plan: jax_ep.Plan) -> tuple[Array, Array]:
            rows = jax_ep.dispatch(group, x, plan=plan).x
            return total + jax_ep.combine(group, rows, plan, weights=None), plan.overflow

        return lax.scan(body, jnp.zeros_like(x), plans)

    out, _ = run(group, planned, many[0].x, ids)
    np.testing.assert_allclose(out, many[0].x * 6, rtol=1e-5)


def test_while_loop(implementation: str) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)

    def repeated(x: Array, ids: Array, w: Array) -> Array:
        def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
            i, x = state
            return i + 1, layer(group, x, ids, w)

        return lax.while_loop(lambda state: state[0] < 3, body, (jnp.int32(0), x))[1]

    weights = inputs.weights / (2 * inputs.weights.sum(-1, keepdims=True))
    np.testing.assert_allclose(
        run(group, repeated, inputs.x, inputs.ids, weights), inputs.x, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("policy", "mode"),
    [("nothing_saveable", "ht"), ("everything_saveable", "ll"), ("plan", "ht"), ("recv", "ll")],
)
def test_remat_with_policies(policy: str, mode: str, implementation: str) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)
    if policy in ("plan", "recv"):
        chosen = jax.checkpoint_policies.save_only_these_names(f"jax_ep_{policy}")
    else:
        chosen = getattr(jax.checkpoint_policies, policy)

    def loss(x: Array, ids: Array, w: Array) -> Array:
        body = jax.checkpoint(
            lambda x, w: jnp.sin(layer(group, x, ids, w, mode=mode)), policy=chosen
        )
        return jnp.sum(body(x, w))

    args = (inputs.x, inputs.ids, inputs.weights)
    grads = run(group, jax.grad(loss, argnums=(0, 2)), *args)
    outer = np.cos(expected_layer(inputs.x, inputs.weights))
    total = inputs.weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(grads[0], outer * 2 * total, rtol=2e-4, atol=1e-5)
    wanted = np.broadcast_to((outer * 2 * inputs.x).sum(-1, keepdims=True), grads[1].shape)
    np.testing.assert_allclose(grads[1], wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_saving_the_plan_removes_the_planning_from_the_backward(
    implementation: str, mode: Any
) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)

    def planned(names: tuple[str, ...]) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)

        def loss(x: Array, ids: Array, w: Array) -> Array:
            body = jax.checkpoint(
                lambda x: jnp.sin(layer(group, x, ids, w, mode=mode)), policy=policy
            )
            return jnp.sum(body(x))

        args = put(group, (inputs.x, inputs.ids, inputs.weights))
        text = per_rank(group, jax.value_and_grad(loss)).lower(*args).as_text()
        if implementation == "xla":
            return text.count("stablehlo.all_gather")
        return text.count("@jax_ep_plan(") + text.count("@jax_ep_ll_dispatch(")

    assert planned(("jax_ep_plan",)) == planned(()) - 1
    if implementation == "native":
        assert planned(("jax_ep_plan",)) == 1


def test_donated_inputs(implementation: str) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)
    mapped = jax.shard_map(
        lambda x, i, w: layer(group, x[0], i[0], w[0])[None],
        mesh=group.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    x, ids, w = put(group, (inputs.x, inputs.ids, inputs.weights))
    out = jax.jit(mapped, donate_argnums=0)(x, ids, w)
    assert x.is_deleted()
    np.testing.assert_allclose(out, expected_layer(inputs.x, inputs.weights), rtol=1e-5)


def square_mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
    if len(jax.devices()) < 4:
        pytest.skip(f"needs 4 devices for a mesh of 2 by 2, there are {len(jax.devices())}")
    devices = np.array(jax.devices()[:4]).reshape(SQUARE)
    return Mesh(devices, ("a", "b"), axis_types=(axis_type,) * 2)


@functools.cache
def square_group(axis: str | tuple[str, ...], implementation: str) -> jax_ep.Group:
    group = jax_ep.create_group(square_mesh(), axis, CASE.config(), implementation)
    harness.keep(group)
    return group


def on_square(function: Callable[..., Any], *args: np.ndarray, **options: Any) -> Any:
    """Runs `function` on local arrays of a 2x2 mesh; arrays are [4, ...], device by device."""
    mesh = square_mesh()

    def local(*args: Array) -> Any:
        return jax.tree.map(lambda a: a[None], function(*(a[0] for a in args)))

    spec = P(("a", "b"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    placed = jax.device_put(args, NamedSharding(mesh, spec))
    return jax.device_get(jax.jit(mapped)(*placed))


@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
def test_other_axes_make_independent_groups(axis: Any, implementation: str) -> None:
    group = square_group(axis, implementation)
    inputs = inputs_of(CASE)

    def step(x: Array, ids: Array, w: Array) -> Any:
        plan = jax_ep.plan(group, ids, mode="ht")
        out, grads = out_and_grads(group, x, ids, w, mode="ht")
        return out, plan.send_slot, lax.axis_index(axis), grads

    out, slots, ranks, grads = on_square(step, inputs.x, inputs.ids, inputs.weights)
    np.testing.assert_allclose(out, expected_layer(inputs.x, inputs.weights), rtol=1e-5)
    assert_grads(grads, inputs.x, inputs.weights)
    np.testing.assert_array_equal(
        slots // group.recv_rows(CASE.tokens), inputs.ids // group.experts_per_rank
    )
    order = {"a": [0, 0, 1, 1], "b": [0, 1, 0, 1], ("a", "b"): [0, 1, 2, 3]}
    np.testing.assert_array_equal(ranks, order.get(axis, [0, 2, 1, 3]))


def test_two_groups_on_crossing_axes_in_one_program(implementation: str) -> None:
    rows, columns = (square_group(axis, implementation) for axis in ("a", "b"))
    inputs = inputs_of(CASE)

    def step(x: Array, ids: Array, w: Array) -> Array:
        independent = [layer(group, x, ids, w) for group in (rows, columns, rows, columns)]
        return sum(independent, start=jnp.zeros_like(x)) + lax.psum(jnp.sum(x), ("a", "b"))

    out = on_square(step, inputs.x, inputs.ids, inputs.weights)
    wanted = 4 * expected_layer(inputs.x, inputs.weights) + inputs.x.sum()
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-4)


def test_invariant_operands_get_summed_cotangents(implementation: str) -> None:
    """x is the same on both rows of the mesh: its gradient is the sum over them."""
    group = square_group("b", implementation)
    inputs = inputs_of(CASE)
    mesh = square_mesh()

    def loss(x: Array, ids: Array, w: Array) -> Array:
        def local(x: Array, ids: Array, w: Array) -> Array:
            value = sum_of_squares(group, x[0], ids[0], w[0])
            return lax.psum(value, ("a", "b"))

        specs = (P("b"), P(("a", "b")), P(("a", "b")))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(x, ids, w)

    x = inputs.x[:2]
    grad = jax.jit(jax.grad(loss))(x, inputs.ids, inputs.weights)
    both = np.concatenate([x, x])
    d_x, _ = expected_grads(both, inputs.weights)
    np.testing.assert_allclose(grad, d_x[:2] + d_x[2:], rtol=2e-5, atol=1e-5)


def test_overflow_steers_cond_and_leaves_through_an_empty_spec(implementation: str) -> None:
    case = Case(ranks=4, tokens=6, recv_rows=4)
    group = group_of(case, implementation)
    inputs = inputs_of(case)

    def step(x: Array, ids: Array) -> tuple[Array, Array]:
        recv = jax_ep.dispatch(group, x[0], ids[0])
        out = lax.cond(
            recv.plan.overflow > 0,
            lambda: jnp.full_like(x[0], -1),
            lambda: jax_ep.combine(group, recv.x, recv),
        )
        return out[None], recv.plan.overflow

    mapped = jax.shard_map(step, mesh=group.mesh, in_specs=P("ep"), out_specs=(P("ep"), P()))
    out, overflow = jax.jit(mapped)(*put(group, (inputs.x, inputs.ids)))
    assert overflow == 1 and np.all(np.asarray(out) == -1)
    none = np.full_like(inputs.ids, -1)
    out, overflow = jax.jit(mapped)(*put(group, (inputs.x, none)))
    assert overflow == 0 and np.all(np.asarray(out) == 0)


def batched_inputs(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    many = [inputs_of(CASE, seed=seed) for seed in range(size)]
    return tuple(  # type: ignore[return-value]
        np.stack([getattr(inputs, name) for inputs in many], axis=1)
        for name in ("x", "ids", "weights")
    )


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_vmap_inside_shard_map_unrolls_in_batch_order(mode: str, implementation: str) -> None:
    group = group_of(CASE, implementation)
    x, ids, w = batched_inputs(3)
    call = functools.partial(out_and_grads, group, mode=mode)
    out, grads = run(group, jax.vmap(call), x, ids, w)
    np.testing.assert_allclose(out, expected_layer(x, w), rtol=1e-5)
    assert_grads(grads, x, w)


def test_vmap_of_some_operands_and_nested(implementation: str) -> None:
    group = group_of(CASE, implementation)
    x, ids, w = batched_inputs(4)

    def call(x: Array, ids: Array, w: Array) -> Array:
        same_ids = jax.vmap(functools.partial(layer, group), in_axes=(0, None, 0))(x, ids[0], w)
        pairs = (a.reshape(2, 2, *a.shape[1:]) for a in (x, ids, w))
        nested = jax.vmap(jax.vmap(functools.partial(layer, group)))(*pairs)
        return same_ids + nested.reshape(x.shape)

    np.testing.assert_allclose(run(group, call, x, ids, w), 2 * expected_layer(x, w), rtol=1e-5)


def test_a_long_batch_becomes_a_loop(implementation: str) -> None:
    group = group_of(CASE, implementation)
    x, ids, w = (np.repeat(a, 13, axis=1) for a in batched_inputs(5))
    out = run(group, jax.vmap(functools.partial(layer, group)), x, ids, w)
    np.testing.assert_allclose(out, expected_layer(x, w), rtol=1e-5)


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_a_batch_of_none_has_results_of_none(mode: str, implementation: str) -> None:
    group = group_of(CASE, implementation)

    def call(x: Array, ids: Array, w: Array) -> Any:
        plan = jax_ep.plan(group, ids, mode=mode)
        data = jax_ep.dispatch_bytes(group, jnp.zeros((CASE.tokens, 16), jnp.uint8), plan)
        recv = jax_ep.dispatch(group, x, ids, w, mode=mode)
        chunked = jax_ep.moe(group, x, ids, w, lambda params, rows, sizes: rows, None, chunks=2)
        return plan, data, recv, chunked, out_and_grads(group, x, ids, w, mode=mode)

    one = run(group, jax.vmap(call), *batched_inputs(1))
    none = run(group, jax.vmap(call), *(a[:, :0] for a in batched_inputs(1)))
    for got, wanted in zip(jax.tree.leaves(none), jax.tree.leaves(one), strict=True):
        assert got.shape == (CASE.ranks, 0, *wanted.shape[2:]) and got.dtype == wanted.dtype


@pytest.mark.parametrize(("check_vma", "mode"), [(True, "ht"), (True, "ll"), (False, "ht")])
def test_vmap_with_spmd_axis_name_around_shard_map(
    check_vma: bool, mode: str, implementation: str
) -> None:
    """As pipelined models do it: stages along "a", each with its own experts along "b"."""
    group = square_group("b", implementation)
    inputs = inputs_of(CASE)
    x, ids, w = (a.reshape(2, 2, *a.shape[1:]) for a in (inputs.x, inputs.ids, inputs.weights))

    def stage(x: Array, ids: Array, w: Array) -> Array:
        return jax.shard_map(
            lambda x, i, w: layer(group, x[0], i[0], w[0], mode=mode)[None],
            mesh=group.mesh,
            in_specs=P("b"),
            out_specs=P("b"),
            check_vma=check_vma,
        )(x, ids, w)

    stages = jax.vmap(stage, spmd_axis_name="a")
    sharding = NamedSharding(group.mesh, P("a", "b"))
    placed = jax.device_put((x, ids, w), sharding)

    def loss(x: Array, ids: Array, w: Array) -> tuple[Array, Array]:
        out = stages(x, ids, w)
        return jnp.sum(out**2), out

    step = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
    grads, out = jax.device_get(step(*placed))
    np.testing.assert_allclose(out, expected_layer(x, w), rtol=1e-5)
    assert_grads(grads, x, w)


def test_two_runs_give_equal_bits(implementation: str) -> None:
    case = Case(ranks=8, tokens=33, dtype="bfloat16", experts=16, top_k=4)
    group = group_of(case, implementation)
    inputs = inputs_of(case, "zipf")
    step = per_rank(group, functools.partial(layer, group))
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    first = jax.device_get(step(*args))
    for _ in range(3):
        assert_same_bits(jax.device_get(step(*args)), first)


def test_many_steps_back_to_back_with_changing_routing(implementation: str) -> None:
    group = group_of(CASE, implementation)
    step = per_rank(group, functools.partial(layer, group))
    many = [inputs_of(CASE, seed=seed) for seed in range(4)]
    placed = [put(group, (inputs.x, inputs.ids, inputs.weights)) for inputs in many]
    results = [step(*placed[i % 4]) for i in range(200)]
    for i, out in enumerate(jax.device_get(results[-4:])):
        np.testing.assert_allclose(out, expected_layer(many[i].x, many[i].weights), rtol=1e-5)


def test_sixteen_independent_layers_with_collectives_between(implementation: str) -> None:
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)

    def step(x: Array, ids: Array, w: Array) -> Array:
        outs = [layer(group, x * (i + 1), ids, w) for i in range(16)]
        sums = [lax.psum(jnp.sum(out), "ep") * 0 for out in outs]
        return sum(outs, start=jnp.zeros_like(x)) + sum(sums, start=jnp.float32(0))

    compiled = per_rank(group, step)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    out = jax.device_get([compiled(*args) for _ in range(10)])[-1]
    np.testing.assert_allclose(out, 136 * expected_layer(inputs.x, inputs.weights), rtol=1e-4)


def test_export_keeps_plan_and_received_as_pytrees(implementation: str) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export cannot serialise without flatbuffers")
    group = group_of(CASE, implementation)
    inputs = inputs_of(CASE)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    step = per_rank(group, lambda x, i, w: jax_ep.dispatch(group, x, i, w))
    exported = jax.export.export(step, disabled_checks=jax_ep.export_checks())(*args)
    loaded = jax.export.deserialize(exported.serialize())
    recv, wanted = loaded.call(*args), step(*args)
    assert isinstance(recv, jax_ep.Received) and recv.plan.layout == "expert_major"
    assert recv.plan.mode == "ll"
    jax.tree.map(assert_same_bits, jax.device_get(recv), jax.device_get(wanted))


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_lowering_needs_no_hardware(platform: str) -> None:
    """For a mesh of 64 ranks that this host does not have; every op and its gradient."""
    mesh = jax.sharding.AbstractMesh((64,), ("ep",), axis_types=(AxisType.Auto,))
    config = jax_ep.Config(
        num_experts=128, top_k=8, hidden=1024, max_tokens=4096, capacity_factor=1.25
    )
    group = jax_ep.create_group(mesh, "ep", config)
    assert group.lowering_only and group.heap_bytes == 0

    def loss(x: Array, ids: Array, w: Array) -> Array:
        out = layer(group, x, ids, w)
        return lax.psum(jnp.sum(out.astype(jnp.float32)), "ep")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("ep"), out_specs=P())
    sharding = NamedSharding(mesh, P("ep"))
    shapes = [((64 * 4096, 1024), jnp.bfloat16), ((64 * 4096, 8), jnp.int32)]
    shapes.append(((64 * 4096, 8), jnp.float32))
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
    traced = jax.jit(jax.grad(mapped, argnums=(0, 2))).trace(*args)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("jax_ep_dispatch" in text) == (platform != "tpu")
    assert ("all_gather" in text) == (platform == "tpu")


def test_operations_have_their_names_in_profiles(implementation: str) -> None:
    """A profile shows the name of an instruction, and op_name in its metadata."""
    group, inputs = group_of(CASE, implementation), inputs_of(CASE)

    def loss(x: Array, ids: Array, w: Array) -> Array:
        recv = jax_ep.dispatch(group, x, ids, w, mode="ht")
        return jnp.sum(jax_ep.combine(group, recv.x, recv) ** 2)

    step = per_rank(group, jax.grad(loss, argnums=(0, 2)))
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    text = step.lower(*args).compile().as_text()
    for operation in ("plan", "dispatch", "combine"):
        named = [line for line in text.splitlines() if f"jax_ep.{operation} (ht)" in line]
        assert named, operation
        if implementation == "native":
            call = f"%jax_ep_{operation}."
            assert any(call in line and "custom-call(" in line for line in named), operation


def _names(lowered: Any) -> list[int]:
    """What each call of a lowered program is named by on CPUs (xla_ffi/site.h)."""
    return [int(name) for name in re.findall(r"module = (-?\d+) : i64", lowered.as_text())]


def test_every_call_carries_the_key_of_its_module(native: str) -> None:
    """JAX says when a module is complete (_jax_compat): if it stops, this fails first."""
    group = group_of(CASE, native)
    inputs = inputs_of(CASE)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    keys = []
    for factor in (1, 2):
        step = per_rank(group, lambda *a, factor=factor: layer(group, *a) * factor)
        keys.append({name >> 32 for name in _names(step.lower(*args))})
    assert [len(found) for found in keys] == [1, 1] and 0 not in keys[0] | keys[1]
    assert keys[0] != keys[1]


def test_every_call_has_a_number_of_its_own(native: str) -> None:
    """A jitted layer that is used again is one function in the text, and other calls each time."""
    group = group_of(CASE, native)
    inputs = inputs_of(CASE)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    once = jax.jit(functools.partial(layer, group, mode="ht"))
    twice = jax.jit(lambda x, ids, w: once(once(x, ids, w), ids, w))

    def step(x: Array, ids: Array, w: Array) -> Array:
        x = twice(twice(x, ids, w), ids, w)
        x, _ = lax.scan(lambda x, _: (once(x, ids, w), None), x, None, length=3)
        return lax.cond(jnp.sum(x * x) > 0, twice, once, x, ids, w)

    names = _names(per_rank(group, step).lower(*args))
    # Elsewhere a number is for reports alone, so the layer stays one function.
    layers = 4 + 1 + 3 if jax.default_backend() == "cpu" else 1
    numbers = sorted(name & 0xFFFFFFFF for name in names)
    assert numbers == list(range(1, 3 * layers + 1))  # a plan, a dispatch and a combine
    assert names == _names(per_rank(group, step).lower(*args))  # whatever was lowered before
    out = run(group, step, inputs.x, inputs.ids, inputs.weights)
    factor = 2 * inputs.weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(out, inputs.x * factor ** (4 + 3 + 2), rtol=1e-4)


def test_a_lowering_that_raises_or_holds_another_disturbs_no_names(native: str) -> None:
    group = group_of(CASE, native)
    inputs = inputs_of(CASE)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))

    def names(function: Callable[..., Any]) -> list[int]:
        return _names(per_rank(group, function, check_vma=False).lower(*args))

    def primitive(name: str) -> Primitive:
        made = Primitive(name)
        made.def_abstract_eval(lambda x: x)
        return made

    def rule(_: Any, x: Any) -> Any:
        jax.jit(lambda y: y + 1).lower(1.0)
        return [x]

    has_no_rule, lowers_another = primitive("has_no_rule"), primitive("lowers_another")
    mlir.register_lowering(lowers_another, rule)
    expected = names(functools.partial(layer, group))
    with pytest.raises(NotImplementedError, match="has_no_rule"):
        names(lambda *a: has_no_rule.bind(layer(group, *a)))
    assert names(lambda *a: lowers_another.bind(layer(group, *a))) == expected
    assert names(functools.partial(layer, group)) == expected


def test_native_lowers_for_no_other_platform() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    group = jax_ep.create_group(mesh, "ep", CASE.config(), "native")
    shape = jax.ShapeDtypeStruct((24, 2), jnp.int32, sharding=NamedSharding(mesh, P("ep")))
    mapped = jax.shard_map(
        lambda ids: jax_ep.plan(group, ids).recv_src, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
    )
    traced = jax.jit(mapped).trace(shape)
    for platform in ("cpu", "cuda", "rocm"):
        assert "jax_ep_plan" in traced.lower(lowering_platforms=(platform,)).as_text()
    with pytest.raises(NotImplementedError, match="tpu"):
        traced.lower(lowering_platforms=("tpu",))


def test_the_compiled_program_calls_our_handlers_and_nothing_else(native: str) -> None:
    """No path falls back in silence: one custom call per op and no collective of XLA's."""
    group = group_of(CASE, native)
    inputs = inputs_of(CASE)
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    for implementation in (None, native):
        with jax_ep.create_group(group.mesh, "ep", CASE.config(), implementation) as chosen:
            for mode, calls in (
                ("ht", {"plan": 1, "dispatch": 1, "combine": 1}),
                ("ll", {"ll_dispatch": 1, "combine": 1}),
            ):
                step = per_rank(chosen, functools.partial(layer, chosen, mode=mode))
                text = step.lower(*args).compile().as_text()
                for name, count in calls.items():
                    assert text.count(f'custom_call_target="jax_ep_{name}"') == count, (mode, name)
                assert text.count('custom_call_target="jax_ep_') == sum(calls.values())
                for collective in ("all-gather", "all-to-all", "all-reduce", "permute"):
                    assert f" {collective}(" not in text


def test_gradients_add_one_call_per_op(native: str) -> None:
    group = group_of(CASE, native)
    inputs = inputs_of(CASE)
    grad = jax.value_and_grad(
        functools.partial(lambda x, i, w: jnp.sum(jnp.sin(layer(group, x, i, w, mode="ht")))),
        argnums=(0, 2),
    )
    args = put(group, (inputs.x, inputs.ids, inputs.weights))
    text = per_rank(group, grad).lower(*args).compile().as_text()
    counts = {n: text.count(f'"jax_ep_{n}"') for n in ("plan", "dispatch", "combine")}
    assert counts == {"plan": 1, "dispatch": 2, "combine": 2}

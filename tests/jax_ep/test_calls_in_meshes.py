"""Calls around which the mesh is not the group's: other axes, another order, other devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, group_of, inputs_of, mesh_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep

CASE = Case(ranks=2, tokens=4)


def test_an_op_outside_its_axis_names_the_axis(implementation: str) -> None:
    group = group_of(CASE, implementation)
    ids = jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"plan was called outside the group's mesh axis 'ep'"):
        jax_ep.plan(group, ids)
    with pytest.raises(ValueError, match=r"outside the group's mesh axis 'ep'.*jax.shard_map"):
        jax.jit(lambda i: jax_ep.plan(group, i))(ids)


def square(names: tuple[str, str]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(-1, 2), names)


def test_an_op_on_another_mesh_is_refused(implementation: str) -> None:
    group = group_of(CASE, implementation)
    mesh = square(("dp", "ep"))
    step = jax.shard_map(
        lambda i: jax_ep.plan(group, i).send_slot, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")
    )
    with pytest.raises(ValueError, match=r"different mesh .* axis 'ep', expected \{'ep': 2\}"):
        jax.jit(step).trace(jnp.zeros((8, 2), jnp.int32))


@pytest.mark.parametrize("order", ["reversed", "rolled"])
def test_the_same_devices_in_another_order_are_refused(native: str, order: str) -> None:
    group = group_of(CASE, native)
    devices = group.mesh.devices
    if devices.size < 2:
        pytest.skip("one device has one order")
    other = devices[::-1] if order == "reversed" else np.roll(devices, 1)
    step = jax.shard_map(
        lambda i: jax_ep.plan(group, i).send_slot,
        mesh=jax.sharding.Mesh(other, ("ep",)),
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    ids = jnp.zeros((devices.size * CASE.tokens, CASE.top_k), jnp.int32)
    with pytest.raises(
        ValueError, match=r"are the devices \[\[.*expected \[\[0, 1.*create a group"
    ):
        jax.jit(step).lower(ids)


@pytest.mark.parametrize("kind", ["abstract", "exported"])
def test_programs_without_devices_are_right_or_refused_on_another_order(
    native: str, kind: str
) -> None:
    """Lowering sees no order of devices, so that the program carries its own to the handler."""
    devices = np.array(jax.devices()[:3])  # reversed, the second of three keeps its rank
    if devices.size < 2:
        pytest.skip("one device has one order")
    n = devices.size
    config = jax_ep.Config(
        num_experts=n, top_k=1, hidden=4, max_tokens=2, dtype=jnp.float32, timeout_s=60
    )
    x = np.arange(8 * n, dtype=np.float32).reshape(2 * n, 4)
    ids = (np.arange(2 * n) * 2 % n).reshape(2 * n, 1)

    def arguments(order: Any) -> tuple[jax.Array, ...]:
        sharding = NamedSharding(jax.sharding.Mesh(order, ("ep",)), P("ep"))
        return jax.device_put((x, ids.astype(np.int32)), sharding)

    with jax_ep.create_group(jax.sharding.Mesh(devices, ("ep",)), "ep", config, native) as group:
        scale = jnp.arange(1, n + 1, dtype=jnp.float32)  # of each expert

        def layer(x: jax.Array, ids: jax.Array) -> jax.Array:
            recv = jax_ep.dispatch(group, x, ids)
            return jax_ep.combine(group, recv.x * scale[lax.axis_index("ep")], recv)

        mesh = group.mesh.abstract_mesh if kind == "abstract" else group.mesh
        step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
        if kind == "exported":
            checks = jax_ep.export_checks()
            exported = jax.export.export(step, disabled_checks=checks)(*arguments(devices))
            step = jax.jit(exported.call)
        np.testing.assert_array_equal(step(*arguments(devices)), x * (1 + ids))
        message = r"device \d is rank \d, expected rank \d as in the"
        if jax.default_backend() == "cpu":
            with pytest.raises(Exception, match=message):
                jax.block_until_ready(step(*arguments(devices[::-1])))
        else:  # a kernel finds it: the result is poisoned, and the group says why
            assert np.isnan(step(*arguments(devices[::-1]))).all()
            with pytest.raises(RuntimeError, match=message):
                group.check()


def test_a_program_on_a_device_outside_of_the_group_fails_it(native: str) -> None:
    """The ranks that the program does have would wait for timeout_s, and blame the missing one."""
    if jax.default_backend() != "cpu":
        pytest.skip("needs more devices than the group has")
    mesh = mesh_of(3)
    config = jax_ep.Config(num_experts=3, top_k=1, hidden=4, max_tokens=2, timeout_s=60)
    with jax_ep.create_group(mesh, "ep", config, native) as group:
        step = jax.shard_map(
            lambda i: jax_ep.plan(group, i).send_slot,
            mesh=mesh.abstract_mesh,
            in_specs=P("ep"),
            out_specs=P("ep"),
        )
        others = jax.sharding.Mesh(np.array(jax.devices())[[0, 1, 4]], ("ep",))
        ids = jax.device_put(np.zeros((6, 1), np.int32), NamedSharding(others, P("ep")))
        for shard in jax.jit(step)(ids).addressable_shards:
            with pytest.raises(Exception, match="plan runs on device 4, which is not in the group"):
                jax.block_until_ready(shard.data)
        with pytest.raises(RuntimeError, match="runs on device 4"):
            group.check()


def test_teams_may_change_places_but_not_their_ranks(native: str) -> None:
    """Of a mesh with another axis: which team a device is in is its own, its rank must be kept."""
    mesh = square(("dp", "ep"))
    if mesh.devices.shape[0] < 2:
        pytest.skip("one team cannot change places")
    config = jax_ep.Config(num_experts=4, top_k=1, hidden=4, max_tokens=2)
    ids = jnp.zeros((mesh.devices.size * 2, 1), jnp.int32)

    def lower(devices: Any) -> None:
        step = jax.shard_map(
            lambda i: jax_ep.plan(group, i).send_slot,
            mesh=jax.sharding.Mesh(devices, ("dp", "ep")),
            in_specs=P(("dp", "ep")),
            out_specs=P(("dp", "ep")),
        )
        jax.jit(step).lower(ids)

    with jax_ep.create_group(mesh, "ep", config) as group:
        lower(mesh.devices[::-1])
        for wrong in (mesh.devices[:, ::-1], mesh.devices.T):
            with pytest.raises(ValueError, match="create a group for this one"):
                lower(wrong)


def partly_manual(group: jax_ep.Group) -> Any:
    step = jax.shard_map(
        lambda x, i: jax_ep.combine(
            group, (recv := jax_ep.dispatch(group, x, i, mode="ht")).x, recv
        ),
        mesh=group.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
        axis_names={"ep"},
    )
    return jax.jit(step)


def test_an_axis_that_is_not_manual_is_refused() -> None:
    """XLA would gather the operands of the custom call in silence."""
    mesh = jax.sharding.AbstractMesh(
        (2, 2), ("dp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    group = jax_ep.create_group(mesh, "ep", CASE.config())
    shapes = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.int32))
    with pytest.raises(ValueError, match=r"mesh axis 'dp' of size 2 is not Manual"):
        partly_manual(group).trace(*shapes)


def test_the_xla_implementation_takes_axes_that_are_not_manual() -> None:
    group = jax_ep.create_group(square(("dp", "ep")), "ep", CASE.config(), "xla")
    inputs = inputs_of(CASE)
    x, ids = inputs.x.reshape(8, 8), inputs.ids.reshape(8, 2)
    np.testing.assert_allclose(partly_manual(group)(x, ids), 2 * x, rtol=1e-6)


def test_debug_mode_leaves_out_axes_that_are_not_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_EP_DEBUG", "1")
    group = jax_ep.create_group(square(("dp", "ep")), "ep", CASE.config(), "xla")
    inputs = inputs_of(CASE)
    x, ids = inputs.x.reshape(8, 8), inputs.ids.reshape(8, 2)
    if group.mesh.shape["dp"] == 1:
        pytest.skip("an axis of size 1 counts as Manual")
    with pytest.warns(UserWarning, match="ids are not looked at where mesh axis 'dp' is not"):
        np.testing.assert_allclose(partly_manual(group)(x, ids), 2 * x, rtol=1e-6)

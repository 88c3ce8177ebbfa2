"""Placements under JAX's transformations, in meshes of several teams, and beside other options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from harness import Case, assert_same_bits, group_of, inputs_of, keep
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from test_placement import placed, placement_of

import jax_ep

CASE = Case(ranks=4, tokens=6, experts=7, slots=12, top_k=3)


def slots_of(placement: jax_ep.Placement, ids: np.ndarray, case: Case = CASE) -> np.ndarray:
    return oracle.place(placement.physical_to_logical.tolist(), case.experts, ids)


def layer(group: jax_ep.Group, placement: Any, x: Any, ids: Any, w: Any, scale: Any) -> Any:
    """Every slot multiplies its rows by its own number."""
    recv = jax_ep.dispatch(group, x, ids, w, placement=placement)
    ends = jnp.cumsum(recv.group_sizes)
    slot = jnp.searchsorted(ends, jnp.arange(recv.x.shape[0]), side="right")
    factors = scale[jnp.minimum(slot, scale.size - 1)][:, None].astype(recv.x.dtype)
    return jax_ep.combine(group, recv.x * factors, recv)


SCALE = np.linspace(0.5, 2.0, CASE.experts).astype(np.float32)


def in_slots(placement: jax_ep.Placement, case: Case = CASE) -> np.ndarray:
    return SCALE[placement.physical_to_logical].reshape(case.ranks, -1)


def expected_layer(data: Any) -> np.ndarray:
    """`layer` without replicas or slots: each token times the weighted sum of its experts."""
    factor = np.where(data.ids >= 0, SCALE[data.ids], 0.0) * data.weights
    result: np.ndarray = data.x * factor.sum(-1, keepdims=True)
    return result


def test_layers_of_a_scan_have_placements_of_their_own(implementation: str) -> None:
    """With remat and gradients; stacked placements are one pytree."""
    group, data = group_of(CASE, implementation), inputs_of(CASE)
    each = [placement_of(CASE, seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    scales = np.stack([in_slots(p) for p in each], axis=1)  # [N, L, slots]

    def step(stacked: Any, x: Any, ids: Any, w: Any, scales: Any) -> Any:
        @jax.checkpoint
        def body(x: Any, of_layer: Any) -> Any:
            placement, scale = of_layer
            return layer(group, placement, x, ids, w, scale), None

        def loss(x: Any) -> Any:
            out = jax.lax.scan(body, x, (stacked, scales))[0]
            return jnp.sum(out), out

        return jax.grad(loss, has_aux=True)(x)

    d_x, out = placed(group, step)(stacked, data.x, data.ids, data.weights, scales)
    factor = (expected_layer(data) / data.x) ** 3
    np.testing.assert_allclose(out, data.x * factor, rtol=1e-5)
    np.testing.assert_allclose(d_x, factor, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [pytest.param(True, marks=pytest.mark.ci), False])
def test_vmap_over_placements(check_vma: bool, implementation: str) -> None:
    group = group_of(CASE, implementation)
    data, each = inputs_of(CASE), [placement_of(CASE, seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *each)

    def step(stacked: Any, x: Any, ids: Any, w: Any, scales: Any) -> Any:
        return jax.vmap(lambda p, s: layer(group, p, x, ids, w, s))(stacked, scales)

    scales = np.stack([in_slots(p) for p in each], axis=1)
    run = placed(group, step, check_vma=check_vma)
    outs = np.asarray(run(stacked, data.x, data.ids, data.weights, scales))
    for i in range(2):
        np.testing.assert_allclose(outs[:, i], expected_layer(data), rtol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("Auto", marks=pytest.mark.ci), "Explicit"])
def test_a_rank_is_counted_in_its_team(kind: str, implementation: str) -> None:
    """Two teams of two; the replica of a pair depends on the rank in the team alone."""
    case = dataclasses.replace(CASE, ranks=2, slots=10)
    kinds = (getattr(AxisType, kind),) * 2
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"), axis_types=kinds)
    group = jax_ep.create_group(mesh, "ep", case.config(), implementation)
    keep(group)
    teams, placement = [inputs_of(case, seed=seed) for seed in range(2)], placement_of(case, 1)
    both = np.concatenate([data.ids.reshape(-1, case.top_k) for data in teams])
    spec = P(("dp", "ep"))

    def step(placement: Any, ids: Any) -> Any:
        return jax_ep.plan(group, ids, placement=placement).send_slot

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), spec), out_specs=spec))
    shared = jax.device_put(both, jax.sharding.NamedSharding(mesh, spec))
    got = np.asarray(run(placement, shared)).reshape(2, 2, case.tokens, case.top_k)
    for team, data in enumerate(teams):
        plans = oracle.plan(case.spec, slots_of(placement, data.ids, case), "ll", "expert_major")
        np.testing.assert_array_equal(got[team], np.stack([plan.send_slot for plan in plans]))


def test_xla_takes_meshes_whose_other_axes_are_auto() -> None:
    case = dataclasses.replace(CASE, ranks=2, slots=10)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "ep"))
    group = jax_ep.create_group(mesh, "ep", case.config(), "xla")
    keep(group)
    data, placement = inputs_of(case), placement_of(case, 1)
    run = jax.jit(
        jax.shard_map(
            lambda p, ids: jax_ep.plan(group, ids, placement=p).send_slot,
            mesh=mesh,
            in_specs=(P(), P("ep")),
            out_specs=P("ep"),
            axis_names=frozenset({"ep"}),
        )
    )
    got = np.asarray(run(placement, data.ids.reshape(-1, case.top_k)))
    plans = oracle.plan(case.spec, slots_of(placement, data.ids, case), "ll", "expert_major")
    np.testing.assert_array_equal(got, np.concatenate([plan.send_slot for plan in plans]))


@pytest.mark.ci
def test_chunks_of_moe_and_export(implementation: str) -> None:
    """One exported program takes any placement."""
    pytest.importorskip("flatbuffers", reason="jax.export cannot serialise without flatbuffers")
    group, data = group_of(CASE, implementation), inputs_of(CASE)
    rng = np.random.default_rng(2)
    kernels = rng.standard_normal((CASE.experts, CASE.hidden, CASE.hidden)).astype(np.float32)

    def step(placement: Any, x: Any, ids: Any, w: Any, own: Any) -> Any:
        return jax_ep.moe(
            group, x, ids, w, lambda k, r, s: jax.lax.ragged_dot(r, k, s), own,
            chunks=2, placement=placement,
        )  # fmt: skip

    terms = np.einsum("sth,stkhi->stki", data.x, kernels[data.ids])
    wanted = np.einsum("stk,stki->sti", data.weights, terms)
    run = placed(group, step)
    exported = None
    for seed in range(2):
        placement = placement_of(CASE, seed)
        own = kernels[placement.physical_to_logical].reshape(CASE.ranks, -1, *kernels.shape[1:])
        args = (placement, data.x, data.ids, data.weights, own)
        np.testing.assert_allclose(run(*args), wanted, rtol=1e-3, atol=1e-4)
        if exported is None:
            made = jax.export.export(run, disabled_checks=jax_ep.export_checks())(*args)
            exported = jax.jit(jax.export.deserialize(made.serialize()).call)
        spec = jax.sharding.NamedSharding(group.mesh, P("ep"))
        shared = [jax.device_put(a, spec) for a in args[1:]]
        everywhere = jax.device_put(placement, jax.sharding.NamedSharding(group.mesh, P()))
        np.testing.assert_allclose(exported(everywhere, *shared), wanted, rtol=1e-3, atol=1e-4)


def test_rows_in_fp8(implementation: str) -> None:
    """Quantised rows of a token are the same in whichever slot they arrive."""
    case = dataclasses.replace(CASE, hidden=32)
    config = dataclasses.replace(case.config(), wire=jax_ep.FP8(block=16))
    group = jax_ep.create_group(group_of(case, implementation).mesh, "ep", config, implementation)
    keep(group)
    data, placement = inputs_of(case), placement_of(case, 2)

    def step(placement: Any, x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch_quantized(group, x, ids, placement=placement)
        plan = jax_ep.plan(group, ids, placement=placement)
        return recv.plan.recv_src, plan.recv_src, jax_ep.fp8.rows(recv.x), x

    sources, planned, rows, x = jax.device_get(placed(group, step)(placement, data.x, data.ids))
    np.testing.assert_array_equal(sources, planned)
    plans = oracle.plan(case.spec, slots_of(placement, data.ids), "ll", "expert_major")
    np.testing.assert_array_equal(sources, np.stack([plan.recv_src for plan in plans]))
    token = sources // case.top_k
    expected = np.where((sources >= 0)[..., None], x.reshape(-1, 32)[token], 0)
    np.testing.assert_allclose(rows, expected, atol=0.2)


@pytest.mark.parametrize("mode", [pytest.param("ht", marks=pytest.mark.ci), "ll"])
def test_batch_invariant_halves_and_gradients(mode: Any, implementation: str) -> None:
    """Equal to the whole; gradients are those of the plain sum up to its order."""
    case = dataclasses.replace(CASE, batch_invariant=True)
    invariant, plain = group_of(case, implementation), group_of(CASE, implementation)
    data, placement = inputs_of(case, "holes"), placement_of(case, 3)

    def step(placement: Any, x: Any, ids: Any, w: Any) -> Any:
        def loss(x: Any, w: Any, group: jax_ep.Group, halves: bool) -> Any:
            recv = jax_ep.dispatch(group, x, ids, w, mode=mode, placement=placement)
            if halves:
                flight = jax_ep.combine_start(group, recv.x, recv)
                out, returned = jax_ep.combine_done(group, flight), w
            else:
                out, returned = jax_ep.combine(group, recv.x, recv, return_weights=True)
            return jnp.sum(jnp.sin(out)), (out, returned)

        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        return grad(x, w, invariant, False), grad(x, w, invariant, True), grad(x, w, plain, False)

    run = placed(invariant, step)
    whole, halves, wanted = jax.device_get(run(placement, data.x, data.ids, data.weights))
    assert_same_bits(halves[1][0], whole[1][0])
    assert_same_bits(whole[1][1], wanted[1][1])  # weights that returned: none of absent pairs
    for got, expected in zip(jax.tree.leaves(whole), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_batch_invariance_needs_rows_of_one_pair() -> None:
    case = dataclasses.replace(CASE, batch_invariant=True)
    group, data = group_of(case, "xla"), inputs_of(case)

    def step(placement: Any, x: Any, ids: Any) -> Any:
        recv = jax_ep.dispatch(group, x, ids, layout="rank_major", placement=placement)
        return jax_ep.combine(group, recv.x, recv)

    with pytest.raises(ValueError, match=r"layout 'rank_major' in a group of Config.batch_inv"):
        placed(group, step)(placement_of(case, 0), data.x, data.ids)
    with pytest.raises(ValueError, match="batch_invariant: got 1, expected True or False"):
        dataclasses.replace(case.config(), batch_invariant=1)

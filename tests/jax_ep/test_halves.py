"""Halves whose start does nothing: mode ht on GPUs, and "xla". Bits of halves are test_ops.py's."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, assert_same_bits, inputs_of, mesh_of, per_rank, put, run
from jax.sharding import PartitionSpec as P

import jax_ep

Array = jax.Array
CASE = Case(ranks=4, tokens=9, mode="ht")
LAYOUTS = ("expert_major", "expert_batched", "rank_major")


def whole(group: jax_ep.Group, x: Array, ids: Array, w: Array, layout: Any = None) -> Array:
    recv = jax_ep.dispatch(group, x, ids, w, layout=layout)
    return jax_ep.combine(group, 2 * recv.x, recv)


def halves(group: jax_ep.Group, x: Array, ids: Array, w: Array, layout: Any = None) -> Array:
    flight = jax_ep.dispatch_start(group, x, ids, w, layout=layout)
    recv = jax_ep.dispatch_done(group, flight)
    return jax_ep.combine_done(group, jax_ep.combine_start(group, 2 * recv.x, recv))


def custom_calls(
    program: Any, mode: str, platform: str, layout: Any, overlap: bool, ranks: int = 4, **sizes: Any
) -> list[str]:
    """The custom calls of a layer and its gradient, as lowered: targets and types, sorted."""
    config = dataclasses.replace(CASE.config(), mode=mode, overlap=overlap, **sizes)
    mesh = jax.sharding.AbstractMesh((ranks,), ("ep",))
    group = jax_ep.create_group(mesh, "ep", config, implementation="native")

    def step(x: Array, ids: Array, w: Array) -> Any:
        return jax.value_and_grad(
            lambda x, w: jnp.sum(program(group, x, ids, w, layout) ** 2), argnums=(0, 1)
        )(x, w)

    mapped = jax.shard_map(
        lambda *args: jax.tree.map(lambda a: a[None], step(*args)),
        mesh=mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    tokens = ranks * config.max_tokens
    sharding = jax.sharding.NamedSharding(mesh, P("ep"))
    shapes = [((tokens, 8), jnp.float32), ((tokens, 2), jnp.int32), ((tokens, 2), jnp.float32)]
    args = [jax.ShapeDtypeStruct(s, d, sharding=sharding) for s, d in shapes]
    text = jax.jit(mapped).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return sorted(
        f"{target} {types}"
        for target, types in re.findall(r"custom_call @jax_ep_(\w+)\(.* : (.*)", text)
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_gpus_halves_of_mode_ht_are_the_whole_calls(
    platform: str, layout: str, overlap: bool
) -> None:
    calls = [custom_calls(program, "ht", platform, layout, overlap) for program in (whole, halves)]
    assert calls[0] == calls[1] and len(calls[0]) >= 5  # a plan, and each way forth and back


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_on_gpus_halves_in_rounds_are_the_whole_calls(platform: str, layout: str) -> None:
    """Between nodes mode ll has room for 8,192 rows, which are 256 tokens of 32 ranks."""
    sizes: dict[str, Any] = {"node_size": 8, "num_experts": 32, "max_tokens": 257, "ranks": 32}
    starts = {"ll_dispatch_start", "ll_dispatch_done", "combine_start", "combine_done"}

    def targets() -> set[str]:
        found = custom_calls(halves, "ll", platform, layout, False, **sizes)
        return {call.split()[0] for call in found}

    assert {"ll_dispatch", "combine"} <= targets() and not starts & targets()
    sizes["max_tokens"] -= 1
    assert starts <= targets()


@pytest.mark.parametrize(
    ("mode", "platform"), [("ll", "cuda"), ("ll", "rocm"), ("ht", "cpu"), ("ll", "cpu")]
)
def test_elsewhere_they_are_calls_of_their_own(mode: str, platform: str) -> None:
    found = {call.split()[0] for call in custom_calls(halves, mode, platform, None, False)}
    first = "dispatch" if mode == "ht" else "ll_dispatch"
    assert {f"{first}_start", f"{first}_done", "combine_start", "combine_done"} <= found


def test_no_set_is_held_where_a_start_does_nothing(implementation: str) -> None:
    """More starts than max_in_flight, ended in another program, and one of them twice."""
    if implementation == "native" and jax.default_backend() == "cpu":
        pytest.skip("on CPUs a start holds a set")
    config = dataclasses.replace(CASE.config(), mode="ht", max_in_flight=1)
    inputs = inputs_of(CASE)
    args = (inputs.x, inputs.ids, inputs.weights)
    with jax_ep.create_group(mesh_of(CASE.ranks), "ep", config, implementation) as group:

        def start(x: Array, ids: Array, w: Array) -> Any:
            return [jax_ep.dispatch_start(group, scale * x, ids, w) for scale in (1, 2, 3)]

        def done(flights: Any) -> Any:
            received = [jax_ep.dispatch_done(group, flights[i]) for i in (2, 0, 1, 0)]
            sums = [jax_ep.combine_start(group, recv.x, recv) for recv in received]
            return [recv.x for recv in received], [jax_ep.combine_done(group, s) for s in sums]

        def expected(x: Array, ids: Array, w: Array) -> Any:
            received = [jax_ep.dispatch(group, scale * x, ids, w) for scale in (3, 1, 2, 1)]
            sums = [jax_ep.combine(group, recv.x, recv) for recv in received]
            return [recv.x for recv in received], sums

        flights = per_rank(group, start)(*put(group, args))
        assert all(not np.any(jax.device_get(flight.epoch)) for flight in flights)
        got = jax.device_get(per_rank(group, done)(flights))
        jax.tree.map(assert_same_bits, got, run(group, expected, *args))
        group.check()


@pytest.mark.parametrize("mode", ["ht", "ll"])
def test_a_vmap_of_halves_takes_as_many_as_there_are_sets(mode: str, implementation: str) -> None:
    config = dataclasses.replace(CASE.config(), mode=mode, max_in_flight=2)
    inputs = inputs_of(CASE)
    holds_sets = implementation == "native" and (jax.default_backend() == "cpu" or mode == "ll")

    def start_of_a_combine(group: jax_ep.Group, x: Array, ids: Array, w: Array) -> Array:
        recv = jax_ep.dispatch(group, x, ids, w)
        return jax_ep.combine_done(group, jax_ep.combine_start(group, 2 * recv.x, recv))

    with jax_ep.create_group(mesh_of(CASE.ranks), "ep", config, implementation) as group:

        def batch(program: Any, *shape: int) -> Any:
            mapped = functools.partial(program, group)
            for _ in shape:
                mapped = jax.vmap(mapped, in_axes=(0, None, None))
            x = inputs.x[:, *[None] * len(shape)]
            scales = np.arange(1, math.prod(shape) + 1, dtype=x.dtype).reshape(1, *shape, 1, 1)
            return run(group, mapped, x * scales, inputs.ids, inputs.weights)

        assert_same_bits(batch(halves, 2), batch(whole, 2))
        for shape in ((3,), (2, 2)):
            if not holds_sets:
                assert_same_bits(batch(halves, *shape), batch(whole, *shape))
                continue
            size = math.prod(shape)
            for program, name in ((halves, "dispatch"), (start_of_a_combine, "combine")):
                message = (
                    rf"{name}_start: got a vmap over {size} calls, expected at most "
                    rf"max_in_flight=2 .*; call jax_ep.{name} under vmap, or raise"
                )
                with pytest.raises(ValueError, match=message):
                    batch(program, *shape)
        group.check()

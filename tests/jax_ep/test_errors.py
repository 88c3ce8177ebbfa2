"""Bad input: each mistake gets an error that says got, expected and the fix, and loses nothing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Case, group_of, inputs_of, keep, mesh_of, per_rank, put, run
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep._runtime import start

CASE = Case(ranks=2, tokens=4)
VALID = {"num_experts": 8, "top_k": 2, "hidden": 8, "max_tokens": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recv_rows": 128, "capacity_factor": 1.0}, "both recv_rows=128 and capacity_factor=1.0"),
        ({"top_k": 9}, "top_k: got 9, expected at most num_experts=8"),
        ({"top_k": 0}, "top_k: got 0, expected an int of at least 1"),
        ({"num_experts": 100, "top_k": 65}, "top_k: got 65, expected at most 64"),
        ({"recv_rows": 100}, "recv_rows: got 100, expected a multiple of align=128; use 128"),
        ({"dtype": jnp.int32}, "dtype: got .*int32.*expected one of bfloat16, float16, float32"),
        ({"dtype": "no such dtype"}, "dtype: got 'no such dtype'"),
        ({"mode": "fast"}, "mode: got 'fast', expected one of 'auto', 'ht', 'll'"),
        ({"mode": "ll", "max_tokens": 513}, r"max_tokens: got 513, expected at most 512"),
        ({"overflow": "ignore"}, "overflow: got 'ignore'"),
        ({"transport": "pigeon"}, "transport: got 'pigeon', expected one of 'auto', 'loopback'"),
        ({"capacity_factor": -1.0}, "capacity_factor: got -1.0, expected a finite number above 0"),
        ({"timeout_s": float("nan")}, "timeout_s: got nan"),
        ({"hidden": 1.5}, "hidden: got 1.5, expected an int"),
        ({"hidden": 2**40}, "hidden: got 1099511627776, expected at most 2147483647"),
        ({"capacity_factor": np.float32("inf")}, "capacity_factor: got .*inf.*, expected a finite"),
        ({"capacity_factor": 10**400}, "capacity_factor: got 1000*, expected a finite number"),
        ({"node_size": 0}, "node_size: got 0"),
        ({"timeout_s": "600"}, "timeout_s: got '600', expected seconds from 0.1 to 1e.09"),
        ({"timeout_s": 0.0}, "timeout_s: got 0.0, expected seconds from 0.1 to 1e.09"),
        ({"timeout_s": float("inf")}, "timeout_s: got inf, expected seconds .*; use 1e.09"),
        ({"timeout_s": 1e10}, "timeout_s: got 10000000000.0, expected seconds .*; use 1e.09"),
        ({"peer_timeout_s": 0.01}, "peer_timeout_s: got 0.01, expected seconds from 0.1"),
        (
            {"peer_timeout_s": 20, "timeout_s": 10},
            "peer_timeout_s: got 20.0, expected at most timeout_s=10.0; lower it, or leave it out",
        ),
    ],
)
def test_an_invalid_config_says_what_to_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax_ep.Config(**(VALID | changes))


NUMBERS = [f.name for f in dataclasses.fields(jax_ep.Config) if re.match("int|float", str(f.type))]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "8", np.ones(1)])
def test_only_a_number_is_one(name: str, value: Any) -> None:
    """A bool is an int to Python, and `hidden=True` a group of one element to who does not look."""
    with pytest.raises(ValueError, match=rf"Config.{name}: got .*{value!s}.*, expected"):
        jax_ep.Config(**(VALID | {name: value}))


def test_numbers_of_numpy_make_the_same_group(implementation: str) -> None:
    sizes = VALID | {"recv_rows": 256, "align": 128, "node_size": 1, "max_in_flight": 2}
    seconds = {"timeout_s": 60.0, "peer_timeout_s": 15.0}
    of_python = jax_ep.Config(**sizes, **seconds)
    of_numpy = jax_ep.Config(
        **{name: np.int64(value) for name, value in sizes.items()},
        **{name: np.float32(value) for name, value in seconds.items()},
    )
    assert repr(of_numpy) == repr(of_python)  # what processes compare
    assert repr(jax_ep.Config(**sizes, timeout_s=60, peer_timeout_s=15)) == repr(of_python)
    mesh = jax.sharding.AbstractMesh((2,), ("ep",))
    first, second = (
        jax_ep.create_group(mesh, "ep", config, implementation) for config in (of_python, of_numpy)
    )
    assert second.number.value == first.number.value + 1  # equal groups


def test_a_short_timeout_shortens_the_silence_that_is_allowed() -> None:
    config = jax_ep.Config(**VALID, timeout_s=5.0)
    assert config.peer_timeout_s is None
    dataclasses.replace(config, timeout_s=2.0)


@pytest.mark.parametrize(
    ("axis", "changes", "message"),
    [
        (
            "ep",
            {"num_experts": 9},
            r"num_experts=9, expected a multiple of the group's 2 ranks; use num_experts=10",
        ),
        ("tp", {}, r"axis='tp', expected .* names of the mesh axes \('ep',\)"),
        (("ep", "ep"), {}, "distinct"),
        ((), {}, "expected one or several"),
        ("ep", {"node_size": 3}, "node_size=3, expected a divisor of the group's 2 ranks"),
        ("ep", {"max_tokens": 2**30}, "expected at most 2147483647 .plan codes are i32"),
    ],
)
def test_a_config_that_does_not_fit_the_mesh(
    axis: Any, changes: dict[str, Any], message: str, implementation: str
) -> None:
    config = jax_ep.Config(**(VALID | changes))
    with pytest.raises(ValueError, match=message):
        jax_ep.create_group(mesh_of(2), axis, config, implementation)


def test_wrong_arguments_of_create_group() -> None:
    config = jax_ep.Config(**VALID)
    with pytest.raises(ValueError, match=r"mesh of type str, expected jax.sharding.Mesh"):
        jax_ep.create_group("mesh", "ep", config)
    with pytest.raises(ValueError, match=r"config of type dict, expected jax_ep.Config"):
        jax_ep.create_group(mesh_of(2), "ep", VALID)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"implementation='cuda', expected None, 'native' or 'xla'"
    ):
        jax_ep.create_group(mesh_of(2), "ep", config, "cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"axis=0, expected one or several distinct names"):
        jax_ep.create_group(mesh_of(2), 0, config)  # type: ignore[arg-type]


Ops = Callable[[jax_ep.Group, Any, Any, Any], Any]

A_STACK = r"of shape \[2, 4, 2\], expected \[T, top_k\], that of one call; use what vmap returned"


def plans_of(group: jax_ep.Group, ids: jax.Array) -> jax_ep.Plan:
    return jax.vmap(lambda ids: jax_ep.plan(group, ids))(jnp.stack([ids, ids]))


MISTAKES: list[tuple[str, Ops, str]] = [
    (
        "hidden",
        lambda g, x, i, w: jax_ep.dispatch(g, x[:, :7], i),
        r"dispatch: got x float32\[4, 7\], expected \[T, hidden=8\]",
    ),
    (
        "rank of x",
        lambda g, x, i, w: jax_ep.dispatch(g, x[None], i),
        r"got x float32\[1, 4, 8\]",
    ),
    (
        "dtype of x",
        lambda g, x, i, w: jax_ep.dispatch(g, x.astype(jnp.bfloat16), i),
        r"got x bfloat16\[4, 8\], expected dtype float32 \(Config.dtype\); cast it",
    ),
    (
        "top_k",
        lambda g, x, i, w: jax_ep.dispatch(g, x, i[:, :1]),
        r"got topk_idx int32\[4, 1\], expected \[T, top_k=2\]",
    ),
    (
        "float ids",
        lambda g, x, i, w: jax_ep.plan(g, i.astype(jnp.float32)),
        r"plan: got topk_idx float32\[4, 2\], expected an integer dtype",
    ),
    (
        "too few ids",
        lambda g, x, i, w: jax_ep.dispatch(g, x, i[:3]),
        r"got topk_idx int32\[3, 2\], expected \[T=4, top_k=2\]",
    ),
    (
        "weights shape",
        lambda g, x, i, w: jax_ep.dispatch(g, x, i, w[:, :1]),
        r"got topk_weights float32\[4, 1\], expected \[T=4, top_k=2\]",
    ),
    (
        "integer weights",
        lambda g, x, i, w: jax_ep.dispatch(g, x, i, i),
        r"got topk_weights int32\[4, 2\], expected a float dtype",
    ),
    (
        "too many tokens",
        lambda g, x, i, w: jax_ep.plan(g, jnp.tile(i, (3, 1))),
        r"got T=12 tokens per rank, expected at most max_tokens=4; raise Config.max_tokens",
    ),
    (
        "ids and plan",
        lambda g, x, i, w: jax_ep.dispatch(g, x, i, plan=jax_ep.plan(g, i)),
        "got both of topk_idx and plan, expected exactly one",
    ),
    ("no ids", lambda g, x, i, w: jax_ep.dispatch(g, x), "got neither of topk_idx and plan"),
    (
        "mode against the plan",
        lambda g, x, i, w: jax_ep.dispatch(g, x, plan=jax_ep.plan(g, i, mode="ht"), mode="ll"),
        "got mode='ll' with a plan of mode='ht'",
    ),
    (
        "unknown layout",
        lambda g, x, i, w: jax_ep.plan(g, i, layout="column_major"),
        "got layout='column_major', expected one of",
    ),
    ("unknown mode", lambda g, x, i, w: jax_ep.plan(g, i, mode="auto"), "got mode='auto'"),
    ("unknown pad", lambda g, x, i, w: jax_ep.dispatch(g, x, i, pad="nan"), "got pad='nan'"),
    (
        "list for an array",
        lambda g, x, i, w: jax_ep.dispatch(g, [1.0], i),
        "got x of type list, expected an array",
    ),
    (
        "shape of y",
        lambda g, x, i, w: jax_ep.combine(g, x, jax_ep.plan(g, i), weights=None),
        r"combine: got y float32\[4, 8\], expected \[28, 8\] \(layout 'expert_major'\)",
    ),
    (
        "dtype of y",
        lambda g, x, i, w: jax_ep.combine(g, x.astype(jnp.float16), jax_ep.plan(g, i), None),
        "got y float16",
    ),
    (
        "not a plan",
        lambda g, x, i, w: jax_ep.combine(g, x, i),
        "combine: got recv of type .*, expected jax_ep.Received or jax_ep.Plan; pass what dispatch",
    ),
    (
        "combine weights",
        lambda g, x, i, w: jax_ep.combine(g, jax_ep.dispatch(g, x, i).x, jax_ep.plan(g, i), w[0]),
        r"got weights float32\[2\], expected \[28\] per row or \[4, 2\] per \(token, k\)",
    ),
    (
        "rank_major weights",
        lambda g, x, i, w: jax_ep.combine(
            g,
            jax_ep.dispatch(g, x, i, layout="rank_major").x,
            jax_ep.plan(g, i, layout="rank_major"),
            w,
        ),
        "got weights with layout 'rank_major', expected None",
    ),
    (
        "plan of other tokens",
        lambda g, x, i, w: jax_ep.dispatch(g, x, plan=jax_ep.plan(g, i[:2])),
        r"got plan.send_slot of shape \[2, 2\], expected \[4, 2\]",
    ),
    (
        "wrong half",
        lambda g, x, i, w: jax_ep.combine_done(g, jax_ep.dispatch_start(g, x, i)),
        "combine_done: got inflight of dispatch, expected what combine_start returned",
    ),
    (
        "no chunks",
        lambda g, x, i, w: jax_ep.moe(g, x, i, w, lambda p, r, s: r, None, chunks=0),
        "moe: got chunks=0, expected an int of at least 1",
    ),
    (
        "a bool of chunks",
        lambda g, x, i, w: jax_ep.moe(g, x, i, w, lambda p, r, s: r, None, chunks=True),
        "moe: got chunks=True, expected an int of at least 1",
    ),
    (
        "ids without experts in chunks",
        lambda g, x, i, w: jax_ep.moe(g, x, i[:, 0], w, lambda p, r, s: r, None, chunks=2),
        r"moe: got topk_idx int32\[4\], expected \[T, top_k=2\]",
    ),
    (
        "too few ids in chunks",
        lambda g, x, i, w: jax_ep.moe(g, x, i[:3], w, lambda p, r, s: r, None, chunks=2),
        r"moe: got topk_idx int32\[3, 2\], expected \[T=4, top_k=2\] as x has 4 rows",
    ),
    (
        "too few weights in chunks",
        lambda g, x, i, w: jax_ep.moe(g, x, i, w[:3], lambda p, r, s: r, None, chunks=2),
        r"moe: got topk_weights float32\[3, 2\], expected \[T=4, top_k=2\]",
    ),
    (
        "one token in chunks",
        lambda g, x, i, w: jax_ep.moe(g, x[0], i, w, lambda p, r, s: r, None, chunks=2),
        r"moe: got x float32\[8\], expected \[T, hidden=8\]",
    ),
    (
        "list for tokens",
        lambda g, x, i, w: jax_ep.moe(g, [1.0], i, w, lambda p, r, s: r, None),
        "moe: got x of type list, expected an array",
    ),
    (
        "no function of experts",
        lambda g, x, i, w: jax_ep.moe(g, x, i, w, None, None),
        "moe: got expert_fn of type NoneType, expected a function",
    ),
    (
        "no plan of a moe",
        lambda g, x, i, w: jax_ep.moe(g, x, None, w, lambda p, r, s: r, None, plan=i),
        "moe: got plan of type .*, expected a Plan",
    ),
    (
        "no plan of a dispatch",
        lambda g, x, i, w: jax_ep.dispatch(g, x, plan=i),
        "dispatch: got plan of type .*, expected a Plan; pass recv.plan",
    ),
    (
        "no plan of a dispatch_start",
        lambda g, x, i, w: jax_ep.dispatch_start(g, x, plan=i),
        "dispatch_start: got plan of type .*, expected a Plan",
    ),
    (
        "a dispatch by the plans of a vmap",
        lambda g, x, i, w: jax_ep.dispatch(g, x, plan=plans_of(g, i)),
        rf"dispatch: got plan.send_slot {A_STACK}",
    ),
    (
        "a moe by the plans of a vmap",
        lambda g, x, i, w: jax_ep.moe(g, x, None, w, lambda p, r, s: r, None, plan=plans_of(g, i)),
        rf"moe: got plan.send_slot {A_STACK}",
    ),
    (
        "bytes by the plans of a vmap",
        lambda g, x, i, w: jax_ep.dispatch_bytes(g, jnp.zeros((4, 16), jnp.uint8), plans_of(g, i)),
        rf"dispatch_bytes: got plan.send_slot {A_STACK}",
    ),
    (
        "a combine of what a vmap received",
        lambda g, x, i, w: jax_ep.combine(
            g, x, jax.vmap(lambda i: jax_ep.dispatch(g, x, i))(jnp.stack([i, i]))
        ),
        rf"combine: got plan.send_slot {A_STACK}",
    ),
    (
        "a combine_done of what a vmap started",
        lambda g, x, i, w: jax_ep.combine_done(
            g,
            jax.vmap(lambda i: jax_ep.combine_start(g, jnp.zeros((28, 8)), jax_ep.plan(g, i), w))(
                jnp.stack([i, i])
            ),
        ),
        rf"combine_done: got inflight.plan.send_slot {A_STACK}",
    ),
    *(
        (
            f"a dispatch_done of what a vmap started in mode {mode}",
            lambda g, x, i, w, mode=mode: jax_ep.dispatch_done(
                g, jax.vmap(lambda i: jax_ep.dispatch_start(g, x, i, mode=mode))(jnp.stack([i, i]))
            ),
            rf"dispatch_done: got inflight.{name} {A_STACK}",
        )
        for mode, name in (("ht", "plan.send_slot"), ("ll", "topk_idx"))
    ),
    (
        "no group",
        lambda g, x, i, w: jax_ep.dispatch(None, x, i),
        "dispatch: got group of type NoneType, expected a jax_ep.Group",
    ),
    (
        "a plan of no group",
        lambda g, x, i, w: jax_ep.plan(g.config, i),
        "plan: got group of type Config, expected a jax_ep.Group; pass what create_group returned",
    ),
    (
        "a moe of no group",
        lambda g, x, i, w: jax_ep.moe(None, x, i, w, lambda p, r, s: r, None, chunks=2),
        "moe: got group of type NoneType, expected a jax_ep.Group",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_in_a_call_is_a_value_error_when_traced(call: Ops, message: str) -> None:
    group = group_of(CASE, "xla")
    inputs = inputs_of(CASE)
    step = per_rank(group, lambda x, i, w: call(group, x, i, w))
    with pytest.raises(ValueError, match=message):
        step.trace(*put(group, (inputs.x, inputs.ids, inputs.weights)))


@pytest.mark.parametrize(("ids", "weights"), [(3, 4), (4, 3), (3, 3)])
@pytest.mark.parametrize("operation", ["dispatch", "moe"])
def test_pairs_of_other_tokens_are_refused_before_they_are_renormalized(
    operation: str, ids: int, weights: int
) -> None:
    config = dataclasses.replace(CASE.config(), elastic=True)
    group = jax_ep.create_group(mesh_of(2), "ep", config, "xla")
    keep(group)
    inputs = inputs_of(CASE)

    def step(x: Any, i: Any, w: Any) -> Any:
        pairs = (i[:ids], w[:weights])
        kwargs = {"active": jnp.ones(2, jnp.int32), "renormalize": True}
        if operation == "dispatch":
            return jax_ep.dispatch(group, x, *pairs, **kwargs).x
        return jax_ep.moe(group, x, *pairs, lambda p, r, s: r, None, **kwargs)

    with pytest.raises(ValueError, match=rf"{operation}: got topk_(idx|weights) .*T=4, top_k=2"):
        per_rank(group, step).trace(*put(group, (inputs.x, inputs.ids, inputs.weights)))


def test_mode_ll_above_its_limit() -> None:
    case = Case(ranks=2, tokens=130)
    group = group_of(case, "xla")
    ids = put(group, inputs_of(case).ids)
    step = per_rank(group, lambda i: jax_ep.plan(group, i, mode="ll"))
    with pytest.raises(ValueError, match=r"mode='ll' with T=130 .* at most 128 tokens per rank"):
        step.trace(ids)


def test_a_plan_of_a_group_with_other_max_tokens_is_refused(implementation: str) -> None:
    small = group_of(CASE, implementation)
    large = group_of(dataclasses.replace(CASE, max_tokens=2 * CASE.tokens), implementation)

    def step(x: jax.Array, i: jax.Array) -> jax.Array:
        return jax_ep.dispatch(large, x, plan=jax_ep.plan(small, i)).x

    inputs = inputs_of(CASE)
    with pytest.raises(
        ValueError,
        match=rf"max_tokens={CASE.tokens} in .*max_tokens={2 * CASE.tokens}; pass a plan",
    ):
        run(small, step, inputs.x, inputs.ids)


def test_a_closed_group_says_so(implementation: str) -> None:
    with jax_ep.create_group(mesh_of(2), "ep", CASE.config(), implementation) as group:
        ids = put(group, inputs_of(CASE).ids)
        step = per_rank(group, lambda i: jax_ep.plan(group, i).send_slot)
        jax.block_until_ready(step(ids))
    group.close()
    assert group.closed and "closed" in repr(group)
    fresh = per_rank(group, lambda i: jax_ep.plan(group, i).recv_src)
    with pytest.raises(ValueError, match=r"got a closed group .* create a new group"):
        fresh(ids)
    if implementation == "native":
        with pytest.raises(jax.errors.JaxRuntimeError, match="closed"):
            jax.block_until_ready(step(ids))


def test_running_a_lowering_only_group_raises(native: str) -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("ep",))
    # Fields that no other group of these tests has, hence a session id that is not open.
    config = jax_ep.Config(**VALID, align=3, max_in_flight=3, dtype=jnp.float32)
    lowering = jax_ep.create_group(mesh, "ep", config)
    running = group_of(CASE, native)  # so that the handlers are registered
    step = jax.shard_map(
        lambda i: jax_ep.plan(lowering, i[0]).send_slot[None],
        mesh=running.mesh,
        in_specs=P("ep"),
        out_specs=P("ep"),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="group"):
        jax.block_until_ready(jax.jit(step)(put(running, np.zeros((2, 4, 2), np.int32))))


@pytest.mark.parametrize("arguments", [(3, "nonsense"), (-5,), (8.5,), ("8",), (True,)])
def test_receive_rows_of_what_is_no_call(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"Group.recv_rows: got num_tokens=.* expected an int"):
        group_of(Case(ranks=2), "xla").recv_rows(*arguments)


@pytest.mark.parametrize("mode", ["ht", "ll", "auto"])
def test_receive_rows_of_more_tokens_than_a_call_takes(mode: Any) -> None:
    # They were numbers for which there is no call.
    group = jax_ep.create_group(
        mesh_of(2), "ep", jax_ep.Config(**VALID | {"mode": mode}), implementation="xla"
    )
    most = group.config.max_tokens
    too_many = rf"got T={most + 1} tokens per rank, expected at most max_tokens={most}; raise"
    for layout in ("expert_major", "expert_batched", "rank_major"):
        assert group.recv_rows(most, layout) > 0
        with pytest.raises(ValueError, match=f"Group.recv_rows: {too_many}"):
            group.recv_rows(most + 1, layout)
    with pytest.raises(ValueError, match=f"Config.memory: {too_many}"):
        group.config.memory(2, num_tokens=most + 1)


def test_of_two_configs_the_fields_that_differ_are_named() -> None:
    config = jax_ep.Config(
        num_experts=8, top_k=1, hidden=64, max_tokens=1, wire=jax_ep.FP8(block=32)
    )
    other = dataclasses.replace(config, wire=jax_ep.FP8(block=16), wire_backward=True)
    said = start._differing(repr(config), repr(other))
    assert said == (
        "wire=FP8(block=32, scale='float32'), wire_backward=False",
        "wire=FP8(block=16, scale='float32'), wire_backward=True",
    )
    for text in ("[('ep', 4)]", "4", "['ep', 'tp']"):
        assert start._differing(text, "[1]") == (text, "[1]")

"""Operands of an operation: checked (got / expected / fix), cast, and typed alike.

Everything here happens at trace time, outside of the custom VJPs, so casts differentiate as usual.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _config
from jax_ep._config import Layout, Mode, Pad
from jax_ep._group import Group
from jax_ep._ops import placing, primitive, sharding, vjp
from jax_ep._ops.call import Call
from jax_ep._placement import Placement
from jax_ep._types import InFlight, Plan, PlanArrays

UNIT_BYTES = 16  # opaque rows have a multiple of it (kernels/layout.h kWireUnitBytes)


def fail(operation: str, what: str, got: object, expected: object, fix: str) -> ValueError:
    """`got` is "" where `what` says all."""
    found = f"{what} {got}".rstrip()
    return ValueError(f"jax_ep.{operation}: got {found}, expected {expected}; {fix}")


def _describe(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _require_array(operation: str, name: str, array: Any) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise fail(
            operation, name, f"of type {type(array).__name__}", "an array", "pass a jax.Array"
        )


def require_plan(operation: str, plan: Any) -> None:
    """Raises unless `plan` is one Plan."""
    if not isinstance(plan, Plan):
        got = f"of type {type(plan).__name__}"
        raise fail(operation, "plan", got, "a Plan", "pass recv.plan, or what jax_ep.plan returns")
    _require_one(operation, "plan.send_slot", plan.send_slot)


def _require_one(operation: str, name: str, pairs: jax.Array) -> None:
    """Raises unless `pairs` are of one call, as of a stack that vmap or scan made they are not."""
    if pairs.ndim != 2:
        raise fail(
            operation,
            f"{name} of shape",
            list(pairs.shape),
            "[T, top_k], that of one call",
            "use what vmap returned under the same vmap, or pass one element of a stack",
        )


def check_ids(
    group: Group, operation: str, topk_idx: Any, num_tokens: int | None = None
) -> jax.Array:
    """topk_idx as i32[T, K]; ids that do not fit i32 stay out of range.

    `num_tokens` is how many rows x has, where there is one.
    """
    config = group.config
    _require_array(operation, "topk_idx", topk_idx)
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise fail(
            operation, "topk_idx", _describe(topk_idx), "an integer dtype", "cast it to int32"
        )
    if topk_idx.ndim != 2 or topk_idx.shape[1] != config.top_k:
        raise fail(
            operation,
            "topk_idx",
            _describe(topk_idx),
            f"[T, top_k={config.top_k}]",
            "pass the local tokens' expert ids, padded with -1",
        )
    if num_tokens is not None and topk_idx.shape[0] != num_tokens:
        raise fail(
            operation,
            "topk_idx",
            _describe(topk_idx),
            f"[T={num_tokens}, top_k={config.top_k}] as x has {num_tokens} rows",
            "pass ids and rows of the same tokens",
        )
    # Before JAX makes int32 of what NumPy has in 64 bits, which wraps.
    on_host = not isinstance(topk_idx, jax.Array)
    ids: Any = np.asarray(topk_idx) if on_host else topk_idx
    # NumPy's knows no int4.
    limits = jnp.iinfo(ids.dtype)  # type: ignore[no-untyped-call]
    if limits.max > _config.INT32_MAX:
        clip: Any = np.clip if on_host else jnp.clip
        ids = clip(ids, -1 if limits.min < 0 else 0, config.num_experts)
    return jnp.asarray(ids.astype(np.int32))


def make_call(
    group: Group,
    operation: str,
    num_tokens: int,
    mode: Mode | None,
    layout: Layout | None,
    pad: Pad,
) -> Call:
    for name, value, choices in (
        ("mode", mode, (None, *_config.MODES)),
        ("layout", layout, (None, *_config.LAYOUTS)),
        ("pad", pad, _config.PADS),
    ):
        if value not in choices:
            raise fail(operation, f"{name}={value!r}", "", f"one of {choices}", "use one of these")
    _config.check_tokens(f"jax_ep.{operation}", group.config, num_tokens)
    chosen = group._call_mode(num_tokens, mode)
    limit = group.max_ll_tokens if chosen == "ll" else group.max_ht_tokens
    if num_tokens > limit or (limit == 0 and chosen == "ht" and group.config.mode == "ll"):
        raise fail(
            operation,
            f"mode={chosen!r} with T={num_tokens}",
            f"in a group of Config.mode={group.config.mode!r}",
            f"at most {limit} tokens per rank in that mode",
            "create the group with another Config.mode, or split the tokens",
        )
    call = Call(group, chosen, layout or "expert_major", num_tokens, pad)
    if group.num_ranks * call.rows > _config.INT32_MAX:
        raise fail(
            operation,
            f"num_ranks * R = {group.num_ranks * call.rows}",
            f"rows in layout {call.layout!r}",
            f"at most {_config.INT32_MAX} (plan codes are i32)",
            "lower T or use another layout",
        )
    return call


def vary(call: Call, *operands: Any) -> Any:
    """The operands typed as varying over their union of axes and the group's."""
    return primitive.to_varying(operands, primitive.operand_axes(call, operands))


def _check_float_rows(group: Group, operation: str, name: str, rows: Any) -> None:
    _require_array(operation, name, rows)
    if rows.dtype != group.config.dtype:
        raise fail(
            operation,
            name,
            _describe(rows),
            f"dtype {group.config.dtype.name} (Config.dtype)",
            "cast it, or create the group with its dtype",
        )


def _check_float_weights(operation: str, name: str, weights: Any) -> None:
    _require_array(operation, name, weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise fail(operation, name, _describe(weights), "a float dtype", "cast it to float32")


def check_tokens(group: Group, operation: str, x: Any, topk_weights: Any) -> int:
    """How many tokens x [T, H] has; raises unless the weights are None or those of its pairs."""
    config = group.config
    _check_float_rows(group, operation, "x", x)
    if x.ndim != 2 or x.shape[1] != config.hidden:
        raise fail(
            operation,
            "x",
            _describe(x),
            f"[T, hidden={config.hidden}]",
            "pass the local tokens as rows",
        )
    tokens: int = x.shape[0]
    if topk_weights is not None:
        _check_float_weights(operation, "topk_weights", topk_weights)
        if topk_weights.shape != (tokens, config.top_k):
            raise fail(
                operation,
                "topk_weights",
                _describe(topk_weights),
                f"[T={tokens}, top_k={config.top_k}]",
                "one weight per slot",
            )
    return tokens


def dispatch_operands(
    group: Group,
    operation: str,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    plan: Plan | None,
    mode: Mode | None,
    layout: Layout | None,
    pad: Pad,
    placement: Placement | None,
) -> tuple[Call, jax.Array, jax.Array | None, jax.Array, PlanArrays | None]:
    """Validated operands of a dispatch: call, x, f32 weights, slots, the plan if one was given."""
    sharding.check_call(group, operation)
    if (topk_idx is None) == (plan is None):
        given = "both" if plan is not None else "neither"
        raise fail(operation, given, "of topk_idx and plan", "exactly one", "pass one of them")
    tokens = check_tokens(group, operation, x, topk_weights)
    weights = None if topk_weights is None else jnp.asarray(topk_weights).astype(jnp.float32)
    if plan is not None:
        require_plan(operation, plan)
        if placement is not None:
            raise fail(
                operation,
                "both",
                "of placement and plan",
                "a placement with topk_idx only, as a plan follows one already",
                "pass the placement to jax_ep.plan",
            )
        for name, value, fixed in (("mode", mode, plan.mode), ("layout", layout, plan.layout)):
            if value not in (None, fixed):
                raise fail(
                    operation,
                    f"{name}={value!r}",
                    f"with a plan of {name}={fixed!r}",
                    "the plan's",
                    f"leave {name} out, or make another plan",
                )
        call = make_call(group, operation, tokens, plan.mode, plan.layout, pad).for_tokens
        _check_plan(call, operation, plan)
        rows, weights, typed = vary(call, x, weights, plan)
        return call, rows, weights, rows, plan_arrays(typed)._replace(overflow=plan.overflow)
    ids = check_ids(group, operation, topk_idx, tokens)
    call = make_call(group, operation, tokens, mode, layout, pad).for_tokens
    slots = placing.place(call, operation, ids, placement)
    rows, weights, slots = vary(call, x, weights, slots)
    return call, rows, weights, slots, None


def _check_plan(call: Call, operation: str, plan: Plan) -> None:
    max_tokens = call.group.config.max_tokens
    if plan.max_tokens not in (None, max_tokens):
        raise fail(
            operation,
            f"plan of a group with max_tokens={plan.max_tokens}",
            f"in {call.group!r}",
            f"one of a group with max_tokens={max_tokens}",
            "pass a plan that this group made",
        )
    expected = {
        "send_slot": (call.num_tokens, call.top_k),
        "recv_src": (call.rows,),
        "send_counts": (call.group.num_ranks,),
        "group_sizes": (call.group.experts_per_rank,),
    }
    for name, shape in expected.items():
        got = getattr(plan, name).shape
        if got != shape:
            raise fail(
                operation,
                f"plan.{name} of shape",
                list(got),
                f"{list(shape)} for {call.num_tokens} tokens in {call.group!r}",
                "pass a plan that this group made for as many tokens",
            )


def combine_operands(
    group: Group, operation: str, y: Any, plan: Plan, weights: Any, return_weights: bool = False
) -> tuple[Call, jax.Array, jax.Array | None, jax.Array | None, PlanArrays]:
    """Validated operands of a combine: call, flat rows, f32 row weights, scalars, plan arrays.

    The scalars are what returns to the pairs: the weights, if they shall.
    """
    sharding.check_call(group, operation)
    require_plan(operation, plan)
    tokens = plan.send_slot.shape[0]
    call = make_call(group, operation, tokens, plan.mode, plan.layout, "zero").for_cotangents
    _check_plan(call, operation, plan)
    if group.config.batch_invariant and call.layout == "rank_major":
        raise fail(
            operation,
            f"layout {call.layout!r}",
            "in a group of Config.batch_invariant",
            "a layout with a row for each pair, which combine can add in the order of slots",
            "use 'expert_major' or 'expert_batched', or leave batch_invariant out",
        )
    _check_float_rows(group, operation, "y", y)
    if y.shape != call.recv_shape:
        raise fail(
            operation,
            "y",
            _describe(y),
            f"{list(call.recv_shape)} (layout {call.layout!r})",
            "pass rows shaped as recv.x",
        )
    if weights is not None:
        weights = _check_combine_weights(call, operation, weights, return_weights)
    elif return_weights:
        raise fail(
            operation,
            "return_weights=True",
            "without weights",
            "a Received that has them, or weights=",
            "pass topk_weights to dispatch",
        )
    rows, weights, typed = vary(call, y, weights, plan)
    arrays = plan_arrays(typed)._replace(overflow=plan.overflow)
    if weights is not None and weights.ndim == 2:
        _, weights = vjp.dispatch(call, None, weights, arrays.route())
    scalars = weights if return_weights else None
    if call.layout == "rank_major" and weights is not None:
        scalars, weights = weights.reshape(call.rows, call.top_k), None
    return call, rows.reshape(call.rows, call.hidden), weights, scalars, arrays


def _check_combine_weights(
    call: Call, operation: str, weights: Any, return_weights: bool
) -> jax.Array:
    if call.layout == "rank_major" and not return_weights:
        raise fail(
            operation,
            "weights",
            "with layout 'rank_major'",
            "None",
            "sum this rank's experts, weighted by recv.weights, into y first",
        )
    _check_float_weights(operation, "weights", weights)
    per_row, per_pair = (call.rows,), (call.num_tokens, call.top_k)
    received = (call.group.num_ranks, *per_pair)
    if call.layout == "rank_major" and weights.shape != received:
        raise fail(
            operation,
            "weights",
            _describe(weights),
            f"{list(received)} (layout 'rank_major')",
            "pass weights shaped as recv.weights",
        )
    if call.layout != "rank_major" and weights.shape not in (per_row, per_pair):
        raise fail(
            operation,
            "weights",
            _describe(weights),
            f"{list(per_row)} per row or {list(per_pair)} per (token, k)",
            "pass recv.weights, or the topk_weights of dispatch",
        )
    return jnp.asarray(weights).astype(jnp.float32)


def inflight_call(group: Group, operation: str, inflight: Any, kind: str) -> Call:
    sharding.check_call(group, operation)
    if not isinstance(inflight, InFlight) or inflight.kind != kind:
        got = inflight.kind if isinstance(inflight, InFlight) else type(inflight).__name__
        raise fail(
            operation,
            "inflight of",
            got,
            f"what {kind}_start returned",
            f"pass that of {kind}_start",
        )
    if inflight.topk_idx is not None:
        name, pairs = "topk_idx", inflight.topk_idx
    else:
        assert inflight.plan is not None
        name, pairs = "plan.send_slot", inflight.plan.send_slot
    _require_one(operation, f"inflight.{name}", pairs)
    tokens = pairs.shape[0]
    call = make_call(group, operation, tokens, inflight.mode, inflight.layout, inflight.pad)
    if inflight.maker not in (None, call.maker):
        raise fail(
            operation,
            f"what a {kind}_start returned",
            "of another group or view",
            f"one of {group!r}",
            "pass both halves the same group or view",
        )
    if inflight.plan is not None:
        _check_plan(call, operation, inflight.plan)
    return call.for_tokens if kind == "dispatch" else call.for_cotangents


def payload_operands(
    group: Group, operation: str, payload: Any, plan: Any, pad: Pad
) -> tuple[Call, jax.Array, PlanArrays]:
    """Validated operands of a dispatch of opaque rows: call, bytes, plan arrays."""
    sharding.check_call(group, operation)
    _require_array(operation, "payload", payload)
    require_plan(operation, plan)
    tokens = plan.send_slot.shape[0]
    unit = UNIT_BYTES
    fits = payload.ndim == 2 and payload.shape[0] == tokens and payload.shape[1] % unit == 0
    if payload.dtype != jnp.uint8 or not fits or payload.shape[1] == 0:
        raise fail(
            operation,
            "payload",
            _describe(payload),
            f"uint8[T={tokens}, B], B a multiple of {unit} above 0",
            "jax.lax.bitcast_convert_type makes bytes of other dtypes; pad them with zeros",
        )
    if group.room_bytes == 0:
        raise fail(
            operation,
            f"rows of {group.config.hidden} elements of {group.config.dtype.name}",
            f"in {group!r}",
            f"at least {unit} bytes",
            "create the group with a larger hidden",
        )
    call = make_call(group, operation, tokens, plan.mode, plan.layout, pad)
    _check_plan(call, operation, plan)
    rows, typed = vary(call, payload, plan)
    return call, rows, plan_arrays(typed)._replace(overflow=plan.overflow)


def plan_arrays(plan: Plan) -> PlanArrays:
    return PlanArrays(*(getattr(plan, name) for name in PlanArrays._fields))

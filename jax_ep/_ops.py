"""Public operations: validate, choose mode and layout, call, wrap the results.

What travels is in _primitive; gradients are in _vjp.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jax_ep import _config, _ffi, _jax_compat, _primitive, _sharding, _vjp
from jax_ep._call import Call
from jax_ep._config import Layout, Mode, Pad
from jax_ep._group import Group
from jax_ep._types import InFlight, Plan, PlanArrays, Received, plan_route


def plan(
    group: Group, topk_idx: jax.Array, *, mode: Mode | None = None, layout: Layout | None = None
) -> Plan:
    """Plans where every (token, k) pair goes; reusable for any number of payloads.

    Args:
        group: the group; call inside shard_map over its axis.
        topk_idx: integers [T, K]; negative: no expert; >= num_experts: dropped and counted.
        mode: "ht" or "ll"; None: Config.mode.
        layout: "expert_major" (default), "expert_batched" or "rank_major".

    Returns:
        A `Plan`.

    Raises:
        ValueError: shapes, mode or layout do not fit, or the axis is not in scope.

    Example:
        >>> plan = jax_ep.plan(group, topk_idx)
        >>> recv = jax_ep.dispatch(group, x, plan=plan)
    """
    _sharding.check_call(group, "plan")
    ids = _check_ids(group, "plan", topk_idx)
    call = _make_call(group, "plan", ids.shape[0], mode, layout, "zero")
    (ids,) = _vary(call, ids)
    return _make_plan(call, _primitive.plan(call, ids))


def dispatch(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    plan: Plan | None = None,
    mode: Mode | None = None,
    layout: Layout | None = None,
    pad: Pad = "zero",
) -> Received:
    """Sends every token to the ranks of its experts.

    Args:
        group: the group; call inside shard_map over its axis.
        x: [T, H] in Config.dtype.
        topk_idx: integers [T, K] as in `plan`; exactly one of topk_idx and plan.
        topk_weights: floats [T, K], travel as f32; or None.
        plan: a plan to follow; it fixes mode and layout.
        mode: "ht" or "ll"; None: Config.mode.
        layout: "expert_major" (default), "expert_batched" or "rank_major".
        pad: "zero", or "undefined" to skip zeroing unused rows (inference).

    Returns:
        A `Received`.

    Raises:
        ValueError: shapes, dtypes, mode or layout do not fit, or the axis is not in scope.

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx, topk_weights)
        >>> y = jax.lax.ragged_dot(recv.x, kernels, recv.group_sizes)
        >>> out = jax_ep.combine(group, y, recv.plan, weights=recv.weights)
    """
    call, rows, weights, ids, arrays = _dispatch_operands(
        group, "dispatch", x, topk_idx, topk_weights, plan, mode, layout, pad
    )
    if arrays is not None:
        recv_x, recv_weights = _vjp.dispatch(call, rows, weights, arrays.route())
    elif call.mode == "ll":
        arrays, recv_x, recv_weights = _vjp.ll_dispatch(call, rows, weights, ids)
        arrays = _name_plan(arrays)
    else:
        arrays = _name_plan(_primitive.plan(call, ids))
        recv_x, recv_weights = _vjp.dispatch(call, rows, weights, arrays.route())
    return _make_received(call, arrays, recv_x, recv_weights)


def combine(
    group: Group, y: jax.Array, plan: Plan, weights: jax.Array | None = None
) -> jax.Array:
    """Sums the experts' rows back into their tokens, in a fixed order, in f32.

    Args:
        group: the group; call inside shard_map over its axis.
        y: shaped as the `Received.x` of this plan, in Config.dtype; padding rows are not read.
        plan: the plan of the dispatch.
        weights: floats per row (shaped as `Received.weights`, or flat [R]), or per (token, k)
            [T, K] (costs an exchange of weights), or None for 1. Must be None in rank_major.

    Returns:
        [T, H] in Config.dtype; zero where a token has no kept pair.

    Raises:
        ValueError: shapes or dtypes do not fit, or the axis is not in scope.

    Example:
        >>> out = jax_ep.combine(group, y, recv.plan, weights=recv.weights)
    """
    call, rows, row_weights, arrays = _combine_operands(group, "combine", y, plan, weights)
    if row_weights is None:
        out, _ = _vjp.combine(call, rows, None, arrays.route())
        assert out is not None
    else:
        out = _vjp.combine_weighted(call, rows, row_weights, arrays.route())
    return _finish(call, out, arrays)


def dispatch_start(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    plan: Plan | None = None,
    mode: Mode | None = None,
    layout: Layout | None = None,
    pad: Pad = "zero",
) -> InFlight:
    """First half of `dispatch`: sends, and returns before anything has arrived.

    Args:
        group: as in `dispatch`.
        x: as in `dispatch`.
        topk_idx: as in `dispatch`.
        topk_weights: as in `dispatch`.
        plan: as in `dispatch`.
        mode: as in `dispatch`.
        layout: as in `dispatch`.
        pad: as in `dispatch`.

    Returns:
        An `InFlight` for exactly one `dispatch_done` in the same program. At most
        Config.max_in_flight starts may precede their done.

    Raises:
        ValueError: as `dispatch`.

    Example:
        >>> flight = jax_ep.dispatch_start(group, x, topk_idx)
        >>> z = attention(other)  # overlaps
        >>> recv = jax_ep.dispatch_done(group, flight)
    """
    call, rows, weights, ids, arrays = _dispatch_operands(
        group, "dispatch_start", x, topk_idx, topk_weights, plan, mode, layout, pad
    )
    sent = jax.lax.stop_gradient((rows, weights))  # the gradient is done's, in what is carried
    if arrays is None and call.mode == "ht":
        arrays = _name_plan(_primitive.plan(call, ids))
    if arrays is None:
        epoch = _primitive.ll_dispatch_start(call, *sent, ids)
        carried = None
    else:
        epoch = _primitive.dispatch_start(call, *sent, arrays.route())
        carried = _as_plan(call, arrays)
    return InFlight(
        rows=rows,
        weights=weights,
        topk_idx=ids if carried is None else None,
        plan=carried,
        epoch=epoch,
        kind="dispatch",
        layout=call.layout,
        mode=call.mode,
        pad=call.pad,
    )


def dispatch_done(group: Group, inflight: InFlight) -> Received:
    """Second half of `dispatch`: waits for every rank's rows and lays them out.

    Args:
        group: the group of the start.
        inflight: what `dispatch_start` returned; usable once.

    Returns:
        A `Received`.

    Raises:
        ValueError: `inflight` is not a dispatch of this group, or the axis is not in scope.

    Example:
        >>> recv = jax_ep.dispatch_done(group, jax_ep.dispatch_start(group, x, topk_idx))
    """
    call = _inflight_call(group, "dispatch_done", inflight, "dispatch")
    rows, weights, ids, plan, epoch = _vary(
        call, inflight.rows, inflight.weights, inflight.topk_idx, inflight.plan, inflight.epoch
    )
    if plan is None:
        arrays, recv_x, recv_weights = _vjp.ll_dispatch_done(call, rows, weights, ids, epoch)
        arrays = _name_plan(arrays)
    else:
        arrays = _plan_arrays(plan)
        arrays = arrays._replace(overflow=inflight.plan.overflow if inflight.plan else None)
        recv_x, recv_weights = _vjp.dispatch_done(call, rows, weights, arrays.route(), epoch)
    return _make_received(call, arrays, recv_x, recv_weights)


def combine_start(
    group: Group, y: jax.Array, plan: Plan, weights: jax.Array | None = None
) -> InFlight:
    """First half of `combine`: sends, and returns before anything has arrived.

    Args:
        group: as in `combine`.
        y: as in `combine`.
        plan: as in `combine`.
        weights: as in `combine`.

    Returns:
        An `InFlight` for exactly one `combine_done` in the same program.

    Raises:
        ValueError: as `combine`.

    Example:
        >>> flight = jax_ep.combine_start(group, y, recv.plan, recv.weights)
        >>> out = jax_ep.combine_done(group, flight)
    """
    call, rows, row_weights, arrays = _combine_operands(group, "combine_start", y, plan, weights)
    sent = jax.lax.stop_gradient((rows, row_weights))
    return InFlight(
        rows=rows,
        weights=row_weights,
        topk_idx=None,
        plan=_as_plan(call, arrays),
        epoch=_primitive.combine_start(call, *sent, arrays.route()),
        kind="combine",
        layout=call.layout,
        mode=call.mode,
        pad=call.pad,
    )


def combine_done(group: Group, inflight: InFlight) -> jax.Array:
    """Second half of `combine`: waits for every rank's partial sums and adds them.

    Args:
        group: the group of the start.
        inflight: what `combine_start` returned; usable once.

    Returns:
        [T, H] in Config.dtype.

    Raises:
        ValueError: `inflight` is not a combine of this group, or the axis is not in scope.

    Example:
        >>> out = jax_ep.combine_done(group, jax_ep.combine_start(group, y, recv.plan))
    """
    call = _inflight_call(group, "combine_done", inflight, "combine")
    assert inflight.plan is not None
    arrays = _plan_arrays(inflight.plan)
    rows, row_weights, route, epoch = _vary(
        call, inflight.rows, inflight.weights, arrays.route(), inflight.epoch
    )
    return _finish(call, _vjp.combine_done(call, rows, row_weights, route, epoch), arrays)


def dispatch_quantized(
    group: Group,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    plan: Plan | None = None,
    mode: Mode | None = None,
    layout: Layout | None = None,
    pad: Pad = "zero",
) -> NoReturn:
    """Dispatch that delivers FP8 values and scales; not implemented in this version.

    Args:
        group: as in `dispatch`.
        x: as in `dispatch`.
        topk_idx: as in `dispatch`.
        topk_weights: as in `dispatch`.
        plan: as in `dispatch`.
        mode: as in `dispatch`.
        layout: as in `dispatch`.
        pad: as in `dispatch`.

    Returns:
        Nothing yet.

    Raises:
        NotImplementedError: always.

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx)  # instead, for now
    """
    raise NotImplementedError(
        "jax_ep.dispatch_quantized: the FP8 wire is not implemented in this version; "
        "use jax_ep.dispatch"
    )


def block_until_ready(tree: Any) -> Any:
    """Waits for every array in `tree`, then raises the failure of any open group.

    Args:
        tree: a pytree of arrays.

    Returns:
        `tree`.

    Raises:
        RuntimeError: a group of this process has failed.

    Example:
        >>> loss = jax_ep.block_until_ready(step(params, batch))
    """
    from jax_ep import _group

    ready = jax.block_until_ready(tree)
    _group.check_open_groups()
    return ready


def export_checks() -> list[Any]:
    """Safety checks to disable so that jax.export accepts programs with jax_ep operations.

    Returns:
        A list for `jax.export.export(..., disabled_checks=...)`.

    Example:
        >>> jax.export.export(step, disabled_checks=jax_ep.export_checks())
    """
    return [_jax_compat.export_custom_call_check(target) for target in _ffi.TARGETS]


def _fail(operation: str, what: str, got: object, expected: object, fix: str) -> ValueError:
    return ValueError(f"jax_ep.{operation}: got {what} {got}, expected {expected}; {fix}")


def _describe(array: Any) -> str:
    return f"{np.dtype(array.dtype).name}{list(array.shape)}"


def _require_array(operation: str, name: str, array: Any) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise _fail(
            operation, name, f"of type {type(array).__name__}", "an array", "pass a jax.Array"
        )


def _check_ids(group: Group, operation: str, topk_idx: Any) -> jax.Array:
    """topk_idx as i32[T, K]; ids that do not fit i32 stay out of range."""
    config = group.config
    _require_array(operation, "topk_idx", topk_idx)
    if not jnp.issubdtype(topk_idx.dtype, jnp.integer):
        raise _fail(
            operation, "topk_idx", _describe(topk_idx), "an integer dtype", "cast it to int32"
        )
    if topk_idx.ndim != 2 or topk_idx.shape[1] != config.top_k:
        raise _fail(
            operation,
            "topk_idx",
            _describe(topk_idx),
            f"[T, top_k={config.top_k}]",
            "pass the local tokens' expert ids, padded with -1",
        )
    ids = jnp.asarray(topk_idx)
    if jnp.iinfo(ids.dtype).max > _config.INT32_MAX:
        ids = jnp.clip(ids, max=config.num_experts)
        if jnp.iinfo(ids.dtype).min < 0:
            ids = jnp.clip(ids, min=-1)
    ids = ids.astype(jnp.int32)
    if os.environ.get("JAX_EP_DEBUG", "") not in ("", "0"):
        jax.debug.callback(_raise_invalid_ids, jnp.max(ids, initial=-1), config.num_experts, operation)
    return ids


def _raise_invalid_ids(largest: Any, num_experts: Any, operation: str) -> None:
    if int(largest) >= int(num_experts):
        raise ValueError(
            f"jax_ep.{operation}: got expert id {int(largest)} in topk_idx, expected ids below "
            f"num_experts={int(num_experts)} (negative for no expert); correct the router "
            "(JAX_EP_DEBUG is set; without it the pair is dropped and counted)"
        )


def _make_call(
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
            raise _fail(operation, f"{name}=", repr(value), f"one of {choices}", "correct it")
    if num_tokens > group.config.max_tokens:
        raise _fail(
            operation,
            f"T={num_tokens}",
            "tokens per rank",
            f"at most max_tokens={group.config.max_tokens}",
            "raise Config.max_tokens or split the tokens (jax_ep.moe with chunks)",
        )
    chosen = group.call_mode(num_tokens, mode)
    limit = group.max_ll_tokens if chosen == "ll" else group.max_ht_tokens
    if num_tokens > limit or (limit == 0 and chosen == "ht" and group.config.mode == "ll"):
        raise _fail(
            operation,
            f"mode={chosen!r} with T={num_tokens}",
            f"in a group of Config.mode={group.config.mode!r}",
            f"at most {limit} tokens per rank in that mode",
            "create the group with another Config.mode, or split the tokens",
        )
    call = Call(group, chosen, layout or "expert_major", num_tokens, pad)
    if group.num_ranks * call.rows > _config.INT32_MAX:
        raise _fail(
            operation,
            f"num_ranks * R = {group.num_ranks * call.rows}",
            f"rows in layout {call.layout!r}",
            f"at most {_config.INT32_MAX} (plan codes are i32)",
            "lower T or use another layout",
        )
    return call


def _vary(call: Call, *operands: Any) -> Any:
    """The operands typed as varying over their union of axes and the group's."""
    return _primitive.to_varying(operands, _primitive.operand_axes(call, operands))


def _check_float_rows(group: Group, operation: str, name: str, rows: Any) -> None:
    _require_array(operation, name, rows)
    if rows.dtype != group.config.dtype:
        raise _fail(
            operation,
            name,
            _describe(rows),
            f"dtype {group.config.dtype.name} (Config.dtype)",
            "cast it, or create the group with its dtype",
        )


def _check_float_weights(operation: str, name: str, weights: Any) -> None:
    _require_array(operation, name, weights)
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        raise _fail(operation, name, _describe(weights), "a float dtype", "cast it to float32")


def _dispatch_operands(
    group: Group,
    operation: str,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    plan: Plan | None,
    mode: Mode | None,
    layout: Layout | None,
    pad: Pad,
) -> tuple[Call, jax.Array, jax.Array | None, jax.Array, PlanArrays | None]:
    """Validated operands of a dispatch: call, x, f32 weights, ids, and the plan if one was given."""
    _sharding.check_call(group, operation)
    if (topk_idx is None) == (plan is None):
        given = "both" if plan is not None else "neither"
        raise _fail(operation, given, "of topk_idx and plan", "exactly one", "pass one of them")
    _check_float_rows(group, operation, "x", x)
    if x.ndim != 2 or x.shape[1] != group.config.hidden:
        raise _fail(
            operation,
            "x",
            _describe(x),
            f"[T, hidden={group.config.hidden}]",
            "pass the local tokens as rows",
        )
    tokens, top_k = x.shape[0], group.config.top_k
    if topk_weights is not None:
        _check_float_weights(operation, "topk_weights", topk_weights)
        if topk_weights.shape != (tokens, top_k):
            raise _fail(
                operation,
                "topk_weights",
                _describe(topk_weights),
                f"[T={tokens}, top_k={top_k}]",
                "one weight per slot",
            )
    weights = None if topk_weights is None else jnp.asarray(topk_weights).astype(jnp.float32)
    if plan is not None:
        for name, value, fixed in (("mode", mode, plan.mode), ("layout", layout, plan.layout)):
            if value not in (None, fixed):
                raise _fail(
                    operation,
                    f"{name}={value!r}",
                    f"with a plan of {name}={fixed!r}",
                    "the plan's",
                    f"leave {name} out, or make another plan",
                )
        call = _make_call(group, operation, tokens, plan.mode, plan.layout, pad)
        _check_plan(call, operation, plan)
        rows, weights, typed = _vary(call, x, weights, plan)
        return call, rows, weights, rows, _plan_arrays(typed)._replace(overflow=plan.overflow)
    ids = _check_ids(group, operation, topk_idx)
    if ids.shape[0] != tokens:
        raise _fail(
            operation,
            "topk_idx",
            _describe(ids),
            f"[T={tokens}, top_k={top_k}] as x has {tokens} rows",
            "pass ids and rows of the same tokens",
        )
    call = _make_call(group, operation, tokens, mode, layout, pad)
    rows, weights, ids = _vary(call, x, weights, ids)
    return call, rows, weights, ids, None


def _check_plan(call: Call, operation: str, plan: Plan) -> None:
    expected = {
        "send_slot": (call.num_tokens, call.top_k),
        "recv_src": (call.rows,),
        "send_counts": (call.group.num_ranks,),
        "group_sizes": (call.group.experts_per_rank,),
    }
    for name, shape in expected.items():
        got = getattr(plan, name).shape
        if got != shape:
            raise _fail(
                operation,
                f"plan.{name} of shape",
                list(got),
                f"{list(shape)} for {call.num_tokens} tokens in {call.group!r}",
                "pass a plan that this group made for as many tokens",
            )


def _combine_operands(
    group: Group, operation: str, y: Any, plan: Any, weights: Any
) -> tuple[Call, jax.Array, jax.Array | None, PlanArrays]:
    """Validated operands of a combine: call, flat rows, f32 row weights, plan arrays."""
    _sharding.check_call(group, operation)
    if not isinstance(plan, Plan):
        raise _fail(
            operation, "plan", f"of type {type(plan).__name__}", "jax_ep.Plan", "pass recv.plan"
        )
    call = _make_call(group, operation, plan.send_slot.shape[0], plan.mode, plan.layout, "zero")
    _check_plan(call, operation, plan)
    _check_float_rows(group, operation, "y", y)
    if y.shape != call.recv_shape:
        raise _fail(
            operation,
            "y",
            _describe(y),
            f"{list(call.recv_shape)} (layout {call.layout!r})",
            "pass rows shaped as recv.x",
        )
    if weights is not None:
        weights = _check_combine_weights(call, operation, weights)
    rows, weights, typed = _vary(call, y, weights, plan)
    arrays = _plan_arrays(typed)._replace(overflow=plan.overflow)
    if weights is not None and weights.ndim == 2:
        _, weights = _vjp.dispatch(call, None, weights, arrays.route())
    return call, rows.reshape(call.rows, call.hidden), weights, arrays


def _check_combine_weights(call: Call, operation: str, weights: Any) -> jax.Array:
    if call.layout == "rank_major":
        raise _fail(
            operation,
            "weights",
            "with layout 'rank_major'",
            "None",
            "sum this rank's experts, weighted by recv.weights, into y first",
        )
    _check_float_weights(operation, "weights", weights)
    per_row, per_pair = (call.rows,), (call.num_tokens, call.top_k)
    if weights.shape not in (per_row, per_pair):
        raise _fail(
            operation,
            "weights",
            _describe(weights),
            f"{list(per_row)} per row or {list(per_pair)} per (token, k)",
            "pass recv.weights, or the topk_weights of dispatch",
        )
    return jnp.asarray(weights).astype(jnp.float32)


def _inflight_call(group: Group, operation: str, inflight: Any, kind: str) -> Call:
    _sharding.check_call(group, operation)
    if not isinstance(inflight, InFlight) or inflight.kind != kind:
        got = inflight.kind if isinstance(inflight, InFlight) else type(inflight).__name__
        raise _fail(
            operation, "inflight of", got, f"what {kind}_start returned", f"pass that of {kind}_start"
        )
    if inflight.topk_idx is not None:
        tokens = inflight.topk_idx.shape[0]
    else:
        assert inflight.plan is not None
        tokens = inflight.plan.send_slot.shape[0]
    call = _make_call(group, operation, tokens, inflight.mode, inflight.layout, inflight.pad)
    if inflight.plan is not None:
        _check_plan(call, operation, inflight.plan)
    return call


def _plan_arrays(plan: Plan) -> PlanArrays:
    return PlanArrays(*(getattr(plan, name) for name in PlanArrays._fields))


def _as_plan(call: Call, arrays: PlanArrays) -> Plan:
    return Plan(**arrays._asdict(), layout=call.layout, mode=call.mode)


def _name_plan(arrays: PlanArrays) -> PlanArrays:
    named: PlanArrays = jax.tree.map(lambda leaf: checkpoint_name(leaf, "jax_ep_plan"), arrays)
    return named


def _make_plan(call: Call, arrays: PlanArrays) -> Plan:
    return _as_plan(call, _name_plan(arrays))


def _make_received(
    call: Call, arrays: PlanArrays, recv_x: jax.Array | None, recv_weights: jax.Array | None
) -> Received:
    assert recv_x is not None
    recv_x, recv_weights = _poison(call, arrays, (recv_x, recv_weights))
    recv_x = checkpoint_name(recv_x, "jax_ep_recv").reshape(call.recv_shape)
    if recv_weights is not None:
        recv_weights = checkpoint_name(recv_weights, "jax_ep_recv")
    return Received(
        x=recv_x,
        weights=recv_weights,
        group_sizes=arrays.group_sizes,
        plan=_as_plan(call, arrays),
        topk_idx=arrays.recv_topk_idx,
    )


def _finish(call: Call, out: jax.Array, arrays: PlanArrays) -> jax.Array:
    named: jax.Array = checkpoint_name(_poison(call, arrays, out), "jax_ep_out")
    return named


def _poison(call: Call, arrays: PlanArrays, values: Any) -> Any:
    """With overflow="poison", NaN everywhere if any rank dropped; times 1 keeps the bits."""
    if call.group.config.overflow != "poison":
        return values
    factor = jnp.where(arrays.overflow > 0, jnp.float32(jnp.nan), jnp.float32(1))
    return jax.tree.map(lambda value: value * factor.astype(value.dtype), values)

"""Public operations; operands checks, vjp differentiates, primitive runs."""

from __future__ import annotations

from typing import Any, Literal, overload

import jax
import jax.numpy as jnp

from jax_ep import _group, _jax_compat, _warn
from jax_ep._config import Layout, Mode, Pad
from jax_ep._group import Group
from jax_ep._ops import (
    by_slot,
    combine_arguments,
    ffi,
    operands,
    placing,
    reachable,
    records,
    results,
    sharding,
    vjp,
)
from jax_ep._placement import Placement
from jax_ep._types import NOT_GIVEN, InFlight, NotGiven, Plan, Received


def plan(
    group: Group,
    topk_idx: jax.Array,
    *,
    mode: Mode | None = None,
    layout: Layout | None = None,
    placement: Placement | None = None,
    active: jax.Array | None = None,
) -> Plan:
    """Plans where every (token, k) pair goes; reusable for any number of payloads.

    Args:
        group: the group; call inside shard_map over its axis.
        topk_idx: integers [T, K]; negative: no expert; >= num_experts: dropped and counted.
        mode: "ht" or "ll"; None: Config.mode.
        layout: "expert_major" (default), "expert_batched" or "rank_major".
        placement: in which slots the experts are, equal on all ranks (docs/placement.md). None:
            expert e in slot e, on rank e // E_l.
        active: integers [N], uniform over the group: what `Group.agree` returned. Pairs whose
            expert lives on a rank of 0 are left out and counted (`Plan.num_unreachable`). An array,
            so another mask compiles nothing. With a placement only pairs of experts without
            a slot on an active rank are; others go to such slots. None: all ranks take part.

    Returns:
        A `Plan`.

    Raises:
        ValueError: shapes, mode or layout do not fit, or the axis is not in scope.

    Example:
        >>> plan = jax_ep.plan(group, topk_idx)
        >>> recv = jax_ep.dispatch(group, x, plan=plan)
    """
    sharding.check_call(group, "plan")
    topk_idx, _, num_unreachable, placement = reachable.leave_out(
        group, "plan", topk_idx, None, active, placement
    )
    ids = operands.check_ids(group, "plan", topk_idx)
    call = operands.make_call(group, "plan", ids.shape[0], mode, layout, "zero")
    (slots,) = operands.vary(call, placing.place(call, "plan", ids, placement))
    return results.as_plan(call, vjp.plan(call, slots), num_unreachable)


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
    placement: Placement | None = None,
    active: jax.Array | None = None,
    renormalize: bool = False,
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
        placement: with topk_idx: in which slots the experts are, as in `plan`.
        active: as in `plan`; not with a plan, which was made with one.
        renormalize: with active: scale a token's weights so that those of its pairs which can be
            reached have the sum that all of them had (0 if there are none).

    Returns:
        A `Received`.

    Raises:
        ValueError: shapes, dtypes, mode or layout do not fit, or the axis is not in scope.

    Example:
        >>> recv = jax_ep.dispatch(group, x, topk_idx, topk_weights)
        >>> y = jax.lax.ragged_dot(recv.x, kernels, recv.group_sizes)
        >>> out = jax_ep.combine(group, y, recv)
    """
    topk_idx, topk_weights, num_unreachable, placement = reachable.leave_out(
        group,
        "dispatch",
        topk_idx,
        topk_weights,
        active,
        placement,
        x=x,
        plan=plan,
        renormalize=renormalize,
    )
    call, rows, weights, ids, arrays = operands.dispatch_operands(
        group, "dispatch", x, topk_idx, topk_weights, plan, mode, layout, pad, placement
    )
    if arrays is not None:
        recv_x, recv_weights = vjp.dispatch(call, rows, weights, arrays.route())
    elif call.mode == "ll":
        arrays, recv_x, recv_weights = vjp.ll_dispatch(call, rows, weights, ids)
        # Out here too, else vmap(spmd_axis_name) of a grad gives ids a cotangent of a wrong type.
        arrays = vjp.name_plan(arrays)
    else:
        arrays = vjp.plan(call, ids)
        recv_x, recv_weights = vjp.dispatch(call, rows, weights, arrays.route())
    return results.make_received(call, arrays, recv_x, recv_weights, num_unreachable)


@overload
def combine(
    group: Group,
    y: jax.Array,
    recv: Received | Plan | None = None,
    weights: jax.Array | NotGiven | None = NOT_GIVEN,
    *,
    return_weights: Literal[False] = False,
    plan: Plan | None = None,
) -> jax.Array: ...
@overload
def combine(
    group: Group,
    y: jax.Array,
    recv: Received | Plan | None = None,
    weights: jax.Array | NotGiven | None = NOT_GIVEN,
    *,
    return_weights: Literal[True],
    plan: Plan | None = None,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def combine(
    group: Group,
    y: jax.Array,
    recv: Received | Plan | None = None,
    weights: jax.Array | NotGiven | None = NOT_GIVEN,
    *,
    return_weights: bool,
    plan: Plan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def combine(
    group: Group,
    y: jax.Array,
    recv: Received | Plan | None = None,
    weights: jax.Array | NotGiven | None = NOT_GIVEN,
    *,
    return_weights: bool = False,
    plan: Plan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Sums the experts' rows back into their tokens, in a fixed order, in f32.

    Args:
        group: the group; call inside shard_map over its axis.
        y: shaped as `Received.x`, in Config.dtype; padding rows are not read.
        recv: what `dispatch` returned: its plan and its weights are used (in rank_major its plan
            alone: y is already weighted and summed over the rank's experts). Or a `Plan`, with
            `weights`.
        weights: instead of those of `recv`: floats per row (f32[R]), or per (token, k) [T, K]
            (costs an exchange of weights), or None for a plain sum. In rank_major nothing is
            weighted: None, or with return_weights the [N, T, K] to return.
        return_weights: also return the rows' weights to the (token, k) they belong to. In
            rank_major these are `Received.weights`, or `weights`.
        plan: deprecated: pass it as `recv`.

    Returns:
        [T, H] in Config.dtype, zero where a token has no kept pair; with return_weights a tuple of
        it and f32[T, K], zero for dropped and absent pairs.

    Raises:
        ValueError: shapes or dtypes do not fit, or the axis is not in scope.

    Example:
        >>> out = jax_ep.combine(group, y, recv)
        >>> total = jax_ep.combine(group, y, recv.plan, weights=None)  # a plain sum
    """
    plan, weights = combine_arguments.resolve("combine", recv, weights, plan, return_weights)
    call, rows, row_weights, scalars, arrays = operands.combine_operands(
        group, "combine", y, plan, weights, return_weights
    )
    out: jax.Array | None
    if group.config.batch_invariant:
        out = by_slot.combine(call, rows, row_weights, arrays)
        returned = vjp.combine(call, None, scalars, arrays.route())[1] if return_weights else None
    elif row_weights is None:
        out, returned = vjp.combine(call, rows, scalars, arrays.route())
    else:
        out, returned = vjp.combine_weighted(call, rows, row_weights, scalars, arrays.route())
    assert out is not None
    if not return_weights:
        return results.finish(call, arrays, out)
    assert returned is not None
    return results.finish(call, arrays, out), results.finish(call, arrays, returned)


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
    placement: Placement | None = None,
) -> InFlight:
    """First half of `dispatch`: sends, and returns before anything has arrived.

    In mode ht on GPUs it does nothing, and `dispatch_done` is the whole dispatch: with
    Config.overlap XLA starts that beside other work.

    Args:
        group: the group; call inside shard_map over its axis.
        x: [T, H] in Config.dtype, this rank's tokens.
        topk_idx: integers [T, K], each pair's expert; negative: none; >= num_experts: dropped and
            counted. Exactly one of topk_idx and plan.
        topk_weights: floats [T, K], travel as f32; or None.
        plan: a plan to follow; it fixes mode and layout.
        mode: "ht" or "ll"; None: Config.mode.
        layout: "expert_major" (default), "expert_batched" or "rank_major".
        pad: "zero", or "undefined" to skip zeroing unused rows (inference).
        placement: with topk_idx: in which slots the experts are, as in `plan`.

    Returns:
        An `InFlight` for exactly one `dispatch_done` in the same program. At most
        Config.max_in_flight starts may precede their done, in mode ht on GPUs any number.

    Raises:
        ValueError: shapes, dtypes, mode or layout do not fit, or the axis is not in scope.

    Example:
        >>> flight = jax_ep.dispatch_start(group, x, topk_idx)
        >>> z = attention(other)  # overlaps
        >>> recv = jax_ep.dispatch_done(group, flight)
    """
    call, rows, weights, ids, arrays = operands.dispatch_operands(
        group, "dispatch_start", x, topk_idx, topk_weights, plan, mode, layout, pad, placement
    )
    if arrays is None and call.mode == "ht":
        arrays = vjp.plan(call, ids)
    if arrays is None:
        epoch = vjp.ll_dispatch_start(call, rows, weights, ids)
        carried = None
    else:
        epoch = vjp.dispatch_start(call, rows, weights, arrays.route())
        carried = results.as_plan(call, arrays, None if plan is None else plan.num_unreachable)
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
        maker=call.maker,
    )


def dispatch_done(group: Group, inflight: InFlight) -> Received:
    """Second half of `dispatch`: waits for every rank's rows and lays them out.

    Args:
        group: the group of the start; call inside shard_map over its axis.
        inflight: what `dispatch_start` returned; usable once.

    Returns:
        A `Received`: rows x by this rank's experts, their weights, group_sizes and the plan.

    Raises:
        ValueError: `inflight` is not a dispatch of this group, or the axis is not in scope.

    Example:
        >>> recv = jax_ep.dispatch_done(group, jax_ep.dispatch_start(group, x, topk_idx))
    """
    call = operands.inflight_call(group, "dispatch_done", inflight, "dispatch")
    rows, weights, ids, plan, epoch = operands.vary(
        call, inflight.rows, inflight.weights, inflight.topk_idx, inflight.plan, inflight.epoch
    )
    num_unreachable = None
    if plan is None:
        arrays, recv_x, recv_weights = vjp.ll_dispatch_done(call, rows, weights, ids, epoch)
        arrays = vjp.name_plan(arrays)
    else:
        assert inflight.plan is not None
        num_unreachable = inflight.plan.num_unreachable
        arrays = operands.plan_arrays(plan)._replace(overflow=inflight.plan.overflow)
        recv_x, recv_weights = vjp.dispatch_done(call, rows, weights, arrays.route(), epoch)
    return results.make_received(call, arrays, recv_x, recv_weights, num_unreachable)


def combine_start(
    group: Group,
    y: jax.Array,
    recv: Received | Plan | None = None,
    weights: jax.Array | NotGiven | None = NOT_GIVEN,
    *,
    plan: Plan | None = None,
) -> InFlight:
    """First half of `combine`: sends, and returns before anything has arrived.

    In mode ht on GPUs it does nothing, as `dispatch_start`.

    Args:
        group: the group; call inside shard_map over its axis.
        y: shaped as `Received.x`, in Config.dtype; padding rows are not read.
        recv: what `dispatch` returned, or a `Plan` with `weights`, as `combine` takes them.
        weights: instead of those of `recv`: floats per row (f32[R]), or per (token, k) [T, K]
            (costs an exchange of weights), or None for a plain sum. In rank_major None.
        plan: deprecated: pass it as `recv`.

    Returns:
        An `InFlight` for exactly one `combine_done` in the same program.

    Raises:
        ValueError: shapes or dtypes do not fit, or the axis is not in scope.

    Example:
        >>> flight = jax_ep.combine_start(group, y, recv)
        >>> out = jax_ep.combine_done(group, flight)
    """
    plan, weights = combine_arguments.resolve("combine_start", recv, weights, plan)
    call, rows, row_weights, _, arrays = operands.combine_operands(
        group, "combine_start", y, plan, weights
    )
    if group.config.batch_invariant:
        epoch = operands.vary(call, jnp.zeros((1,), jnp.int32))[0]  # the done does all of it
    else:
        epoch = vjp.combine_start(call, rows, row_weights, arrays.route())
    return InFlight(
        rows=rows,
        weights=row_weights,
        topk_idx=None,
        plan=results.as_plan(call, arrays),
        epoch=epoch,
        kind="combine",
        layout=call.layout,
        mode=call.mode,
        pad=call.pad,
        maker=call.maker,
    )


def combine_done(group: Group, inflight: InFlight) -> jax.Array:
    """Second half of `combine`: waits for every rank's partial sums and adds them.

    Args:
        group: the group of the start; call inside shard_map over its axis.
        inflight: what `combine_start` returned; usable once.

    Returns:
        [T, H] in Config.dtype; zero where a token has no kept pair.

    Raises:
        ValueError: `inflight` is not a combine of this group, or the axis is not in scope.

    Example:
        >>> out = jax_ep.combine_done(group, jax_ep.combine_start(group, y, recv))
    """
    call = operands.inflight_call(group, "combine_done", inflight, "combine")
    assert inflight.plan is not None
    arrays = operands.plan_arrays(inflight.plan)
    rows, row_weights, route, epoch = operands.vary(
        call, inflight.rows, inflight.weights, arrays.route(), inflight.epoch
    )
    if group.config.batch_invariant:
        out = by_slot.combine(call, rows, row_weights, arrays._replace(**route._asdict()))
    else:
        out = vjp.combine_done(call, rows, row_weights, route, epoch)
    return results.finish(call, arrays, out)


def wait(tree: Any) -> Any:
    """Waits for every array in `tree`, then raises the failure of any open group.

    Args:
        tree: a pytree of arrays.

    Returns:
        `tree`.

    Raises:
        RuntimeError: a group of this process has failed.

    Example:
        >>> loss = jax_ep.wait(step(params, batch))
    """
    ready = _jax_compat.block_until_ready(tree)
    _group.check_open_groups()
    return ready


def block_until_ready(tree: Any) -> Any:
    """The old name of `wait`."""
    _warn.warn("jax_ep.block_until_ready is now jax_ep.wait", DeprecationWarning)
    return wait(tree)


def export_checks() -> list[Any]:
    """Safety checks to disable so that jax.export accepts programs with jax_ep operations.

    Returns:
        A list for `jax.export.export(..., disabled_checks=...)`.

    Example:
        >>> export = jax.export.export(step, disabled_checks=jax_ep.export_checks())
        >>> saved = export(params, batch).serialize()
    """
    targets = (*ffi.TARGETS.values(), *ffi.EACH_TIME.values(), *records.TARGETS.values())
    return [_jax_compat.export_custom_call_check(target) for target in targets]

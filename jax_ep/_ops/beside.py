"""Calls of mode ht on CUDA that run beside other work: on the stream of XLA's own collectives.

XLA starts such a call when its operands are there and waits for it before its first user, so what
stands between the two in the schedule overlaps. Its kernels and NCCL's keep one order on all ranks,
as they share the stream. All operations of mode ht of a group go there, never some: the kernels of
one group on one device must not run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jax_ep import _jax_compat
from jax_ep._ops import ffi
from jax_ep._ops.call import Call
from jax_ep._ops.operations import OPERATIONS, array_types, packed_plan
from jax_ep._types import PlanArrays

_STREAM = "collective"


def applies(call: Call) -> bool:
    """Whether `call` runs beside other work where it is lowered for CUDA."""
    return call.mode == "ht" and call.group._overlaps


def run(operation: str, call: Call, arrays: Mapping[str, jax.Array | None]) -> dict[str, Any]:
    """`ffi.run` of any whole operation of mode ht, in calls that XLA runs asynchronously.

    Rows and what is small travel in two calls, since XLA waits for a call of several results right
    after its start.
    """
    if operation == "plan":
        return _plan(call, arrays)
    parts = {
        "dispatch": (("x", "dispatch_rows_beside"), ("weights", "dispatch_weights_beside")),
        "combine": (("y", "combine_rows_beside"), ("pair_scalars", "combine_scalars_beside")),
    }[operation]
    results: dict[str, Any] = dict.fromkeys(OPERATIONS[operation].results)
    for operand, part in parts:
        if arrays.get(operand) is None:
            continue
        if part == "dispatch_rows_beside" and arrays.get("y") is not None:
            part = "dispatch_dots_beside"
        results |= ffi.run(part, call, arrays, _STREAM)
    if (rows := results.get("recv_x")) is not None:
        results["recv_x"] = rows.reshape(call.rows, rows.shape[-1])
    return results


def _plan(call: Call, arrays: Mapping[str, jax.Array | None]) -> dict[str, Any]:
    packed = ffi.run("plan_beside", call, arrays, _STREAM)["packed_plan"]
    types, (places, _) = array_types(call), packed_plan(call)

    def leaf(name: str) -> jax.Array | None:
        shape = types[name].shape
        if shape is None:
            return None
        end = places[name] + math.prod(shape)
        array: jax.Array = packed[places[name] : end].reshape(shape)
        uniform = call.group.axes if name == "overflow" else ()
        return _jax_compat.as_uniform(array, uniform)

    return {name: leaf(name) for name in PlanArrays._fields}

"""The ten operations as a table: the arrays of each by name, in the order of its custom call.

`primitive`, `ffi` and `reference` take and return arrays under these names. The C++ side of the
table is xla_ffi/signatures.h.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from jax_ep._ops.call import Call
from jax_ep._types import PlanArrays, Route


class Operation(NamedTuple):
    """What an operation reads and makes, and what is static in its custom call alone."""

    operands: tuple[str, ...]
    results: tuple[str, ...]
    attributes: tuple[str, ...] = ()
    # Operands of the start that a done gets again: the reference moves them there, the custom call
    # does not take them.
    carried: tuple[str, ...] = ()


_ROUTE = Route._fields
_PLAN = PlanArrays._fields
_RECEIVED = ("recv_x", "recv_weights")
_COMBINED = ("y", "row_weights", "pair_scalars", "send_slot", "recv_src")

OPERATIONS = {
    "plan": Operation(("topk_idx",), _PLAN, ("counts_load",)),
    "dispatch": Operation(
        ("x", "weights", *_ROUTE, "y", "row_weights"), (*_RECEIVED, "recv_dots"), ("pad",)
    ),
    "ll_dispatch": Operation(("x", "weights", "topk_idx"), (*_PLAN, *_RECEIVED), ("pad",)),
    "combine": Operation(_COMBINED, ("out", "pair_scalars_out")),
    "dispatch_start": Operation(("x", "weights", *_ROUTE), ("epoch",)),
    "dispatch_done": Operation(
        ("epoch", *_ROUTE), _RECEIVED, ("pad", "has_weights"), carried=("x", "weights")
    ),
    "ll_dispatch_start": Operation(("x", "weights", "topk_idx"), ("epoch",)),
    "ll_dispatch_done": Operation(
        ("epoch", "topk_idx"),
        (*_PLAN, *_RECEIVED),
        ("pad", "has_weights"),
        carried=("x", "weights"),
    ),
    "combine_start": Operation(_COMBINED, ("epoch",)),
    "combine_done": Operation(
        ("epoch", "send_slot", "recv_src"),
        ("out", "pair_scalars_out"),
        ("has_pair_scalars",),
        carried=("y", "row_weights"),
    ),
}

# What runs beside other work on a GPU: parts of these operations, with one result if that may be
# (beside.py).
_SLOTS = ("send_slot", "recv_src")
BESIDE = {
    "plan_beside": Operation(("topk_idx",), ("packed_plan",), ("counts_load", "recv_rows")),
    "dispatch_rows_beside": Operation(("x", *_SLOTS), ("recv_x",), ("pad",)),
    "dispatch_weights_beside": Operation(("weights", *_ROUTE), ("recv_weights",), ("pad",)),
    "dispatch_dots_beside": Operation(
        ("x", *_SLOTS, "y", "row_weights"), ("recv_x", "recv_dots"), ("pad",)
    ),
    "combine_rows_beside": Operation(("y", "row_weights", *_SLOTS), ("out",)),
    "combine_scalars_beside": Operation(("pair_scalars", *_SLOTS), ("pair_scalars_out",)),
}

# Whole dispatches whose rows the kernels of GPUs quantise and dequantise (wire.py).
_FORMAT = ("pad", "block", "scale", "columns")
_RECEIVED_FP8 = ("recv_x", "recv_scales", "recv_weights")
FP8_CALLS = {
    "dispatch_fp8": Operation(("x", "weights", *_ROUTE), _RECEIVED_FP8, _FORMAT),
    "ll_dispatch_fp8": Operation(("x", "weights", "topk_idx"), (*_PLAN, *_RECEIVED_FP8), _FORMAT),
}

CALLS = OPERATIONS | BESIDE | FP8_CALLS  # every custom call

# These results exist only if the operand does: dispatch without x delivers no rows.
FOLLOWS = {
    "recv_x": "x",
    "recv_weights": "weights",
    "recv_dots": "y",
    "out": "y",
    "pair_scalars_out": "pair_scalars",
}


class ArrayType(NamedTuple):
    """Shape and dtype of an array of a call; no shape where its layout has no such array."""

    shape: tuple[int, ...] | None
    dtype: Any


_PACKED_ALIGN = 32  # elements; xla_ffi/buffers.h


def packed_plan(call: Call) -> tuple[dict[str, int], int]:
    """Where each leaf of a plan begins in an array of all of them, and that array's size."""
    types, places, size = array_types(call), {}, 0
    for name in _PLAN:
        places[name] = size
        shape = types[name].shape
        elements = 0 if shape is None else math.prod(shape)
        size += -(-elements // _PACKED_ALIGN) * _PACKED_ALIGN
    return places, size


def types_beside(call: Call) -> dict[str, ArrayType]:
    """`array_types` of the calls in BESIDE.

    Rows have the shape that users get. Else XLA would wait for them where it reshapes them, which
    is at once, for it takes no time.
    """
    types = array_types(call)
    if call.row_bytes is None:
        types["recv_x"] = ArrayType(call.recv_shape, call.dtype)
    return types | {"packed_plan": ArrayType((packed_plan(call)[1],), jnp.int32)}


def types_fp8(call: Call) -> dict[str, ArrayType]:
    """`array_types` of the calls in FP8_CALLS."""
    types = array_types(call)
    if not call.keeps_records:
        return types | {"recv_scales": ArrayType(None, jnp.float32)}
    assert call.wire is not None
    return types | {
        "recv_x": ArrayType((call.rows, call.hidden), jnp.float8_e4m3fn),
        "recv_scales": ArrayType(call.scales_shape, call.wire.scale_dtype),
    }


def array_types(call: Call) -> dict[str, ArrayType]:
    """The type that each name of the table stands for in `call`."""
    tokens, top_k, hidden, rows = call.num_tokens, call.top_k, call.hidden, call.rows
    ranks, experts = call.group.num_ranks, call.group.experts_per_rank
    rank_major = call.layout == "rank_major"
    pairs = (ranks, tokens, top_k)
    row, row_type = (hidden, call.dtype) if call.row_bytes is None else (call.row_bytes, jnp.uint8)

    def i32(*shape: int) -> ArrayType:
        return ArrayType(shape, jnp.int32)

    def f32(*shape: int) -> ArrayType:
        return ArrayType(shape, jnp.float32)

    return {
        "x": ArrayType((tokens, row), row_type),
        "weights": f32(tokens, top_k),
        "topk_idx": i32(tokens, top_k),
        "y": ArrayType((rows, hidden), call.dtype),
        "row_weights": f32(rows),
        "pair_scalars": f32(rows, top_k) if rank_major else f32(rows),
        "epoch": i32(1),
        "group_sizes": i32(experts),
        "pairs_per_expert": i32(experts),
        "send_slot": i32(tokens, top_k),
        "recv_src": i32(rows),
        "send_counts": i32(ranks),
        "recv_counts": i32(ranks),
        "num_dropped": i32(),
        "overflow": i32(),
        "recv_topk_idx": i32(*pairs) if rank_major else ArrayType(None, jnp.int32),
        "recv_x": ArrayType((rows, row), row_type),
        "recv_weights": f32(*pairs) if rank_major else f32(rows),
        "recv_dots": f32(rows),
        "out": ArrayType((tokens, hidden), call.dtype),
        "pair_scalars_out": f32(tokens, top_k),
    }

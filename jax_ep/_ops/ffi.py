"""The custom calls: registration with XLA, and the emission of any operation of the table.

Absent arrays cross as zero-element arrays of shape [0], so every target has one arity. Rows are
always flat [R, H] here.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import _extension, _jax_compat
from jax_ep._ops import lowering, sharding
from jax_ep._ops.call import Call
from jax_ep._ops.operations import FOLLOWS, OPERATIONS, array_types

TARGETS = {name: f"jax_ep_{name}" for name in OPERATIONS}

_LAYOUT_CODES = {"expert_major": 0, "expert_batched": 1, "rank_major": 2}
_MODE_CODES = {"ht": 0, "ll": 1}
_PAD_CODES = {"zero": 0, "undefined": 1}

_call = _jax_compat.call_primitive("jax_ep_call", lowering.check, lowering.module_key)

_register_lock = threading.Lock()
_registered: set[str] = set()


def register(platform: str) -> None:
    """Registers the extension's FFI types and targets with XLA, once per platform.

    Called by create_group and not at import: jaxlib 0.10 needs the CPU client to exist before types
    are registered.

    Args:
        platform: "cpu", "CUDA" or "ROCM".
    """
    with _register_lock:
        if platform not in _registered:
            types, targets = _extension.load().registrations(platform)
            _jax_compat.register_ffi(types, targets, platform=platform)
            _registered.add(platform)


def run(name: str, call: Call, arrays: Mapping[str, jax.Array | None]) -> dict[str, Any]:
    """Emits the custom call of operation `name`: arrays by name in and out, as in OPERATIONS.

    All arrays that are given vary over the same axes, and so do the results, but for `overflow`,
    which is uniform over the group.
    """
    operation, types = OPERATIONS[name], array_types(call)
    given = {of for of, array in arrays.items() if array is not None}
    like = arrays["topk_idx" if "topk_idx" in given else "send_slot"]
    assert like is not None

    def operand(of: str) -> jax.Array:
        array = arrays.get(of)
        if array is not None:
            return array
        empty = jnp.zeros((0,), types[of].dtype)
        return _jax_compat.to_varying(empty, _jax_compat.varying_axes(like))

    def shape(of: str) -> tuple[int, ...] | None:
        return types[of].shape if of not in FOLLOWS or FOLLOWS[of] in given else None

    def result(of: str) -> Any:
        uniform = call.group.axes if of == "overflow" else ()
        found = shape(of)
        return _jax_compat.result_type(
            like, (0,) if found is None else found, types[of].dtype, invariant_over=uniform
        )

    attributes = {
        "session": call.group.session_id,
        "mode": _MODE_CODES[call.mode],
        "layout": _LAYOUT_CODES[call.layout],
        "pad": _PAD_CODES[call.pad],
        "has_weights": "weights" in given,
        "has_ride": "ride" in given,
    }
    results = _call(
        sharding.position(call.group),
        *map(operand, operation.operands),
        owner=call.group,
        target=TARGETS[name],
        results=tuple(map(result, operation.results)),
        attributes={
            of: np.int64(attributes[of])
            for of in ("session", "mode", "layout", *operation.attributes)
        },
    )
    return {
        of: None if shape(of) is None else array
        for of, array in zip(operation.results, results, strict=True)
    }

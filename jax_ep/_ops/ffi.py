"""The custom calls: registration with XLA, and the emission of any operation of the table.

Absent arrays cross as zero-element arrays of shape [0], so every target has one arity. Rows are
always flat [R, H] here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep import _extension, _jax_compat
from jax_ep._ops import lowering, sharding
from jax_ep._ops.call import Call
from jax_ep._ops.operations import (
    BESIDE,
    CALLS,
    FOLLOWS,
    FP8_CALLS,
    OPERATIONS,
    ArrayType,
    array_types,
    types_beside,
    types_fp8,
)

TARGETS = {name: f"jax_ep_{name}" for name in CALLS}
# Of groups whose sessions change. XLA records what else it runs on a GPU in command buffers, and
# replays it, to the session that there was.
EACH_TIME = {
    name: target if name in BESIDE else f"{target}_each_time" for name, target in TARGETS.items()
}

_LAYOUT_CODES = {"expert_major": 0, "expert_batched": 1, "rank_major": 2}
_MODE_CODES = {"ht": 0, "ll": 1}
_PAD_CODES = {"zero": 0, "undefined": 1}


def _note_lines(lines: list[tuple[int, str]]) -> None:
    """Tells the extension where calls stand in the program, for Group.report."""
    with contextlib.suppress(ImportError):  # a lowering-only group's, where it is not built
        _extension.load().set_call_lines([(name, line) for name, line in lines if name and line])


# A primitive for each, whose name profiles show.
_calls = {
    name: _jax_compat.call_primitive(target, lowering.check, lowering.module_key, _note_lines)
    for name, target in TARGETS.items()
}


def _explain(error: str) -> str:
    """What an error of XLA that no handler is registered for one of our targets means."""
    if "registered for jax_ep_" not in error:
        return ""
    return (
        "jax_ep: got a program with operations of jax_ep, but this process has no native group, "
        "expected the group that the program was made with; call jax_ep.create_group with its mesh "
        "of real devices, axis and config before the program is compiled (a lowering-only group, "
        "over an AbstractMesh, cannot run)"
    )


_jax_compat.explain_compile_errors(_explain)

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
            if platform == "cpu":  # which records nothing
                targets |= {EACH_TIME[name]: targets[TARGETS[name]] for name in OPERATIONS}
            _jax_compat.register_ffi(types, targets, platform=platform)
            _registered.add(platform)


def _target(operation: str, call: Call) -> str:
    return (EACH_TIME if call.group.config.elastic else TARGETS)[operation]


def _types_of(operation: str) -> Callable[[Call], dict[str, ArrayType]]:
    if operation in BESIDE:
        return types_beside
    return types_fp8 if operation in FP8_CALLS else array_types


def run(
    operation: str,
    call: Call,
    arrays: Mapping[str, jax.Array | None],
    stream: str | None = None,
) -> dict[str, Any]:
    """Emits the custom call of `operation`: arrays by name in and out, as in CALLS.

    All arrays that are given vary over the same axes, and so do the results, but for `overflow`,
    which is uniform over the group.

    Args:
        operation: its name in `operations.CALLS`.
        call: what is static in it.
        arrays: its operands; others are ignored.
        stream: of XLA's, on which it runs asynchronously; None: in order with all else.
    """
    entry = CALLS[operation]
    types = _types_of(operation)(call)
    given = {name for name, array in arrays.items() if array is not None}
    like = arrays["topk_idx" if "topk_idx" in given else "send_slot"]
    assert like is not None

    def operand(name: str) -> jax.Array:
        array = arrays.get(name)
        if array is not None:
            return array
        empty = jnp.zeros((0,), types[name].dtype)
        return _jax_compat.to_varying(empty, _jax_compat.varying_axes(like))

    def shape(name: str) -> tuple[int, ...] | None:
        return types[name].shape if name not in FOLLOWS or FOLLOWS[name] in given else None

    def result(name: str) -> Any:
        uniform = call.group.axes if name == "overflow" else ()
        found = shape(name)
        return _jax_compat.result_type(
            like, (0,) if found is None else found, types[name].dtype, invariant_over=uniform
        )

    attributes = {
        "session": call.group.session_id,
        "sizes": call.sizes,
        "mode": _MODE_CODES[call.mode],
        "layout": _LAYOUT_CODES[call.layout],
        "pad": _PAD_CODES[call.pad],
        "recv_rows": call.rows,
        "counts_load": call.counts_load,
        "has_weights": "weights" in given,
        "has_pair_scalars": "pair_scalars" in given,
        "block": call.wire.block if call.wire else 0,
        "scale": call.wire is not None and call.wire.scale == "ue8m0",
        "columns": call.scales_in_columns,
    }
    operands = [sharding.position(call.group), *map(operand, entry.operands)]
    if stream is not None:
        # XLA (jax 0.11) would fuse a call with slices that it reads, and some of these fusions lose
        # the stream: two calls of the group would run at the same time.
        operands = list(_jax_compat.tie(*operands))
    results = _calls[operation](
        *operands,
        owner=call.group,
        target=_target(operation, call),
        results=tuple(map(result, entry.results)),
        attributes={
            name: attributes[name]
            for name in ("session", "mode", "layout", "sizes", *entry.attributes)
        },
        stream=stream,
    )
    return {
        name: None if shape(name) is None else array
        for name, array in zip(entry.results, results, strict=True)
    }
